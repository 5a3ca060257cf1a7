"""What is drafted, and how much of it: `engine.core.drafts`. That it changes no token is held by the
simulated worlds (`test_simulation.py`), and to the bit in `tests/engine/runtime/test_with_scheduler.py`."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import msgspec
import pytest

from engine.config import EngineConfig
from engine.contract.messages import Pending, Plan, ServiceClass, Want, agreed
from engine.core.drafts.drafter import Drafts, NGramDrafts, Proposal
from engine.core.drafts.guesses import GuessDrafts
from engine.core.drafts.ngrams import LEVELS, NGrams
from engine.core.drafts.prediction import WALK_MAX, Places, PredictionDrafts
from engine.core.drafts.price import (
    FORCED,
    GUESSED,
    PREDICTED,
    Acceptance,
    Offer,
    Sureness,
    lengths_by_shape,
    lengths_that_pay,
)
from engine.core.estimate import pace
from engine.core.estimate.cost import CostLearner, StepCost, Work
from engine.core.scheduler_config import SchedulerConfig
from engine.core.sequence import Sequence
from engine.core.step.allocator import Allocator
from engine.core.step.drafting import LATE_SHARE, TOKENS_SHARE, Drafting
from tests.bench.engine.virtual import DraftedAs, Engine, Outcome, Request, SureDrafts, run, tokens_per_second
from tests.core_laws import check
from tests.effort import IS_WHOLE, drawn
from tests.engine.core.harness import Harness, greedy, knowing
from tests.engine.core.sequences import sequence
from tests.fake_runner import runner_info

TOKENS = "I"
LONGEST, SHORTEST = max(LEVELS), min(LEVELS)


def known(tokens: list[int]) -> tuple[NGrams, array[int]]:
    ngrams, own = NGrams(len(tokens)), array(TOKENS, tokens)
    assert ngrams.extend(own, len(own)) == len(own)
    return ngrams, own


# -- n-grams --------------------------------------------------------------------------------------


def test_what_followed_last_time_is_found() -> None:
    ngrams, own = known([1, 2, 3, 4, 50, 51, 9, 1, 2, 3, 4, 60, 61, 62, 8, 1, 2, 3, 4])
    found = ngrams.find(own, 3)
    assert found is not None
    assert (found.tokens, found.matched) == ([60, 61, 62], LONGEST)


def test_a_longer_match_goes_before_a_later_one() -> None:
    ngrams, own = known([1, 2, 3, 4, 50, 9, 3, 4, 60, 7, 1, 2, 3, 4])
    found = ngrams.find(own, 1)
    assert found is not None
    assert found.tokens == [50]
    ngrams, own = known([1, 2, 3, 4, 50, 9, 3, 4, 60, 7, 8, 3, 4])
    found = ngrams.find(own, 1)
    assert found is not None
    assert (found.tokens, found.matched) == ([60], SHORTEST)


def test_a_repetition_goes_on() -> None:
    ngrams, own = known([5, 6, 7] * 4)
    found = ngrams.find(own, 8)
    assert found is not None
    assert found.tokens == [5, 6, 7, 5, 6, 7, 5, 6]


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3, 4, 5, 6], [0, 0], [0]])
def test_new_tokens_find_nothing(tokens: list[int]) -> None:
    ngrams, own = known(tokens)
    assert ngrams.find(own, 4) is None


def test_an_index_that_is_read_by_parts_is_the_same() -> None:
    rng = random.Random(3)
    tokens = array(TOKENS, [rng.randrange(9) for _ in range(500)])
    whole, parts = NGrams(500), NGrams(500)
    whole.extend(tokens, 500)
    while parts.known_len < len(tokens):
        assert parts.extend(tokens, rng.randint(1, 7)) <= len(tokens)
    assert parts.find(tokens, 12) == whole.find(tokens, 12)


def test_nothing_is_drafted_from_an_end_on() -> None:
    drafts = NGramDrafts(64, stops=(3,))
    draft = drafts.look(array(TOKENS, [1, 2, 9, 3, 4, 1, 2]), 4, 64)
    assert draft is not None
    assert draft.tokens == [9]
    assert NGramDrafts(64, stops=(9,)).look(array(TOKENS, [1, 2, 9, 3, 4, 1, 2]), 4, 64) is None


# -- what the caller predicts ---------------------------------------------------------------------

FILE = random.Random(7).choices(range(100, 900), k=400)
STOP = 1


@dataclass
class Answering:
    """A sequence that answers, token by token, and verifies what is drafted for it."""

    drafts: PredictionDrafts
    tokens: array[int]
    answer: list[int]
    steps: int = 0
    predicted: int = 0
    wrong: int = 0

    @staticmethod
    def of(prediction: list[int], answer: list[int], prompt: list[int] | None = None) -> Answering:
        tokens = array(TOKENS, prompt or [9])
        drafts = PredictionDrafts(array(TOKENS, prediction), len(tokens), len(tokens) + len(answer), (STOP,))
        return Answering(drafts, tokens, answer)

    def step(self, most: int = 8, read_max: int = 1 << 20) -> list[int]:
        """Verify what is drafted. Returns it."""
        left = self.answer[len(self.tokens) - self.begins :]
        found = self.drafts.look(self.tokens, min(most, len(left) - 1), read_max) if self.steps else None
        self.steps += 1
        own = [] if found is None else found.tokens
        right = agreed(own, left)
        if found is not None:
            self.drafts.take(found)
            predicted = self.drafts.learn(len(own), right)
            self.predicted += min(right, predicted)
            self.wrong += max(0, predicted - right)
        self.tokens.extend(left[: right + 1])
        return own

    def __post_init__(self) -> None:
        self.begins = len(self.tokens)

    def run(self, most: int = 8, read_max: int = 1 << 20) -> Answering:
        while len(self.tokens) - self.begins < len(self.answer):
            self.step(most, read_max)
        return self


def test_an_answer_that_is_as_predicted_takes_the_fewest_steps() -> None:
    one = Answering.of(FILE, FILE).run()
    assert one.steps == 1 + -(-(len(FILE) - 1) // 9)
    assert (one.predicted, one.wrong) == (len(FILE) - one.steps, 0)
    assert one.drafts._places is None, "where nothing is lost, nothing is looked for"


EDITS = {
    "a token is another": [*FILE[:100], 7, *FILE[101:]],
    "tokens come in between": [*FILE[:100], 7, 8, 9, 7, 11, *FILE[100:]],
    "tokens are left out": FILE[:100] + FILE[160:],
    "the beginning is left out": FILE[60:],
    "the end is moved to the beginning": FILE[200:] + FILE[:200],
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("read_max", [1 << 20, 50])
def test_behind_a_divergence_it_finds_its_place_again(edit: str, read_max: int) -> None:
    one = Answering.of(FILE, EDITS[edit]).run(read_max=read_max)
    assert one.predicted > 0.75 * len(EDITS[edit])
    assert one.wrong <= 40
    assert one.steps < 0.25 * len(EDITS[edit]) + 12


def test_of_places_with_the_same_tokens_the_next_one_is_taken() -> None:
    """As of the lines of a file that are often the same: not the last of them."""
    line = [5, 6, 7, 8]
    text = [token for block in range(20) for token in (*line, *range(100 + 10 * block, 110 + 10 * block))]
    edited = [*text[:150], 3, *text[152:]]
    assert text[154:158] == line
    one = Answering.of(text, edited).run()
    assert one.wrong <= 20
    assert one.predicted > 0.8 * len(edited)


def test_no_more_of_a_prediction_is_wrong_than_it_has_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is found in it again and again."""
    prediction = [5, 6, 200, 5, 6, 300]
    answer = [5, 6, 7] * 100
    monkeypatch.setattr(Acceptance, "chance", lambda self, kind: 0.9 if kind >= PREDICTED else 0.1)
    one = Answering.of(prediction, answer)
    assert one.run().wrong == len(prediction)


