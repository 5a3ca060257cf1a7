"""Writes plans by hand: a scheduler's bookkeeping without its decisions."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from engine.contract.messages import (
    Plan,
    RunResult,
    SamplingParams,
    SlotAssignment,
    TokenLogprobs,
    Want,
    agreed,
)
from engine.runtime.host.host_runner import HostRunner

if TYPE_CHECKING:  # it imports Triton, which a CPU's tests do without
    from engine.runtime.device.device_runner import DeviceRunner


@dataclass
class Life:
    """One sequence, as the driver follows it."""

    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    pages: list[int] = field(default_factory=list)
    host_pages: list[int] = field(default_factory=list)
    computed: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class Driver:
    """Hands out pages in shuffled order, so that they never lie side by side. With `poison`, every page
    that nobody owns holds NaN, in host memory, too."""

    def __init__(self, runner: HostRunner | DeviceRunner, *, seed: int = 0, poison: bool = True) -> None:
        self.runner = runner
        self.lives: dict[int, Life] = {}
        self._free = list(range(runner.info.pages))
        random.Random(seed).shuffle(self._free)
        self._host_free = list(range(runner.host.pages))
        random.Random(seed).shuffle(self._host_free)
        self._swapped_out: list[tuple[int, int]] = []
        self._swapped_in: list[tuple[int, int]] = []
        self._forked: list[tuple[int, int, int]] = []
        self._moved: list[tuple[int, list[int]]] = []
        self._poison = poison
        self._left: list[int] = []
        self._seated: list[SlotAssignment] = []
        if poison:
            self._spoil(self._free)
            self._spoil_host(self._host_free)

    def seat(
        self,
        slot: int,
        tokens: Sequence[int],
        sampling: SamplingParams,
        prompt_len: int | None = None,
    ) -> Life:
        life = Life(list(tokens), prompt_len or len(tokens), sampling)
        self.lives[slot] = life
        self._seated.append(SlotAssignment.of(slot, list(tokens), life.prompt_len, sampling))
        return life

    def leave(self, slot: int) -> None:
        life = self.lives.pop(slot)
        self._left.append(slot)
        self._free = life.pages + self._free
        if self._poison:
            self._spoil(life.pages)

    def swap_out(self, slot: int) -> Life:
        """The slot is left, and its pages are copied to host memory by the next step, which may write to
        them."""
        life = self.lives.pop(slot)
        self._left.append(slot)
        kept = -(-life.computed // self.runner.info.page_size)
        life.host_pages, self._host_free = self._host_free[:kept], self._host_free[kept:]
        self._swapped_out += zip(life.pages, life.host_pages, strict=False)
        self._free = life.pages + self._free
        life.pages = []
        return life

    def swap_in(self, slot: int, life: Life) -> None:
        """It takes a slot again, and its pages come back by the next step."""
        self.lives[slot] = life
        self._seated.append(SlotAssignment.of(slot, list(life.tokens), life.prompt_len, life.sampling))
        count = len(life.host_pages)
        life.pages, self._free = self._free[:count], self._free[count:]
        self._swapped_in += zip(life.host_pages, life.pages, strict=True)
        self._moved.append((slot, list(life.pages)))
        life.host_pages = []

    def fork(self, slot: int, source: Life, length: int, sampling: SamplingParams) -> Life:
        """A sequence with the prompt of another takes its first tokens: the next step copies their pages."""
        size = self.runner.info.page_size
        life = self.seat(slot, source.tokens[: source.prompt_len], sampling)
        count = -(-length // size)
        life.pages, self._free = self._free[:count], self._free[count:]
        for index, (page, own) in enumerate(zip(source.pages, life.pages, strict=False)):
            self._forked.append((page, own, min(size, length - index * size)))
        self._moved.append((slot, list(life.pages)))
        life.computed = length
        return life

    def read(self, rows: Sequence[tuple[int, int]]) -> RunResult:
        """Compute so many further tokens of each slot, and sample none."""
        return self.step(rows, samples=False)

    def step(
        self,
        rows: Sequence[tuple[int, int]],
        drafts: Mapping[int, Sequence[int]] = {},
        *,
        samples: bool = True,
    ) -> RunResult:
        """Compute so many further tokens of each slot; a row that reaches what is known samples. `drafts`: by
        slot, of rows of one token, which verify them."""
        verified = [(slot, 1 + len(drafts[slot])) for slot, _ in rows if slot in drafts]
        decodes = [row for row in rows if row[0] not in drafts and row[1] == 1]
        rows = [*decodes, *verified, *[row for row in rows if row[0] not in drafts and row[1] > 1]]
        size = self.runner.info.page_size
        grown, positions, wants = self._moved, [], []
        for slot, length in rows:
            life = self.lives[slot]
            end = life.computed + length
            needed = -(-end // size) - len(life.pages)
            if needed > 0:
                pages, self._free = self._free[:needed], self._free[needed:]
                life.pages += pages
                grown.append((slot, pages))
            positions.append(life.computed)
            if slot in drafts:
                assert life.computed == len(life.tokens) - 1
                wants.append(Want.VERIFY)
                continue
            wants.append(Want.SAMPLE if samples and end == len(life.tokens) else Want.NOTHING)
            life.computed = end
        slots, lengths = [slot for slot, _ in rows], [length for _, length in rows]
        copies = self._swapped_out, self._swapped_in
        changes = self._left, self._seated, grown
        own_drafts = [list(drafts[slot]) for slot, _ in verified]
        rest: dict[str, Any] = {"forked": self._forked, "drafts": own_drafts}
        plan = Plan(0, *changes, slots, positions, lengths, wants, *copies, **rest)
        self._left, self._seated, self._moved = [], [], []
        self._swapped_out, self._swapped_in, self._forked = [], [], []
        result = self.runner.run(plan)
        if self._poison:
            self._spoil(set(self._free).intersection(page for page, _ in copies[0]))
            self._spoil_host([page for page, _ in copies[1]])
        self._host_free += [page for page, _ in copies[1]]
        self._commit([slot for slot, want in zip(slots, wants, strict=True) if want], drafts, result)
        return result

    def finish(self, slots: Sequence[int], outputs: int, chunk: int = 1 << 20) -> None:
        """Run until each slot has so many output tokens: decodes first, then one chunk of one prompt."""
        while True:
            waiting = [s for s in slots if len(self.lives[s].output) < outputs]
            if not waiting:
                return
            rest = {s: len(self.lives[s].tokens) - self.lives[s].computed for s in waiting}
            decodes = [(s, 1) for s in waiting if rest[s] == 1]
            prefills = [(s, min(chunk, rest[s])) for s in waiting if rest[s] > 1]
            self.step(decodes + (prefills[:1] if chunk < 1 << 20 else prefills))

    def finish_by(
        self, answers: Mapping[int, Sequence[int]], right: float, rng: random.Random, *, chunk: int, most: int
    ) -> int:
        """Run until each slot has its answer, by drafts of which a share is right: decodes, rows that verify
        `most` of them at most, as far as a step has windows for them, then one chunk of one prompt. Returns
        the number of drafts."""
        info = self.runner.info
        count = 0
        while True:
            rows, drafts = [], dict[int, list[int]]()
            room = info.state_windows if info.state_bytes else most * len(answers)
            for slot, answer in answers.items():
                life = self.lives[slot]
                left, rest = answer[len(life.output) :], len(life.tokens) - life.computed
                if rest == 1 and left:
                    rows.append((slot, 1))
                    own = [
                        token if rng.random() < right else rng.randrange(info.vocab_size)
                        for token in left[: rng.randint(0, min(most, len(left) - 1, room))]
                    ]
                    drafts |= {slot: own} if own else {}
                    room -= len(own)
                elif rest > 1 and not any(length > 1 for _, length in rows):
                    rows.append((slot, min(chunk, rest)))
            if not rows:
                return count
            count += sum(map(len, drafts.values()))
            self.step(rows, drafts)

    def _commit(self, sampled: Sequence[int], drafts: Mapping[int, Sequence[int]], result: RunResult) -> None:
        assert len(result.tokens) == len(sampled) + sum(map(len, drafts.values()))
        logprobs = result.logprobs or [None] * len(result.tokens)
        first = 0
        for slot in sampled:
            life, own = self.lives[slot], drafts.get(slot, ())
            tokens = result.tokens[first : first + len(own) + 1]
            stays = agreed(own, tokens) + 1
            life.tokens += tokens[:stays]
            life.logprobs += [entry for entry in logprobs[first : first + stays] if entry is not None]
            if slot in drafts:
                life.computed += stays
            first += len(tokens)
        for slot, entries in result.prompt_logprobs:
            self.lives[slot].prompt_logprobs += entries

    @torch.inference_mode()
    def _spoil(self, pages: Collection[int]) -> None:
        for cache in (*self.runner.cache.keys, *self.runner.cache.values):
            cache[list(pages)] = torch.nan

    @torch.inference_mode()
    def _spoil_host(self, pages: Collection[int]) -> None:
        for host in (*self.runner.host.keys, *self.runner.host.values):
            host[list(pages)] = torch.nan
