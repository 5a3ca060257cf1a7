"""A runner without tensors, whose output shows whether its plans were right.

Its KV store holds, for each position of each page, a number that depends on all tokens up to that
position, as keys and values do. To compute a position it reads the one before *through the slot's
page table*; to sample, it reads all of them. So a wrong page, a stale page, a page that another
sequence overwrote, a skipped or repeated position: each changes the tokens from there on, and they no
longer equal those of `solo`, which has no pages. A model with states reads the number before from its slot's
state instead, so a wrong or a stale state does so, too. On top of that every plan is checked against the
contract in `engine.contract.messages`.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.contract.messages import (
    NUMERIC_FAILURE,
    FinishReason,
    Pending,
    Plan,
    RunnerInfo,
    RunResult,
    SamplingParams,
    SlotAssignment,
    TokenLogprobs,
    Want,
    agreed,
)
from engine.contract.packing import unpacked
from engine.core.grammars.masks import MatcherStanding, is_allowed
from tests.fake_grammars import FakeMatcher

START = 17
"""The number that stands before position 0."""
NUMERIC_SEEDS = 16
"""One sampling seed in so many makes the model fail numerically at some token."""


def runner_info(
    *,
    pages: int = 64,
    page_size: int = 4,
    slots: int = 8,
    max_model_len: int = 256,
    vocab_size: int = 50,
    host_pages: int = 0,
    page_copy_s: float = 0.0,
    state_bytes: int = 0,
    state_places: int = 0,
    drafts_max: int = 0,
    vector_len: int = 0,
    state_windows: int = 0,
    guesses_max: int = 0,
) -> RunnerInfo:
    return RunnerInfo(
        pages=pages,
        page_size=page_size,
        slots=slots,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        dtype="fake",
        load_s=0.0,
        warmup_s=0.0,
        page_bytes=8 * page_size,
        host_pages=host_pages,
        page_copy_s=page_copy_s,
        state_bytes=state_bytes,
        state_places=state_places,
        state_copy_s=page_copy_s if state_places else 0.0,
        drafts_max=drafts_max,
        vector_len=vector_len,
        state_windows=state_windows,
        guesses_max=guesses_max,
        guess_share=0.01,
    )


# -- the model ------------------------------------------------------------------------------------


def kv_of(before: int, token: int, position: int) -> int:
    return hash((before, token, position))


def logits_of(kv: array[int]) -> int:
    """The logits of a sequence's last position, which depend on the KV of every position."""
    return zlib.crc32(kv.tobytes())


def sample(sampling: SamplingParams, logits: int, output_len: int, vocab_size: int, mask: bytes = b"") -> int:
    mixed = hash((sampling.seed, logits, output_len))
    if sampling.seed % NUMERIC_SEEDS == 0 and mixed % 8 == 0:
        return NUMERIC_FAILURE
    token = mixed % vocab_size
    if output_len < sampling.min_tokens:
        while token in sampling.stop_token_ids:
            token = (token + 1) % vocab_size
    while mask and not is_allowed(mask, token):
        token = (token + 1) % vocab_size
    return token


def vector_of(sampling: SamplingParams, kv: array[int]) -> bytes:
    """The vector of a prompt, which depends on what each of its positions gave, in order; empty where the
    model fails numerically."""
    gathered = logits_of(kv)
    if sampling.seed % NUMERIC_SEEDS == 2 and gathered % 8 == 0:  # the API's own seed is 0
        return b""
    return gathered.to_bytes(4, "little") * sampling.vector_len


def logprobs_of(knowledge: int, token: int, tops: int) -> TokenLogprobs:
    mixed = hash((knowledge, token))
    return TokenLogprobs(-(mixed % 1000) / 100, list(range(tops)), [-float(i) for i in range(tops)])


def scores_of(logits: int, scored: bytes) -> list[float]:
    return [-(hash((logits, token)) % 1000) / 100 for token in unpacked(scored)]