def test_what_is_right_more_often_is_drafted() -> None:
    """A prediction that is wrong at each place gives way to what the sequence's own tokens say."""
    wrong = [token for at in range(100) for token in (5, 6, 700 + at)]
    one = Answering.of(wrong, [5, 6, 7] * 100).run()
    assert one.wrong < 30
    assert one.steps < 100
    right = Answering.of(FILE, FILE, prompt=[FILE[at] if at % 3 else 7 for at in range(400)]).run()
    assert right.wrong == 0


def test_nothing_is_predicted_from_an_end_on_and_none_of_an_empty_prediction() -> None:
    drafts = PredictionDrafts(array(TOKENS, [5, 6, STOP, 7]), 1, 64, (STOP,))
    found = drafts.look(array(TOKENS, [9]), 8, 64)
    assert found is not None
    assert (found.tokens, found.predicted) == ([5, 6], 2)
    assert PredictionDrafts(array(TOKENS, [STOP]), 1, 64, (STOP,)).look(array(TOKENS, [9]), 8, 64) is None


def test_a_prediction_of_one_token_over_and_over_takes_bounded_time() -> None:
    places = Places(array(TOKENS, [5] * 50_000))
    while places.unread:
        assert places.read(4096) <= 4096
    looked: list[int] = []

    class Counted(array):  # type: ignore[type-arg]
        def __getitem__(self, at: Any) -> Any:
            looked.append(1)
            return array.__getitem__(self, at)

    places._later[:] = [Counted(TOKENS, each) for each in places._later]
    found = places.find(array(TOKENS, [5] * 9), 40_000)
    assert found is not None
    assert len(looked) <= 4 * WALK_MAX


