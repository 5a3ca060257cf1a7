"""Grammars on threads, by llguidance. Tests wait for what threads do, and time nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLParserLimits

from engine.contract import grammars
from engine.contract.grammars import Matcher, Vocabulary, vocabulary_of
from engine.core.drafts.price import Sureness
from engine.core.grammars import lanes, threads
from engine.core.grammars.lanes import Lane
from engine.core.grammars.masks import Filled, MatcherStanding, is_allowed, is_single
from engine.core.grammars.threads import CACHED_MAX, PROVEN, GrammarThreads
from engine.demo import MODEL_DIR
from tests.waiting import PATIENCE_S

VOCAB = 2048
END = 1


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return vocabulary_of((MODEL_DIR / "tokenizer.json").read_text(), VOCAB + 40, [END])


class Bell:
    """Rings, and what came with them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._rung = threading.Event()
        self.grammars = GrammarThreads(vocabulary, self._rung.set)

    def filled(self, *handles: int) -> dict[int, Filled]:
        """The masks of these sequences, and of no other, once they are there."""
        found: dict[int, Filled] = {}
        while found.keys() != set(handles):
            self._rung.clear()
            for filled in self.grammars.take_filled():
                assert filled.handle in handles
                assert filled.handle not in found
                found[filled.handle] = filled
            if found.keys() != set(handles):
                assert self._rung.wait(PATIENCE_S), "nobody rang"
        return found


@pytest.fixture
def bell(vocabulary: Vocabulary) -> Bell:
    return Bell(vocabulary)


def choice(*texts: str) -> str:
    return Matcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, texts)))


def spelt(bell: Bell, vocabulary: Vocabulary, handle: int, text: str) -> Filled:
    """The mask behind a text, of a sequence whose first mask is there."""
    filled = None
    for token in vocabulary.tokenize_str(text):
        bell.grammars.advance([(handle, token)])
        filled = bell.filled(handle)[handle]
    assert filled is not None
    return filled


