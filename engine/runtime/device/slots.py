"""The slots' tables on the device, and the batch that a step gathers from them.

The host keeps what it can predict (`Seats`: each slot's sequence, its numbers of tokens and pages). Tokens,
page tables, sampling parameters and counts lie on the device by slot. A plan's changes to them are gathered
first and sent together: two copies for a plan that seats sequences, one for a plan in which sequences get
pages, one more for one that samples under masks, one for one that verifies drafts, none for any other,
whatever the number of its rows.

How many drafts of a row are right is known on the device alone until the host reads the tokens. It need not
be told: the next row of the sequence begins where those that count end, so the plan says it. Until then the
sequence has no row.

There is one slot more than sequences can have: rows that pad a graph use it, on a page of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import compress, count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.contract.messages import Plan, SlotAssignment, Want
from engine.runtime.device.device_sampling import DeviceSampling
from engine.runtime.device.graphs import Drafted
from engine.runtime.device.transfer import upload
from engine.runtime.step.batch import PackedBatch
from engine.runtime.step.kv_cache import TokenPlaces
from engine.runtime.step.protocols import Ahead
from engine.runtime.step.seats import Seat, Seats


class DeviceSlots(Seats):
    def __init__(
        self,
        slots: int,
        max_model_len: int,
        page_size: int,
        vocab_size: int,
        padding_page: int,
        device: torch.device,
        drafts: int = 0,
    ) -> None:
        """`padding_page`: the page of padding rows, which no sequence has. `drafts`: those of a step at most,
        over all rows."""
        super().__init__(slots, max_model_len, page_size, vocab_size)
        self.padding_slot = slots
        self.device = device
        # One column more than there are tokens: a padding row writes its second token in any context.
        self.tokens = torch.zeros(slots + 1, max_model_len + 1, dtype=torch.int32, device=device)
        self.page_table = torch.zeros(slots + 1, self.pages_per_sequence, dtype=torch.int32, device=device)
        self.page_table[self.padding_slot] = padding_page
        self.sampling = DeviceSampling.empty(slots + 1, vocab_size, device, drafts)
        self._seated: list[SlotAssignment] = []
        self._masked: set[int] = set()
        """Slots that have sampled under a mask, and that no sequence without one has taken since."""
        self._placed: dict[int, int] = {}
        """The pages to be sent, by place in the flattened page table; a later entry replaces an earlier
        one."""
        self._verified: dict[int, int] = {}
        """The drafts of each slot of which it is not known how many are right."""
        self.masked_by: list[int] = []
        """The place of the mask of each token that the last plan samples, -1 where it has none; empty where
        the plan has no drafts."""

    def apply(self, plan: Plan) -> None:
        super().apply(plan)
        if self._seated:
            self._send_seated(self._seated)
            self._seated = []
        if self._placed:
            at, pages = np.array(list(self._placed), np.int64), np.array([*self._placed.values()], np.int32)
            self.page_table.view(-1).index_copy_(0, *upload([at, pages], self.device))
            self._placed = {}
        if self._verified:
            self._settle(plan)
        self.masked_by = []
        if plan.drafts:
            self._send_drafts(plan)
            self._send_masks_ahead(plan)
        elif plan.masks:
            self._send_masks(plan)

    def append(self, slots: Sequence[int]) -> None:
        """Note that the device has stored one more token for each slot."""
        for slot in slots:
            self.seat(slot).known_len += 1

    def extend(self, plan: Plan) -> None:
        """Note what the device has stored for a plan with drafts: one more token for each slot that samples,
        and as many behind as are right."""
        drafts = iter(plan.drafts)
        for slot, want in zip(plan.slots, plan.wants, strict=True):
            if want is Want.VERIFY:
                self._verified[slot] = len(next(drafts))
            elif want:
                self.seat(slot).known_len += 1

    def _settle(self, plan: Plan) -> None:
        """Learn from where a plan's rows begin how many tokens are known of slots that have verified."""
        for slot, position in zip(plan.slots, plan.positions, strict=True):
            drafts = self._verified.pop(slot, None)
            if drafts is not None:
                seat, known_len = self.seat(slot), position + 1
                assert 1 <= known_len - seat.known_len <= drafts + 1, f"slot {slot}: {known_len} tokens known"
                seat.known_len = known_len

    def _take(self, start: SlotAssignment, seat: Seat) -> None:
        self._verified.pop(start.slot, None)
        self._seated.append(start)

    def _place(self, slot: int, index: int, pages: Sequence[int]) -> None:
        begin = slot * self.pages_per_sequence + index
        self._placed |= zip(range(begin, begin + len(pages)), pages, strict=True)

    def _send_drafts(self, plan: Plan) -> None:
        """Put drafts where the tokens are to be that they stand for."""
        width, rows = self.tokens.shape[1], zip(plan.slots, plan.positions, plan.wants, strict=True)
        begins = [slot * width + at + 1 for slot, at, want in rows if want is Want.VERIFY]
        places = [begin + np.arange(len(own)) for begin, own in zip(begins, plan.drafts, strict=True)]
        ids = np.array([token for own in plan.drafts for token in own], np.int32)
        self.tokens.view(-1).index_copy_(0, *upload([np.concatenate(places), ids], self.device))

    def _send_masks_ahead(self, plan: Plan) -> None:
        """Send the masks of a plan with drafts: a slot has the one of its first token, and the others are
        behind those of all slots."""
        rows = zip(plan.slots, plan.lengths, plan.wants, strict=True)
        tokens = [
            (slot, at)
            for slot, length, want in rows
            if want
            for at in range(length if want is Want.VERIFY else 1)
        ]
        if not plan.masks:
            self.masked_by = [-1] * len(tokens)
            return
        spare = count(self.slots + 1)
        places = [next(spare) if at else slot for slot, at in tokens]
        masked = {place: mask for place, mask in zip(places, plan.masks, strict=True) if mask}
        self.masked_by = [place if place in masked else -1 for place in places]
        first = [place for place in masked if place < self.slots]
        ahead = {place: mask for place, mask in masked.items() if place > self.slots}
        self.sampling.mask(first, [masked[slot] for slot in first], ahead)
        self._masked.update(first)

    def _send_masks(self, plan: Plan) -> None:
        sampled = compress(plan.slots, plan.wants)
        masked = {slot: mask for slot, mask in zip(sampled, plan.masks, strict=True) if mask}
        self.sampling.mask(list(masked), list(masked.values()))
        self._masked |= masked.keys()

    def _send_seated(self, seated: Sequence[SlotAssignment]) -> None:
        width = self.tokens.shape[1]
        lengths = [start.known_len for start in seated]
        places = [start.slot * width + np.arange(n) for start, n in zip(seated, lengths, strict=True)]
        ids = np.frombuffer(bytearray().join([start.ids for start in seated]), np.int32)
        self.tokens.view(-1).index_copy_(0, *upload([np.concatenate(places), ids], self.device))
        self.sampling.seat_all(
            [start.slot for start in seated],
            [start.sampling for start in seated],
            [start.prompt_len for start in seated],
        )
        if stale := self._masked.intersection(start.slot for start in seated):
            self.sampling.unmask(sorted(stale))
            self._masked -= stale
        for start, length in zip(seated, lengths, strict=True):
            if start.sampling.needs_history:
                own = self.tokens[start.slot]
                self.sampling.count(start.slot, own[: start.prompt_len], own[start.prompt_len : length])


