"""The slots' tables on the device, and the batch that a step gathers from them.

The host keeps what it can predict (`Seats`: each slot's sequence, its numbers of tokens and pages). Tokens,
page tables, sampling parameters and counts lie on the device by slot. A plan's changes to them are gathered
first and sent together: two copies for a plan that seats sequences, one for a plan in which sequences get
pages, one more for one that samples under masks, none for any other, whatever the number of its rows.

There is one slot more than sequences can have: rows that pad a graph use it, on a page of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from engine.contract.messages import Plan, SlotAssignment
from engine.runtime.device.device_sampling import DeviceSampling
from engine.runtime.device.transfer import upload
from engine.runtime.step.batch import PackedBatch, rows_of
from engine.runtime.step.kv_cache import TokenPlaces
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
    ) -> None:
        """`padding_page`: the page of padding rows, which no sequence has."""
        super().__init__(slots, max_model_len, page_size, vocab_size)
        self.padding_slot = slots
        self.device = device
        # One column more than there are tokens: a padding row writes its second token in any context.
        self.tokens = torch.zeros(slots + 1, max_model_len + 1, dtype=torch.int32, device=device)
        self.page_table = torch.zeros(slots + 1, self.pages_per_sequence, dtype=torch.int32, device=device)
        self.page_table[self.padding_slot] = padding_page
        self.sampling = DeviceSampling.empty(slots + 1, vocab_size, device)
        self._seated: list[SlotAssignment] = []
        self._masked: set[int] = set()
        """Slots that have sampled under a mask, and that no sequence without one has taken since."""
        self._placed: dict[int, int] = {}
        """The pages to be sent, by place in the flattened page table; a later entry replaces an earlier
        one."""

    def apply(self, plan: Plan) -> None:
        super().apply(plan)
        if self._seated:
            self._send_seated(self._seated)
            self._seated = []
        if self._placed:
            at, pages = np.array(list(self._placed), np.int64), np.array([*self._placed.values()], np.int32)
            self.page_table.view(-1).index_copy_(0, *upload([at, pages], self.device))
            self._placed = {}
        if plan.masks:
            self._send_masks(plan)

    def append(self, slots: Sequence[int]) -> None:
        """Note that the device has stored one more token for each slot."""
        for slot in slots:
            self.seat(slot).known_len += 1

    def _take(self, start: SlotAssignment, seat: Seat) -> None:
        self._seated.append(start)

    def _place(self, slot: int, index: int, pages: Sequence[int]) -> None:
        begin = slot * self.pages_per_sequence + index
        self._placed |= zip(range(begin, begin + len(pages)), pages, strict=True)

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

    @staticmethod
    def of(plan: Plan, slots: DeviceSlots) -> DeviceBatch:
        """The plan's batch. Asserts that it follows from the slots' state."""
        return DeviceBatch(plan, slots, *rows_of(plan, slots))

    @cached_property
    def is_decode(self) -> bool:
        """True if every row is one token and samples the next."""
        return self.tokens == len(self.rows) == len(self.sampled)

    @property
    def token_slots(self) -> Tensor:
        """The slot of each token, [T] int64."""
        return self._sent[0]

    @property
    def positions(self) -> Tensor:
        """The position of each token, [T] int64."""
        return self._sent[1]

    @property
    def sampled_at(self) -> Tensor:
        """The last token of each row that samples, [S] int64."""
        return self._sent[2]

    @property
    def sampled_slots(self) -> Tensor:
        """The slot of each row that samples, [S] int32."""
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

    @cached_property
    def places(self) -> TokenPlaces:
        """The places of the step's tokens. No page is cleared: these kernels mask what is behind a row's last
        token."""
        size = self.slots.page_size
        pages = self.slots.page_table[self.token_slots, self.positions // size].long()
        return TokenPlaces(pages, self.positions % size, None)

    @cached_property
    def _sent(self) -> Sequence[Tensor]:
        plan, sampled = self.plan, self.sampled
        slots, lengths = np.array(plan.slots, np.int64), np.array(plan.lengths, np.int64)
        before = np.array([row.start - row.offset for row in self.rows], np.int64)
        return upload(
            [
                np.repeat(slots, lengths),
                np.arange(self.tokens, dtype=np.int64) + np.repeat(before, lengths),
                np.array([row.offset + row.length - 1 for row in sampled], np.int64),
                np.array([row.slot for row in sampled], np.int32),
                np.array([row.end for row in sampled], np.int32),
                slots,
            ],
            self.slots.device,
        )