@dataclass(frozen=True, slots=True)
class Solo:
    """The output of a sequence that runs alone, without pages."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    reason: FinishReason
    vector: bytes = b""
    scores: list[float] = field(default_factory=list)


def solo(prompt_ids: Sequence[int], sampling: SamplingParams, vocab_size: int, grammar: str = "") -> Solo:
    kv = array("q")
    for position, token in enumerate(prompt_ids):
        kv.append(kv_of(kv[-1] if kv else START, token, position))
    if sampling.vector_len:
        vector = vector_of(sampling, kv)
        return Solo([], [], [], FinishReason.LENGTH if vector else FinishReason.NUMERIC, vector)
    answer = Solo([], [], [], FinishReason.LENGTH)
    if sampling.prompt_logprobs is not None:
        for position, follower in enumerate(prompt_ids[1:]):
            answer.prompt_logprobs.append(logprobs_of(kv[position], follower, sampling.prompt_logprobs))
    answer.scores.extend(scores_of(logits_of(kv), sampling.scored))
    matcher = FakeMatcher(grammar, vocab_size) if grammar else None
    while len(answer.tokens) < sampling.max_tokens:
        if matcher is not None and (end := _end(matcher, sampling)) is not None:
            return Solo(answer.tokens, answer.logprobs, answer.prompt_logprobs, end)
        logits, mask = logits_of(kv), b"" if matcher is None else matcher.mask
        token = sample(sampling, logits, len(answer.tokens), vocab_size, mask)
        if token == NUMERIC_FAILURE:
            return Solo(answer.tokens, answer.logprobs, answer.prompt_logprobs, FinishReason.NUMERIC)
        answer.tokens.append(token)
        if sampling.logprobs is not None:
            answer.logprobs.append(logprobs_of(logits, token, sampling.logprobs))
        if token in sampling.stop_token_ids:
            return Solo(answer.tokens, answer.logprobs, answer.prompt_logprobs, FinishReason.STOP)
        kv.append(kv_of(kv[-1], token, len(kv)))
        if matcher is not None:
            matcher.take(token)
    return answer


def _end(matcher: FakeMatcher, sampling: SamplingParams) -> FinishReason | None:
    """The reason for which an answer ends that has come to where the matcher stands; None if it goes on."""
    if matcher.standing is MatcherStanding.FAILED:
        return FinishReason.GRAMMAR
    may_end = any(is_allowed(matcher.mask, token) for token in sampling.stop_token_ids)
    return FinishReason.STOP if matcher.standing is MatcherStanding.COMPLETE and not may_end else None


# -- the runner -----------------------------------------------------------------------------------


def no_slots() -> Collection[int]:
    return ()


@dataclass(slots=True)
class SlotState:
    """The state that a real runner keeps for a slot."""

    start: SlotAssignment
    tokens: list[int]
    table: list[int] = field(default_factory=list)
    computed_len: int | None = None
    """Tokens computed so far; None until the first row shows how many the prefix cache covers."""
    gathered: array[int] = field(default_factory=lambda: array("q"))
    """What its rows gave for the prompt's vector."""


@dataclass(frozen=True, slots=True)
class Done:
    result: RunResult

    def collect(self) -> RunResult:
        return self.result