def test_masks_follow_the_tokens_of_each_sequence(bell: Bell, vocabulary: Vocabulary) -> None:
    grammar = choice("aba", "abba")
    for handle in (1, 2, 3):
        bell.grammars.open(handle, grammar, "")
    first = bell.filled(1, 2, 3)
    assert len({filled.mask for filled in first.values()}) == 1
    assert all(len(filled.mask) == 4 * -(-(VOCAB + 40) // 32) for filled in first.values())
    a, b = vocabulary.tokenize_str("a")[0], vocabulary.tokenize_str("b")[0]
    assert is_allowed(first[1].mask, a)
    assert not is_allowed(first[1].mask, b)
    assert not is_allowed(first[1].mask, VOCAB + 5), "no token is there"
    bell.grammars.advance([(1, a), (2, a)])
    second = bell.filled(1, 2)
    assert second[1].mask == second[2].mask != first[1].mask
    bell.grammars.advance([(1, b), (2, a), (3, a)])  # 2 goes where nothing may
    third = bell.filled(1, 2, 3)
    assert [third[handle].standing for handle in (1, 2, 3)] == [
        MatcherStanding.GOES_ON,
        MatcherStanding.FAILED,
        MatcherStanding.GOES_ON,
    ]
    assert third[3].mask == second[1].mask, "its own matcher"


def test_masks_behind_drafts_are_those_that_the_tokens_themselves_have(
    bell: Bell, vocabulary: Vocabulary
) -> None:
    """As far as the grammar allows the drafts and goes on behind them; a matcher is not moved by them."""
    grammar = choice("abcab", "abxab")
    a, b, c, x = (vocabulary.tokenize_str(text)[0] for text in "abcx")
    for handle in (1, 2, 3, 4):
        bell.grammars.open(handle, grammar, "")
    bell.filled(1, 2, 3, 4)
    bell.grammars.advance([(1, a), (2, a), (3, a)], {1: [b, c, x], 2: [b, b], 3: []})
    foreseen = bell.filled(1, 2, 3)
    assert list(foreseen[1].drafts) == [b, c], "behind these a token is forced by which it is complete"
    assert list(foreseen[2].drafts) == list(foreseen[3].drafts) == [b], "it allows no other"
    assert [list(foreseen[handle].why) for handle in (1, 2, 3)] == [
        [Sureness.SURE, Sureness.DRAFTED],  # what is drafted, and the only one; and one of two
        [Sureness.SURE],
        [Sureness.SURE],
    ]
    masks = []
    bell.grammars.advance([(4, a)])
    assert not bell.filled(4)[4].drafts, "none was asked for"
    for token in (b, c):
        bell.grammars.advance([(4, token)])
        masks.append(bell.filled(4)[4].mask)
    assert list(foreseen[1].ahead) == masks
    assert list(foreseen[2].ahead) == masks[:1]
    bell.grammars.advance([(1, b), (1, c), (2, b), (2, x)], {1: []})
    behind = bell.filled(1, 2)
    assert behind[1].mask == masks[1]
    assert behind[2].standing is MatcherStanding.GOES_ON
    assert not behind[1].drafts, "forced, and the end"


def test_the_keys_of_a_schema_are_drafted_and_sure(bell: Bell, vocabulary: Vocabulary) -> None:
    """The text of a key and what stands around it takes few steps, though nothing was found likely."""
    properties = {name: {"type": "boolean"} for name in ("description", "available")}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    compact = {"x-guidance": {"whitespace_flexible": False}, **schema, "additionalProperties": False}
    bell.grammars.open(1, Matcher.grammar_from_json_schema(json.dumps(compact)), "")
    bell.filled(1)
    opening = vocabulary.tokenize_str('{"')[0]
    bell.grammars.advance([(1, opening)], {1: []})
    foreseen = bell.filled(1)[1]
    assert '{"description":'.startswith(vocabulary.decode_str([opening, *foreseen.drafts]))
    assert len(foreseen.drafts) >= min(4, threads.FORESEEN_MAX)
    assert {*foreseen.why} == {Sureness.SURE}
    assert all(is_single(mask) for mask in foreseen.ahead[:-1])


def test_a_complete_matcher_allows_the_end_alone(bell: Bell, vocabulary: Vocabulary) -> None:
    bell.grammars.open(1, choice("ab"), "")
    bell.filled(1)
    last = spelt(bell, vocabulary, 1, "ab")
    assert last.standing is MatcherStanding.COMPLETE
    assert [token for token in range(VOCAB) if is_allowed(last.mask, token)] == [END]


@pytest.mark.parametrize("grammar", ["{{{", 'start: "a" b', '{"grammars": 5}'])
def test_what_cannot_be_compiled_fails(bell: Bell, grammar: str) -> None:
    for handle in (1, 2):
        bell.grammars.open(handle, grammar, "")
        assert bell.filled(handle)[handle].standing is MatcherStanding.FAILED


def test_what_a_thread_raises_ends_its_sequence_alone(
    bell: Bell, monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary
) -> None:
    class Panic(BaseException):
        """llguidance's panics are no Exceptions."""

    real = vars(threads)["compiled"]

    def compiled(vocabulary: Vocabulary, grammar: str) -> Matcher:
        if grammar == "panics":
            raise Panic
        matcher: Matcher = real(vocabulary, grammar)
        return matcher

    monkeypatch.setattr(threads, "compiled", compiled)
    for handle, grammar in enumerate(("panics", choice("ab"), "panics"), 1):
        bell.grammars.open(handle, grammar, "")
    found = bell.filled(1, 2, 3)
    assert [found[h].standing for h in (1, 2, 3)] == [
        MatcherStanding.FAILED,
        MatcherStanding.GOES_ON,
        MatcherStanding.FAILED,
    ]


def test_a_grammar_is_compiled_once_and_the_cache_is_bounded(
    bell: Bell, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiles: list[str] = []
    real = vars(threads)["compiled"]

    def compiled(vocabulary: Vocabulary, grammar: str) -> Matcher:
        compiles.append(grammar)
        matcher: Matcher = real(vocabulary, grammar)
        return matcher

    monkeypatch.setattr(threads, "compiled", compiled)
    monkeypatch.setattr(threads, "CACHED_MAX", 3)
    assert CACHED_MAX > 3
    texts = [choice(f"a{number}") for number in range(4)]
    for handle, text in enumerate([texts[0], texts[0], texts[1], texts[2], texts[0], texts[3], texts[1]], 1):
        bell.grammars.open(handle, text, f"tenant {handle}")
        bell.filled(handle)
    assert compiles == [texts[0], texts[1], texts[2], texts[3], texts[1]]
    assert len(bell.grammars._cache) == 3
    assert bell.grammars._cached_len == sum(
        threads._len(text, held) for text, held in bell.grammars._cache.items()
    )
    for handle in range(1, 8):
        bell.grammars.close(handle)
    assert not bell.grammars._rows
    assert not bell.grammars._compiling


@contextmanager
def stuck(monkeypatch: pytest.MonkeyPatch, grammar: str) -> Iterator[threading.Event]:
    """Compiling this grammar lasts until the block ends. Gives an event that says that it began."""
    began, goes_on = threading.Event(), threading.Event()
    real = vars(threads)["compiled"]

    def compiled(vocabulary: Vocabulary, text: str) -> Matcher:
        if text.startswith(grammar):
            began.set()
            assert goes_on.wait(PATIENCE_S)
        matcher: Matcher = real(vocabulary, text)
        return matcher

    monkeypatch.setattr(threads, "compiled", compiled)
    try:
        yield began
    finally:
        goes_on.set()


def test_a_tenants_hostile_grammars_delay_no_other_tenant(
    bell: Bell, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many of them wait: their tenant has one thread."""
    with stuck(monkeypatch, "hostile") as began:
        for handle in range(100, 140):
            bell.grammars.open(handle, f"hostile {handle}", "hostile")
        assert began.wait(PATIENCE_S)
        bell.grammars.open(1, choice("abc"), "victim")
        bell.filled(1)
        assert spelt(bell, vocabulary, 1, "abc").standing is MatcherStanding.COMPLETE
        for handle in range(102, 140):
            bell.grammars.close(handle)
    assert {f.standing for f in bell.filled(100, 101).values()} == {MatcherStanding.FAILED}


def test_a_grammar_that_several_tenants_wait_for_is_compiled_once(
    bell: Bell, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = choice("ab")
    with stuck(monkeypatch, text) as began:
        bell.grammars.open(1, text, "one")
        assert began.wait(PATIENCE_S)
        began.clear()
        bell.grammars.open(2, text, "two")
        bell.grammars.open(3, choice("cd"), "two")
        bell.filled(3)  # behind its tenant's first
        assert not began.is_set()
    bell.filled(1, 2)


def test_what_nobody_waits_for_any_more_is_not_compiled(bell: Bell, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles: list[str] = []
    with stuck(monkeypatch, "first") as began:
        real = vars(threads)["compiled"]

        def compiled(vocabulary: Vocabulary, text: str) -> Matcher:
            compiles.append(text)
            matcher: Matcher = real(vocabulary, text)
            return matcher

        monkeypatch.setattr(threads, "compiled", compiled)
        bell.grammars.open(1, "first", "t")
        assert began.wait(PATIENCE_S)
        bell.grammars.open(2, "left", "t")
        bell.grammars.open(3, "last", "t")
        bell.grammars.close(2)
    bell.filled(1, 3)
    assert compiles == ["first", "last"]


class Clock:
    """The processor's time of a thread, as a test says it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_slow_row_leaves_the_lane_that_plans_wait_for_until_it_is_proven(
    bell: Bell, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars, clock = bell.grammars, Clock()
    monkeypatch.setattr("time.thread_time", clock)
    monkeypatch.setattr("time.monotonic", clock)
    text = "ab" * 40
    for handle in (1, 2):
        grammars.open(handle, choice(text), "t")
    bell.filled(1, 2)
    tokens = vocabulary.tokenize_str(text)
    slow = [lanes.SLOW_S * 2]
    real = GrammarThreads._mask

    def mask(self: GrammarThreads, matcher: Matcher) -> tuple[bytes, MatcherStanding]:
        clock.now += slow.pop() if slow else 0.0
        return real(self, matcher)

    monkeypatch.setattr(GrammarThreads, "_mask", mask)

    def pace(handle: int) -> int:
        return grammars._rows[handle].unproven

    grammars.advance([(1, tokens[0])])
    bell.filled(1)
    assert pace(1) == PROVEN
    grammars.open(3, choice(text), "t")
    bell.filled(3)
    assert pace(3) == PROVEN, "it follows the same grammar"
    for at in range(1, PROVEN + 1):
        grammars.advance([(1, tokens[at])])
        assert not grammars._coming, "no plan waits for it"
        bell.filled(1)
    assert pace(1) == 0


def test_rows_whose_common_call_was_slow_are_filled_one_by_one(
    bell: Bell, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the slow one among them is found, and the others are not held for it."""
    grammars, clock = bell.grammars, Clock()
    monkeypatch.setattr("time.monotonic", clock)
    text = "ab" * 40
    for handle in (1, 2, 3):
        grammars.open(handle, choice(text), "t")
    bell.filled(1, 2, 3)
    tokens = vocabulary.tokenize_str(text)
    real = threads._standing

    def standing(matcher: Matcher) -> MatcherStanding:
        clock.now += lanes.SLOW_S
        return real(matcher)

    monkeypatch.setattr(threads, "_standing", standing)
    masks = []
    for at in range(3):
        grammars.advance([(handle, tokens[at]) for handle in (1, 2, 3)])
        found = bell.filled(1, 2, 3)
        assert len({filled.mask for filled in found.values()}) == 1
        masks.append(found[1].mask)
    assert {row.suspect for row in grammars._rows.values()} == {PROVEN - 2}
    grammars.open(4, choice(text), "t")
    bell.filled(4)
    for at in range(3):
        grammars.advance([(4, tokens[at])])
        assert bell.filled(4)[4].mask == masks[at], "by itself or with others"


def test_what_stands_behind_a_slow_row_lets_other_tenants_go_first(
    bell: Bell, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars, clock, order = bell.grammars, Clock(), list[int]()
    monkeypatch.setattr(lanes, "THREADS", 1)
    monkeypatch.setattr("time.thread_time", clock)
    text = "ab" * 40
    token = vocabulary.tokenize_str(text)[0]
    for handle, tenant in ((1, "t"), (2, "t"), (3, "t"), (4, "u")):
        grammars.open(handle, choice(text), tenant)
    bell.filled(1, 2, 3, 4)
    for handle in (1, 2, 3):
        grammars._rows[handle].suspect = PROVEN
    all_wait, real = threading.Event(), GrammarThreads._filled

    def filled(self: GrammarThreads, row: Any) -> Filled:
        assert all_wait.wait(PATIENCE_S)
        order.append(row.handle)
        done = real(self, row)
        return replace(done, seconds=2 * lanes.SLOW_S) if row.handle == 1 else done

    monkeypatch.setattr(GrammarThreads, "_filled", filled)
    grammars.advance([(1, token), (2, token), (3, token), (4, token)])
    all_wait.set()
    bell.filled(1, 2, 3, 4)
    assert order == [1, 4, 2, 3]


def test_a_matcher_that_ends_at_a_limit_has_failed_and_is_not_complete(
    bell: Bell, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "LIMITS", LLParserLimits(max_lexer_states=50, verbose_errors=False))
    text = Matcher.grammar_from_lark('start: "a" /[a-z]{1,40}( [a-z]{1,40}){8}/')
    bell.grammars.open(1, text, "t")
    standing, tokens = bell.filled(1)[1].standing, iter(vocabulary.tokenize_str("abc def ghi"))
    while standing is MatcherStanding.GOES_ON:
        bell.grammars.advance([(1, next(tokens))])
        standing = bell.filled(1)[1].standing
    assert standing is MatcherStanding.FAILED


def test_a_token_that_one_matcher_of_several_does_not_take_fails_its_row_alone(
    bell: Bell, vocabulary: Vocabulary
) -> None:
    for handle in (1, 2):
        bell.grammars.open(handle, choice("abab"), "t")
    bell.filled(1, 2)
    good, bad = vocabulary.tokenize_str("ab")[0], vocabulary.tokenize_str("?")[0]
    bell.grammars.advance([(1, good), (2, bad)])
    found = bell.filled(1, 2)
    assert {handle: one.standing for handle, one in found.items()} == {
        1: MatcherStanding.GOES_ON,
        2: MatcherStanding.FAILED,
    }


# -- lanes ----------------------------------------------------------------------------------------


class Turns:
    """A lane that the test serves itself, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, rests: bool) -> None:
        from tests.fakes import VirtualClock

        self.clock, self.cpu = VirtualClock(), Clock()
        monkeypatch.setattr("time.thread_time", self.cpu)
        monkeypatch.setattr(Lane, "_start", lambda lane: None)
        self.lane = Lane("test", rests=rests, clock=self.clock)
        self.done: list[str] = []

    def put(self, tenant: str, name: str, takes_s: float = 0.0) -> None:
        def job() -> None:
            self.done.append(name)
            self.cpu.now += takes_s

        self.lane.put(tenant, job)

    def serve(self, jobs: int) -> list[str]:
        for _ in range(jobs):
            self.lane.serve_next()
        done, self.done = self.done, []
        return done


def test_tenants_have_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(monkeypatch, rests=False)
    for number in range(3):
        turns.put("a", f"a{number}", takes_s=1.0)
    turns.put("b", "b0")
    assert turns.serve(4) == ["a0", "b0", "a1", "a2"]


def test_a_tenant_rests_after_a_slow_job(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(monkeypatch, rests=True)
    turns.put("hostile", "h0", takes_s=0.08)
    turns.put("hostile", "h1")
    turns.put("victim", "v0", takes_s=0.001)
    turns.put("victim", "v1")
    assert turns.serve(3) == ["h0", "v0", "v1"]
    turns.clock.advance(0.23)
    turns.put("victim", "v2")
    assert turns.serve(1) == ["v2"]
    turns.clock.advance(0.02)
    assert turns.serve(1) == ["h1"]


def test_a_tenant_has_one_job_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    lane, began, goes_on = Lane("test", rests=False), threading.Event(), threading.Event()
    done: list[Any] = []
    other = threading.Event()

    def first() -> None:
        began.set()
        assert goes_on.wait(PATIENCE_S)
        done.append(1)

    said: Callable[[], None] = other.set
    lane.put("a", first)
    assert began.wait(PATIENCE_S)
    lane.put("a", lambda: done.append(2))
    lane.put("b", said)
    assert other.wait(PATIENCE_S)
    assert not done
    goes_on.set()
    last = threading.Event()
    lane.put("a", last.set)
    assert last.wait(PATIENCE_S)
    assert done == [1, 2]