def test_places_that_are_read_by_parts_are_the_same() -> None:
    rng = random.Random(4)
    tokens = array(TOKENS, [rng.randrange(6) for _ in range(300)])
    whole, parts = Places(tokens), Places(tokens)
    assert whole.read(1 << 20) == 300
    while parts.unread:
        parts.read(rng.randint(1, 7))
    for _ in range(100):
        newest, behind = tokens[: rng.randint(1, 299)], rng.randrange(300)
        assert whole.find(newest, behind) == parts.find(newest, behind)


# -- the price ------------------------------------------------------------------------------------

PUBLISHED = {
    4: (382, 970),
    32: (2_393, 4_756),
    64: (4_095, 6_712),
    256: (8_879, 7_852),
}
"""The tokens per second of so many streams on an MI355X, without drafts and with seven each:
vllm-project/vllm#47808. Those that adapt have 903, 4,501, 7,144 and 13,325, as a model says how sure each
draft is."""
CONTEXT_LEN = 1000
PUBLISHED_COST = StepCost(token_s=2e-6, row_s=42e-6, context_s=31e-9, fixed_s=10.2e-3)
"""The steps that are behind them, within a fifth, where a draft is right with the chance
`PUBLISHED_CHANCE`."""
PUBLISHED_CHANCE = 0.66
STREAMS = (1, 4, 32, 64, 256)
LENGTHS = (0, 1, 2, 3, 5, 7, 11, 15)
MIXES = {
    "published": (PUBLISHED_CHANCE,),
    "edits": (0.95, 0.9),
    "half": (0.83,),
    "mixed": (0.97, 0.8, 0.5, 0.1),
    "prose": (0.25, 0.1),
    "wrong": (0.0,),
}
KIND = 1
LEARNED_AS: dict[str, dict[str, Any]] = {
    "measured": {},
    "measured on a machine that was idle": {
        "warm_cost": replace(PUBLISHED_COST, row_s=21e-6, context_s=15e-9, fixed_s=5.1e-3)
    },
    "measured, and noisy": {"noise": 0.1},
    "not measured": {"is_measured": False},
}
"""How the cost of a step is learned: by the scheduler itself, from the steps that it makes, and from those
that are timed while warming up."""


@dataclass(slots=True)
class LuckyDrafts(SureDrafts):
    """Drafts of which each is right by a chance, which is learned as of any."""

    chance: float = 0.0
    rng: random.Random = field(default_factory=random.Random)
    acceptance: Acceptance = field(default_factory=Acceptance)

    def look(self, tokens: array[int], most: int, read_max: int) -> Proposal | None:
        kinds = DraftedAs.WRONG, DraftedAs.RIGHT
        drafts = [kinds[self.rng.random() < self.chance].value for _ in range(most)]
        return Proposal(drafts, self.acceptance.chance(KIND), KIND, self.acceptance.is_probing)

    def pass_over(self) -> None:
        self.acceptance.pass_over()

    def learn(self, drafts: int, right: int) -> int:
        self.acceptance.learn(KIND, right, all_right=right == drafts)
        return 0