class DeviceBatch(PackedBatch):
    """A plan's rows, gathered on the device from slots, positions and lengths that are sent in one copy."""

    slots: DeviceSlots

    @cached_property
    def is_decode(self) -> bool:
        """True if behind every token the next is sampled: rows decode, or verify drafts."""
        return self.tokens == self.plan.sampled

    @property
    def streams(self) -> tuple[Sequence[int], Sequence[int]]:
        """The slot of each token of rows that decode or verify, and the number of keys that it sees."""
        slots, ends = self.plan.slots, [row.end for row in self.rows]
        if self.drafted is None:
            return slots, ends
        rows = list(zip(slots, ends, self.drafted.counts, strict=True))
        own = [slot for slot, _, tokens in rows for _ in range(tokens)]
        return own, [at for _, end, tokens in rows for at in range(end - tokens + 1, end + 1)]

    @cached_property
    def stream_tokens(self) -> int:
        """The number of tokens at the start in rows that decode or verify drafts."""
        return self.decode_rows + sum(len(own) + 1 for own in self.plan.drafts)

    @cached_property
    def drafted(self) -> Drafted | None:
        """The tokens that are sampled, as drafts are to them; None where there are no drafts."""
        plan = self.plan
        if not plan.drafts:
            return None
        wants = zip(plan.lengths, plan.wants, strict=True)
        behind = [length - 1 if want is Want.VERIFY else 0 for length, want in wants if want]
        return Drafted(
            [at for own in behind for at in range(own + 1)],
            [own - at for own in behind for at in range(own + 1)],
            self.slots.masked_by,
        )

    @property
    def ahead(self) -> Ahead | None:
        """The tensors of `drafted`, on the device."""
        if self.drafted is None:
            return None
        before, behind, masked_by, windows = self._sent[6:]
        return Ahead(before, behind, masked_by, self.drafted.most, windows)

    @property
    def token_slots(self) -> Tensor:
        """The slot of each token, [T] int64."""
        return self._sent[0]

    @property
    def positions(self) -> Tensor:
        """The position of each token, [T] int64."""
        return self._sent[1]

    @property
    def stream_lengths(self) -> Tensor:
        """The keys that each token of the first rows sees, those that decode or verify: [any] int32."""
        return self.sampled_lengths[: self.stream_tokens]

    @property
    def sampled_at(self) -> Tensor:
        """The tokens behind which one is sampled, [S] int64."""
        return self._sent[2]

    @property
    def sampled_slots(self) -> Tensor:
        """The slots of the new tokens, [S] int32."""
        return self._sent[3]

    @property
    def sampled_lengths(self) -> Tensor:
        """The positions of the new tokens, [S] int32."""
        return self._sent[4]

    @cached_property
    def token_ids(self) -> Tensor:
        return self.slots.tokens[self.token_slots, self.positions].long()

    @cached_property
    def page_tables(self) -> Tensor:
        """The rows' page tables, [R, pages per sequence] int32."""
        return self.slots.page_table[self._sent[5]]

    @property
    def token_tables(self) -> Tensor:
        """The page table of each token's row, [T, pages per sequence] int32."""
        return self.slots.page_table[self.token_slots]

    @cached_property
    def places(self) -> TokenPlaces:
        """The places of the step's tokens. No page is cleared: these kernels mask what is behind a row's last
        token."""
        size = self.slots.page_size
        pages = self.slots.page_table[self.token_slots, self.positions // size].long()
        return TokenPlaces(pages, self.positions % size, None)

    @cached_property
    def _sent(self) -> Sequence[Tensor]:
        plan, drafted = self.plan, self.drafted
        slots, lengths = np.array(plan.slots, np.int64), np.array(plan.lengths, np.int64)
        before = np.array([row.start - row.offset for row in self.rows], np.int64)
        last = np.array([row.offset + row.length - 1 for row in self.sampled], np.int64)
        own = np.array([row.slot for row in self.sampled], np.int32)
        ends = np.array([row.end for row in self.sampled], np.int32)
        columns: list[NDArray[np.int32]] = []
        if drafted is not None:  # a token for each draft beside the one of its row
            columns = [np.array(column, np.int32) for column in drafted.columns]
            row_of = np.cumsum(columns[0] == 0) - 1
            last, own, ends = last[row_of] - columns[1], own[row_of], ends[row_of] - columns[1]
        return upload(
            [
                np.repeat(slots, lengths),
                np.arange(self.tokens, dtype=np.int64) + np.repeat(before, lengths),
                last,
                own,
                ends,
                slots,
                *columns,
            ],
            self.slots.device,
        )