class FakeRunner:
    """`held` gives the slots that nothing may be computed for, and so need no row."""

    def __init__(
        self, info: RunnerInfo, step_tokens_max: int, held: Callable[[], Collection[int]] = no_slots
    ) -> None:
        self.info = info
        self._held = held
        self.slots: dict[int, SlotState] = {}
        self._step_tokens_max = step_tokens_max
        self._steps = 0
        self._part_full: dict[int, tuple[int, list[int]]] = {}
        """The length and the tokens of the sequence that last left a page part full, by page."""
        self._store = array("q", bytes(8 * info.pages * info.page_size))
        self._forked: dict[int, int] = {}
        """The lengths of the heads that the plan copies, by page."""
        self._host_store = array("q", bytes(8 * info.host_pages * info.page_size))
        self._states = [(-1, 0)] * info.slots
        """Of each slot's state the number of tokens in it, and the last one's number."""
        self._passed: dict[int, list[tuple[int, int]]] = {}
        """The states that slots passed by right drafts in the step before, their own last."""
        self._places = [(-1, 0)] * info.state_places

    def launch(self, plan: Plan) -> Pending:
        """Execute the plan at once."""
        return Done(self.run(plan))

    def run(self, plan: Plan) -> RunResult:
        self._change_slots(plan)
        self._swap(plan)
        self._copy_states(plan)
        self._passed.clear()
        self._check(plan)
        result = RunResult([], [], [], [], guesses=[])
        wants_logprobs = False
        assert len(plan.masks) in (0, plan.sampled)
        masks = iter(plan.masks or [b""] * plan.sampled)
        drafts = iter(plan.drafts)
        assert len(plan.guesses) in (0, len(plan.wants) - plan.wants.count(Want.NOTHING))
        for slot, position, length, want in zip(
            plan.slots, plan.positions, plan.lengths, plan.wants, strict=True
        ):
            state = self.slots[slot]
            sampling = state.start.sampling
            if want is Want.VERIFY:
                wants_logprobs |= self._verify(state, position, next(drafts), masks, result)
                continue
            self._compute(state, position, length)
            if sampling.prompt_logprobs is not None:
                entries = self._prompt_logprobs(state, position, length)
                if entries:
                    result.prompt_logprobs.append((slot, entries))
            if sampling.vector_len:
                self._gather(state, position, length, result)
            if sampling.scored and position + length == state.start.prompt_len:
                result.scores.append((slot, scores_of(logits_of(self._read(state)), sampling.scored)))
            if want is Want.SAMPLE:
                token, logprobs = self._sample(state, next(masks))
                wants_logprobs |= logprobs is not None
                result.tokens.append(token)
                result.logprobs.append(logprobs)
        if plan.guesses:
            sampled = [slot for slot, want in zip(plan.slots, plan.wants, strict=True) if want]
            result.guesses.extend(map(self._guess, sampled, plan.guesses))
        return result if wants_logprobs else msgspec.structs.replace(result, logprobs=[])

    def _guess(self, slot: int, number: int) -> list[int]:
        """What follows behind a slot's tokens, so long as its grammar and its failures let it, and after a
        while something else."""
        assert 0 <= number <= self.info.guesses_max
        state = self.slots[slot]
        tokens, kv, sampling = [*state.tokens], self._read(state), state.start.sampling
        assert len(kv) == len(tokens) - 1, "all but the newest are computed"
        assert len(tokens) - 1 + number <= len(state.table) * self.info.page_size, "no page for a guess"
        for _ in range(number):
            kv.append(kv_of(kv[-1] if kv else START, tokens[-1], len(kv)))
            token = sample(
                sampling, logits_of(kv), len(tokens) - state.start.prompt_len, self.info.vocab_size
            )
            tokens.append(max(token, 0) if (kv[-1] + number) % 5 else 0)
        return tokens[len(state.tokens) :]

    def _gather(self, state: SlotState, position: int, length: int, result: RunResult) -> None:
        assert position == len(state.gathered), "a vector is of all tokens, since the slot was taken"
        state.gathered.extend(self._store[self._at(state, p)] for p in range(position, position + length))
        if position + length == state.start.prompt_len:
            vector = vector_of(state.start.sampling, state.gathered)
            result.vectors.append((state.start.slot, vector))

    def _verify(
        self, state: SlotState, position: int, drafts: list[int], masks: Iterator[bytes], result: RunResult
    ) -> bool:
        """Compute a row that verifies. Returns whether it wants log-probabilities."""
        known = len(state.tokens)
        state.tokens += drafts
        sampled: list[int] = []
        states: list[tuple[int, int]] = []
        for at in range(len(drafts) + 1):
            self._compute(state, position + at, 1)
            states.append(self._states[state.start.slot])
            token, logprobs = self._sampled(state, known + at, next(masks))
            sampled.append(token)
            result.tokens.append(token)
            result.logprobs.append(logprobs)
        right = agreed(drafts, sampled)
        state.tokens[known:] = [max(token, 0) for token in sampled[: right + 1]]
        state.computed_len = known + right
        self._states[state.start.slot] = states[right]
        self._passed[state.start.slot] = states[: right + 1]
        return state.start.sampling.logprobs is not None

    def _change_slots(self, plan: Plan) -> None:
        self._steps += 1
        assert plan.step == self._steps
        for slot in plan.left:
            state = self.slots.pop(slot)
            if state.computed_len is not None and state.computed_len % self.info.page_size:
                page = state.table[state.computed_len // self.info.page_size]
                self._part_full[page] = state.computed_len, state.tokens
        for start in plan.seated:
            assert start.slot not in self.slots, "a slot is taken twice"
            assert 0 <= start.slot < self.info.slots
            self.slots[start.slot] = SlotState(start, list(start.token_ids))
        for slot, pages in plan.grown:
            assert pages
            assert all(0 <= page < self.info.pages for page in pages)
            self.slots[slot].table += pages

    def _page(self, store: array[int], page: int) -> array[int]:
        return store[page * self.info.page_size : (page + 1) * self.info.page_size]

    def host_page(self, page: int) -> array[int]:
        """What a page of host memory holds."""
        return self._page(self._host_store, page)

    def set_host_page(self, page: int, held: array[int]) -> None:
        size = self.info.page_size
        self._host_store[page * size : (page + 1) * size] = held

    def _swap(self, plan: Plan) -> None:
        """Make the plan's copies in its order."""
        size = self.info.page_size
        there = [host_page for _, host_page in plan.swapped_out]
        assert len(set(there)) == len(there), "two pages are copied to one place"
        assert {page for _, page in plan.swapped_in} <= {p for _, pages in plan.grown for p in pages}
        for page, host_page in plan.swapped_out:
            assert host_page < self.info.host_pages
            copied = self._store[page * size : (page + 1) * size]
            self._host_store[host_page * size : (host_page + 1) * size] = copied
        self._fork(plan)
        for host_page, page in plan.swapped_in:
            copied = self._host_store[host_page * size : (host_page + 1) * size]
            self._store[page * size : (page + 1) * size] = copied
            self._part_full.pop(page, None)

    def _copy_states(self, plan: Plan) -> None:
        """Copy states out of slots, then to them; who begins without one begins anew."""
        places = [place for _, place, _ in plan.saved]
        assert len(set(places)) == len(places), "two states are copied to one place"
        for slot, place, back in plan.saved:
            assert back < len(self._passed.get(slot, [None])), "the slot did not pass that state"
            self._places[place] = self._passed[slot][-1 - back] if back else self._states[slot]
            assert self._places[place][0] % self.info.page_size == 0
        for start in plan.seated:
            self._states[start.slot] = 0, START
        slots = [slot for _, slot in plan.restored]
        assert set(slots) <= {start.slot for start in plan.seated}
        assert len(set(slots)) == len(slots), "two states are copied to one slot"
        for place, slot in plan.restored:
            self._states[slot] = self._places[place]

    def _fork(self, plan: Plan) -> None:
        size, store = self.info.page_size, self._store
        assert {page for _, page, _ in plan.forked} <= {p for _, pages in plan.grown for p in pages}
        self._forked = {page: length for _, page, length in plan.forked}
        assert len(self._forked) == len(plan.forked), "two heads are copied to one place"
        for source, page, length in plan.forked:
            assert 0 < length < size
            copied = store[source * size : source * size + length]
            store[page * size : (page + 1) * size] = copied + array("q", [0] * (size - length))
            self._part_full.pop(page, None)

    def _check(self, plan: Plan) -> None:
        assert plan.slots
        assert len(set(plan.slots)) == len(plan.slots), "two rows for one slot"
        assert sum(plan.lengths) <= self._step_tokens_max, "over budget"
        fresh = {start.slot for start in plan.seated}
        assert fresh <= set(plan.slots), "admitted without a row"
        decodes = {
            s
            for s, state in self.slots.items()
            if s not in fresh and len(state.tokens) == _next(state) and state.start.sampling.max_tokens
        }
        decodes -= self._idle(plan)
        assert decodes == set(plan.slots[: len(decodes)]), "every decode runs in every step, and first"
        tables = Counter(page for state in self.slots.values() for page in state.table)
        assert not self.info.state_bytes or sum(map(len, plan.drafts)) <= self.info.state_windows
        drafts = iter(plan.drafts)
        for slot, position, length, want in zip(
            plan.slots, plan.positions, plan.lengths, plan.wants, strict=True
        ):
            if self.info.state_bytes:
                assert position == self._states[slot][0], "a slot's state has all tokens before its next row"
            own = next(drafts) if want is Want.VERIFY else []
            assert 0 <= len(own) <= self.info.drafts_max
            self._check_row(self.slots[slot], position, length, want, tables, own)
        assert not list(drafts)

    def _idle(self, plan: Plan) -> set[int]:
        """Slots that could decode, and need not be in this plan."""
        return set(self._held()) - set(plan.slots)

    def _check_row(
        self,
        state: SlotState,
        position: int,
        length: int,
        want: Want,
        tables: Counter[int],
        drafts: list[int],
    ) -> None:
        size, end = self.info.page_size, position + length
        if state.computed_len is not None:
            assert position == state.computed_len, "a row continues where its slot stands"
        elif position % size:
            page = state.table[position // size]
            is_forked = self._forked.get(page) == position % size
            assert is_forked or self._part_full.get(page) == (position, state.tokens), (
                "a prefix hit is whole pages; else it was forked or stalled"
            )
        assert length >= 1
        assert end <= len(state.tokens) + len(drafts), "only known tokens and drafts can be computed"
        samples = end == len(state.tokens) + len(drafts) and bool(state.start.sampling.max_tokens)
        assert want is ((Want.VERIFY if drafts else Want.SAMPLE) if samples else Want.NOTHING)
        assert length == len(drafts) + 1 or not drafts, "a row verifies behind its newest token"
        output_max = state.start.prompt_len + state.start.sampling.max_tokens
        assert end < output_max or not samples, "a row beyond the last token"
        assert not set(drafts) & set(state.start.sampling.stop_token_ids), "a draft behind an end"
        assert len(state.tokens) <= self.info.max_model_len
        assert len(set(state.table)) == len(state.table)
        assert end <= len(state.table) * size, "a row needs pages for all it computes"
        for page in state.table[position // size : (end - 1) // size + 1]:
            assert tables[page] == 1, "a page that others read is written"

    def _compute(self, state: SlotState, position: int, length: int) -> None:
        for p in range(position, position + length):
            before = self._before(state, p)
            self._store[self._at(state, p)] = kv_of(before, state.tokens[p], p)
        state.computed_len = end = position + length
        if self.info.state_bytes:
            self._states[state.start.slot] = end, self._store[self._at(state, end - 1)]

    def _before(self, state: SlotState, position: int) -> int:
        """What the model keeps of the tokens before a position."""
        if self.info.state_bytes and (known := self._states[state.start.slot])[0] == position:
            return known[1]
        return self._store[self._at(state, position - 1)] if position else START

    def _at(self, state: SlotState, position: int) -> int:
        page, offset = divmod(position, self.info.page_size)
        return state.table[page] * self.info.page_size + offset

    def _read(self, state: SlotState) -> array[int]:
        """The KV of all positions of a sequence, gathered through its page table."""
        size, kv = self.info.page_size, array("q")
        for page in state.table:
            kv += self._store[page * size : (page + 1) * size]
        return kv[: state.computed_len]

    def _sample(self, state: SlotState, mask: bytes) -> tuple[int, TokenLogprobs | None]:
        token, logprobs = self._sampled(state, len(state.tokens), mask)
        state.tokens.append(max(token, 0))  # a sequence that failed has one more row when steps overlap
        return token, logprobs

    def _sampled(self, state: SlotState, at: int, mask: bytes) -> tuple[int, TokenLogprobs | None]:
        """The token at a position, behind those that are computed."""
        sampling, logits = state.start.sampling, logits_of(self._read(state))
        output_len = at - state.start.prompt_len
        token = sample(sampling, logits, output_len, self.info.vocab_size, mask)
        return token, None if sampling.logprobs is None else logprobs_of(logits, token, sampling.logprobs)

    def _prompt_logprobs(self, state: SlotState, position: int, length: int) -> list[TokenLogprobs]:
        tops = state.start.sampling.prompt_logprobs
        assert tops is not None
        last = min(position + length, state.start.prompt_len - 1)
        return [
            logprobs_of(self._store[self._at(state, p)], state.tokens[p + 1], tops)
            for p in range(position, last)
        ]


def _next(state: SlotState) -> int:
    """The position at which the slot's next row would end if it computed one token."""
    assert state.computed_len is not None
    return state.computed_len + 1