def served(chances: list[float], learned_as: str, steps: int, length: int | None = None) -> float:
    """The tokens per second of streams whose drafts are right by these chances, by the scheduler itself, or
    where each verifies so many."""

    def drafter_of(sequence: Sequence) -> LuckyDrafts:
        rng = random.Random(f"{sequence.handle} {turn}")
        return LuckyDrafts(DraftedAs.WRONG, chance=chances[sequence.handle], rng=rng)

    engine = Engine(
        PUBLISHED_COST,
        gap_targets_s=(math.inf,) * len(ServiceClass),
        step_tokens_max=1 << 20,
        pages=1 << 16,
        drafter_of=drafter_of,
        **LEARNED_AS[learned_as],
    )

    def so_many(offers: list[Offer], *_: object) -> list[int]:
        return [0 if length is None else min(length, each.most) for each in offers]

    seconds, price = 0.0, lengths_that_pay if length is None else so_many
    with mock.patch("engine.core.step.drafting.lengths_that_pay", price):
        for turn in range(turns := max(1, 32 // len(chances))):  # noqa: B007  the drafters' own
            seconds += 1.0 / tokens_per_second(len(chances), steps, engine, CONTEXT_LEN)
    return turns / seconds


def fixed(chances: list[float], length: int) -> float:
    """The tokens per second that are to be expected where each row verifies so many drafts."""
    cost, rows = PUBLISHED_COST, len(chances)
    tokens = sum(sum(chance**at for at in range(length + 1)) for chance in chances)
    decodes_s = cost.seconds(Work.of([CONTEXT_LEN] * rows, [1] * rows))
    return tokens / (decodes_s + rows * length * cost.draft_s(CONTEXT_LEN))


@pytest.mark.parametrize("streams", PUBLISHED)
def test_the_cost_behind_the_published_figures_makes_them(streams: int) -> None:
    none, seven = PUBLISHED[streams]
    chances = [PUBLISHED_CHANCE] * streams
    assert fixed(chances, 0) == pytest.approx(none, rel=0.2)
    assert fixed(chances, 7) == pytest.approx(seven, rel=0.2)


QUICK = [(mix, streams, "measured") for mix, streams in (("published", 4), ("published", 64), ("edits", 32))]
"""The others, and other ways to learn the cost, by command."""


@pytest.mark.parametrize(
    ("mix", "streams", "learned_as"), list(product(MIXES, STREAMS, LEARNED_AS)) if IS_WHOLE else QUICK
)
def test_the_price_is_as_good_as_the_best_fixed_length(mix: str, streams: int, learned_as: str) -> None:
    """And as good as none, however large the batch is: in virtual time, by the scheduler's own learning."""
    chances = [MIXES[mix][at % len(MIXES[mix])] for at in range(streams)]
    steps = drawn(80, whole=200)
    found = served(chances, learned_as, steps)
    best = max(LENGTHS, key=partial(fixed, chances))
    least = 0.84 if learned_as == "not measured" else 0.97
    assert found >= least * served(chances, learned_as, steps, best)
    assert found >= 0.98 * served(chances, learned_as, steps, 0)


def test_nothing_is_drafted_where_a_row_costs_what_it_brings() -> None:
    offers = [Offer(0.9, 15, 1e-3)] * 100
    assert lengths_that_pay(offers, 100, 0.1, 1.0, 1000) == [0] * 100


def test_what_a_grammar_is_sure_of_is_drafted_at_any_chance() -> None:
    """Behind a doubtful draft it is as doubtful as that, and no more."""
    rare, sure = (0.2, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0)
    offers = [Offer(0.2, 4, 1e-3, chances=rare), Offer(0.2, 3, 1e-3, chances=sure), Offer(0.2, 4, 1e-3)]
    assert lengths_that_pay(offers, 10, 0.1, 1.0, 1000) == [4, 3, 1]
    assert lengths_that_pay(offers, 30, 0.1, 1.0, 1000) == [0, 3, 0]


def test_what_a_grammar_forces_teaches_nothing_of_what_is_found() -> None:
    drafts = NGramDrafts(64, ())
    kind, before = KIND, drafts.acceptance.chance(KIND)
    why = [Sureness.SURE, Sureness.DRAFTED, Sureness.SURE, Sureness.FORCED]
    for drafted, right in ((3, 3), (4, 4), (4, 3)):
        drafts.take(Proposal([7] * drafted, before, kind, why=why[:drafted]))
        drafts.learn(drafted, right)
    once = Acceptance()
    for _ in range(3):
        once.learn(kind, 1, all_right=True)
    once.learn(FORCED, 1, all_right=True)
    once.learn(FORCED, 0, all_right=False)
    for each in (kind, FORCED):
        assert drafts.acceptance.chance(each) == pytest.approx(once.chance(each))


def test_drafts_keep_to_what_is_spare() -> None:
    offers = [Offer(0.9, 15, 1e-4), Offer(0.8, 3, 1e-4)]
    assert sum(lengths_that_pay(offers, 2, 0.1, 1.0, 7)) == 7
    assert sum(lengths_that_pay(offers, 2, 0.1, 4.5e-4, 100)) == 4
    assert lengths_that_pay(offers, 2, 0.1, 1.0, 100)[1] == 3


SHAPES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def padded_to(tokens: int) -> int:
    return next((shape for shape in SHAPES if shape >= tokens), tokens)


@pytest.mark.parametrize("chance", [0.95, 0.7, 0.4])
@pytest.mark.parametrize("rows", [1, 3, 8, 30, 33])
def test_a_step_that_is_padded_has_the_best_count_of_all(rows: int, chance: float) -> None:
    """By its padded time, of all lengths that rows of one chance may have."""
    row_s, step_s = 1e-4, 2e-3
    offers = [Offer(chance, 7, row_s)] * rows

    def rate(drafts: int) -> float:
        gained = sum(chance ** (at // rows + 1) for at in range(drafts))
        padding = padded_to(rows + drafts) - rows if drafts else 0
        return (rows + gained) / (step_s + row_s * padding)

    lengths = lengths_by_shape(offers, rows, step_s, math.inf, 1 << 20, SHAPES)
    assert rate(sum(lengths)) == pytest.approx(max(rate(drafts) for drafts in range(7 * rows + 1)))
    assert max(lengths) - min(lengths) <= 1
    few = lengths_by_shape(offers, rows, step_s, 5.5 * row_s, 6, SHAPES)
    assert padded_to(rows + sum(few)) - rows <= 5 or not sum(few)


def test_a_shape_is_filled_and_the_next_not_begun_for_little() -> None:
    offers = [Offer(0.6, 15, 1e-4)] * 2
    # the third draft of each pays by itself, if eight tokens are what a step takes anyway
    assert sum(lengths_by_shape(offers, 2, 1e-3, math.inf, 99, (8, 32))) == 6
    assert sum(lengths_that_pay(offers, 2, 1e-3, math.inf, 99)) < 6
    assert lengths_by_shape([Offer(0.1, 15, 1e-4, is_probe=True)], 1, 1e-3, math.inf, 99, (2, 32)) == [1]
    assert lengths_by_shape([Offer(0.0, 15, 1e-4)], 1, 1e-3, math.inf, 99, (2, 32)) == [0]


# -- beside steps in flight -----------------------------------------------------------------------


class SameDrafts:
    """Implements `Drafts`: finds as many tokens, of one chance."""

    size = read_len = 0
    pause = 4
    has_read = True

    def __init__(self, chance: float, found: int) -> None:
        self.chance, self.found, self.passed = chance, found, 0

    def look(self, tokens: array[int], most: int, read_max: int) -> Proposal | None:
        return Proposal([7] * min(most, self.found), self.chance, 0) if self.found else None

    def forced(self) -> Proposal:
        return Proposal([], self.chance, 0)

    def take(self, draft: Proposal) -> None: ...

    def pass_over(self) -> None:
        self.passed += 1

    def learn(self, drafts: int, right: int) -> int:
        return 0


ROW_S, STREAM_STEP_S = 1e-5, 4e-3


def streaming(
    chances: list[tuple[float, int]], host_s: float
) -> tuple[Drafting, list[Sequence], list[SameDrafts]]:
    """Streams with a token that is coming, of which each finds so many drafts of a chance."""
    learner = CostLearner()
    learner._cost = StepCost(row_s=ROW_S, fixed_s=STREAM_STEP_S)
    drafters = [SameDrafts(*own) for own in chances]
    streams = []
    for handle in range(len(chances)):
        each = sequence(handle, 0.0)
        each.sampling = greedy(64)
        each.admit(handle, [handle], 99, 0.0)
        each.launch(1, 1, Want.SAMPLE)
        each.drafts_from = 0
        streams.append(each)
    allocator = cast(Allocator, SimpleNamespace(running=dict(enumerate(streams))))
    config = SchedulerConfig(gap_targets_s=(1.0, 1.0, 1.0))
    by_handle = {each.handle: own for each, own in zip(streams, drafters, strict=True)}
    drafting = Drafting(
        config, runner_info(), allocator, learner, 15, drafter_of=lambda each: by_handle[each.handle]
    )
    drafting.host_s = host_s
    return drafting, streams, drafters


@pytest.mark.parametrize(
    ("chances", "host_s", "waits"),
    [
        ([(0.9, 9)], 4e-4, True),
        ([(0.9, 9)] * 8, 4e-4, True),
        ([(0.9, 9)], 4e-2, False),  # the host takes ten steps
        ([(0.2, 9)], 4e-4, False),
        ([(0.9, 9)] + [(0.0, 0)] * 15, 4e-4, True),
        ([(0.9, 9)] + [(0.0, 0)] * 99, 4e-4, False),
        ([(0.0, 0)], 0.0, False),
    ],
)
def test_a_plan_waits_where_drafts_gain_more_than_the_hosts_time(
    chances: list[tuple[float, int]], host_s: float, waits: bool
) -> None:
    """Who found nothing, or nothing that pays, is looked at again after a pause."""
    drafting, streams, drafters = streaming(chances, host_s)
    assert drafting.waits() == waits
    for each, own in zip(streams, drafters, strict=True):
        assert (each.drafts_from == 0) == (waits and own.found > 0)
        assert own.passed == (not waits and own.found > 0)
    if not waits:
        assert not drafting.waits(), "nobody is due"


def test_a_plan_waits_for_those_that_verify_if_they_are_likely_to_go_on() -> None:
    drafting, (stream,), _ = streaming([(0.0, 0)], 4e-4)
    assert not drafting.waits()
    stream.land(1, Want.SAMPLE)
    stream.append(3, 0.0)
    stream.launch(2, 6, Want.VERIFY)
    stream.draft_chance = 0.9
    assert drafting.waits()
    stream.draft_chance = 0.05
    assert not drafting.waits()


def test_a_stream_with_a_grammar_or_a_reader_that_is_slow_is_not_waited_for() -> None:
    drafting, (one, other), _ = streaming([(0.9, 9)] * 2, 0.0)
    one.mask = None
    other.pause(0.0)
    assert not drafting.waits()


def test_a_stream_drafts_behind_its_newest_token_once_that_is_there() -> None:
    drafting, (stream,), _ = streaming([(0.9, 9)], 0.0)
    assert drafting._looked_at([stream], 9) == []
    stream.land(1, Want.SAMPLE)
    stream.append(3, 0.0)
    assert [each for each, _ in drafting._looked_at([stream], 9)] == [stream]


def test_who_comes_when_the_room_for_indexes_is_used_up_drafts_nothing() -> None:
    drafting, (one, other), (own, second) = streaming([(0.9, 9)] * 2, 0.0)
    own.size = second.size = 60
    drafting.room = 100
    assert drafting.waits()
    assert (one.drafter, other.drafter, drafting.room) == (own, None, 40)
    assert other.drafts_from == other.kv_len_max
    for each in (other, one):
        drafting.leave(each)
    assert (one.drafter, drafting.room) == (None, 100)


def test_the_hosts_time_is_learned() -> None:
    drafting, _, _ = streaming([(0.9, 9)], 0.0)
    for _ in range(200):
        drafting.note_host(2e-4)
    assert drafting.host_s == pytest.approx(2e-4, rel=1e-3)


# -- neighbours -----------------------------------------------------------------------------------

COST = StepCost(token_s=2e-4, row_s=1e-3, context_s=1e-7, fixed_s=8e-3)


@dataclass(slots=True)
class WrongDrafts(SureDrafts):
    """Drafts that are all wrong, of whose chance is learned as of any."""

    acceptance: Acceptance = field(default_factory=Acceptance)

    def look(self, tokens: array[int], most: int, read_max: int) -> Proposal | None:
        chance, is_probe = self.acceptance.chance(KIND), self.acceptance.is_probing
        return Proposal([self.kind.value] * most, chance, KIND, is_probe)

    def pass_over(self) -> None:
        self.acceptance.pass_over()

    def learn(self, drafts: int, right: int) -> int:
        assert not right
        self.acceptance.learn(KIND, right, all_right=False)
        return 0


class NoDrafts(SureDrafts):
    """Finds nothing."""

    __slots__ = ()

    def look(self, tokens: array[int], most: int, read_max: int) -> Proposal | None:
        return None


def beside(requests: list[Request], drafter: Callable[[], Drafts] | None, **engine: Any) -> list[Outcome]:
    """The outcomes of the victim's requests beside a neighbour, all of whose drafts are wrong."""

    def drafter_of(sequence: Sequence) -> Drafts:
        return NoDrafts(DraftedAs.WRONG) if sequence.tenant == "victim" or drafter is None else drafter()

    outcomes = run(requests, Engine(COST, drafter_of=drafter and drafter_of, **engine)).outcomes
    neighbours = [each for each in outcomes if each.request.tenant == "neighbour"]
    assert all(each.accepted == 0 for each in neighbours)
    assert drafter is None or sum(each.drafted for each in neighbours) > 20
    return [each for each in outcomes if each.request.tenant == "victim"]


STREAMING = [
    *[Request(0.0, 8, 300, "neighbour")] * 7,
    Request(0.0, 8, 300, "victim"),
    *[Request(0.5 + 0.7 * at, 1500, 4, "victim", first_token_s=1.0) for at in range(6)],
]
"""A stream of the victim's, and prompts of it that have deadlines, beside a neighbour's streams."""


def sure() -> Drafts:
    return SureDrafts(DraftedAs.WRONG)


def learning() -> Drafts:
    return WrongDrafts(DraftedAs.WRONG)


@pytest.mark.parametrize("drafter", [sure, learning])
@pytest.mark.parametrize("target_s", [0.01, 0.05, 0.1])
def test_wrong_drafts_make_no_gap_of_a_neighbour_longer_than_its_target(
    target_s: float, drafter: Callable[[], Drafts]
) -> None:
    """However sure they are: gaps are within the target, or where that cannot be kept, within what they are
    without drafts; and first tokens come in time."""
    targets_s = (target_s,) * len(ServiceClass)
    alone = beside(STREAMING, None, slots=16, gap_targets_s=targets_s)
    drafted = beside(STREAMING, drafter, slots=16, gap_targets_s=targets_s)
    assert drafted[0].gap_s_max <= 1.02 * max(target_s, alone[0].gap_s_max)
    assert all(each.first_token_s <= 1.0 for each in drafted[1:])


def test_wrong_drafts_cost_a_neighbour_next_to_nothing_once_they_are_known() -> None:
    alone = beside(STREAMING, None, slots=16)
    drafted = beside(STREAMING, learning, slots=16)
    assert drafted[0].end_s <= 1.03 * alone[0].end_s
    for own, other in zip(drafted[1:], alone[1:], strict=True):
        assert own.first_token_s <= 1.1 * other.first_token_s


def test_wrong_drafts_count_as_served_so_that_a_neighbour_is_no_later_for_them() -> None:
    """Both have a queue before one slot. What the drafts of the one take is taken off its own turns, once it
    is more than any tenant may be ahead by."""
    requests = [Request(0.0, 4, 60, tenant) for _ in range(16) for tenant in ("neighbour", "victim")]
    alone, drafted = (beside(requests, drafter, slots=1) for drafter in (None, sure))
    last = [max(each.end_s for each in outcomes) for outcomes in (alone, drafted)]
    assert last[1] <= last[0]


def test_drafts_keep_to_the_least_gap_target_and_lengthen_a_late_step_by_a_share() -> None:
    """`max_drafts` is what a row verifies at most, whatever these leave."""
    config = SchedulerConfig(gap_targets_s=(0.5, 0.1, 0.05))
    learner = CostLearner()
    drafting = Drafting(config, runner_info(), cast(Allocator, None), learner, EngineConfig("m").max_drafts)
    decodes = {at: sequence(at, 0.0, service_class=kind) for at, kind in enumerate(ServiceClass)}
    allowed_s = 0.05 / (1.0 + learner.error)
    assert drafting.spare_s(decodes, 0.01, beside_prompts=False) == pytest.approx(allowed_s - 0.01)
    assert drafting.spare_s(decodes, 0.4, beside_prompts=False) == LATE_SHARE * 0.4
    beside = pace.drafts_s(0.05, 0.01, 0.5, learner.error)
    assert drafting.spare_s(decodes, 0.01, beside_prompts=True) == beside
    assert 0.0 < beside < 0.5 * (allowed_s - 0.01)
    assert drafting.spare_s(decodes, 0.4, beside_prompts=True) == 0.0
    assert drafting.spare_drafts(104, 4) == TOKENS_SHARE * 100
    drafting.runner = runner_info(state_bytes=8, drafts_max=15, state_windows=20)
    assert drafting.spare_drafts(104, 4) == 20
    assert drafting.spare_drafts(14, 4) == TOKENS_SHARE * 10


# -- guesses of the model's own -------------------------------------------------------------------


def guessing(streams: int, share: float = 0.01) -> Harness:
    """So many streams of 40 tokens, of a model that guesses: mostly rightly, until a fifth of its guesses."""
    h = Harness(guesses=(4, share), pages=400)
    knowing(h.scheduler, StepCost(row_s=1e-5, fixed_s=1e-2))
    for handle in range(streams):
        h.add(handle, [handle, 7, 8, 9], greedy(40, seed=handle + 1))
    h.run_as_solo()
    return h


def test_guesses_are_drafts_of_the_next_step() -> None:
    h = guessing(3)
    assert len(h.plans) < 25
    assert sum(sum(plan.guesses) for plan in h.plans) > 100
    assert all(end.accepted > 0.5 * end.drafted > 10 for end in h.finished.values())
    asked = [plan for plan in h.plans if plan.guesses]
    assert all(len(plan.guesses) == len(plan.slots) for plan in asked)


@pytest.mark.parametrize(("host_s", "are_awaited"), [(1e-4, True), (1.0, False)])
def test_where_steps_overlap_plans_wait_for_guesses_that_gain_more_than_the_hosts_time(
    host_s: float, are_awaited: bool
) -> None:
    """Where they gain less, none is asked for."""
    h = Harness(guesses=(4, 0.01), pages=400)
    knowing(h.scheduler, StepCost(row_s=1e-5, fixed_s=1e-2))
    drafting = h.scheduler._drafting
    assert drafting is not None
    drafting.runner = msgspec.structs.replace(drafting.runner, is_async=True)
    drafting.host_s = host_s
    for handle in range(3):
        h.add(handle, [handle, 7, 8, 9], greedy(40, seed=handle + 1))
    flying: list[tuple[Plan, Pending]] = []
    plans = list[Plan]()
    while h.scheduler.has_work or flying:
        h.now += 0.01
        if (plan := h.scheduler.plan(h.now)) is not None:
            plans.append(plan)
            flying.append((plan, h.runner.launch(plan)))
        if len(flying) == 2 or plan is None:
            done, pending = flying.pop(0)
            h.scheduler.commit(done, pending.collect(), h.now)
        check(h.scheduler)
        h.read()
    h.assert_all_as_solo()
    guessed = sum(sum(plan.guesses) for plan in plans)
    verified = sum(sum(map(len, plan.drafts)) for plan in plans)
    if are_awaited:
        assert len(plans) < 40
        assert verified > 0.5 * guessed > 30
    else:
        assert len(plans) >= 40
        assert not guessed


def test_what_guesses_cost_decides() -> None:
    """As a part of a decode: where one takes as long, none is asked for."""
    none, few, many = (guessing(1, share) for share in (1.0, 0.3, 0.01))
    asked = [sum(sum(plan.guesses) for plan in h.plans) for h in (none, few, many)]
    assert asked[0] == 0 < asked[1]
    lengths = [max(map(max, (plan.guesses for plan in h.plans if plan.guesses))) for h in (few, many)]
    assert lengths[0] < lengths[1] == 4


def test_wrong_guesses_are_given_up() -> None:
    guesser = GuessDrafts(NGramDrafts(64, ()), stops=(3,))
    tokens = array(TOKENS, [1, 2])
    for at in range(20):
        guesser.hear([50, 51], len(tokens))
        draft = guesser.look(tokens, 4, 64)
        assert draft is not None
        guesser.take(draft)
        guesser.learn(2, 0)
        tokens.append(at)
    assert guesser.chance < 0.1


def test_guesses_go_before_what_is_likely_less_often_and_end_before_an_end() -> None:
    guesser = GuessDrafts(NGramDrafts(64, (3,)), stops=(3,))
    tokens = array(TOKENS, [1, 2, 9, 8, 7, 1, 2])
    guesser.hear([50, 3, 51], len(tokens))
    draft = guesser.look(tokens, 4, 64)
    assert draft is not None
    assert (draft.tokens, draft.kind) == ([50], GUESSED), "two tokens that match tell less"
    tokens.append(9)
    draft = guesser.look(tokens, 4, 64)
    assert draft is not None
    assert (draft.tokens, draft.kind) == ([8, 7, 1, 2], 0), "guesses stand behind the tokens of their step"
    long = array(TOKENS, [*range(10, 19), 40, 41, *range(10, 19)])
    guesser = GuessDrafts(NGramDrafts(64, ()), stops=())
    guesser.hear([50], len(long))
    draft = guesser.look(long, 2, 64)
    assert draft is not None
    assert draft.tokens == [40, 41]
    assert not guesser.asks
