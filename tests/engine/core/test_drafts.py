"""What is drafted, and how much of it: `engine.core.drafts`. That it changes no token is held by the
simulated worlds (`test_simulation.py`), and to the bit in `tests/engine/runtime/test_with_scheduler.py`."""

from __future__ import annotations

import math
import random
from array import array
from dataclasses import dataclass
from typing import Any, cast

import pytest

from engine.config import EngineConfig
from engine.contract.messages import ServiceClass, agreed
from engine.core.drafts.drafter import NGramDrafts
from engine.core.drafts.guesses import GuessDrafts
from engine.core.drafts.ngrams import LEVELS, NGrams
from engine.core.drafts.prediction import WALK_MAX, Places, PredictionDrafts
from engine.core.drafts.price import GUESSED, PREDICTED, Acceptance, Offer, lengths_that_pay
from engine.core.estimate import pace
from engine.core.estimate.cost import CostLearner, StepCost
from engine.core.scheduler_config import SchedulerConfig
from engine.core.step.allocator import Allocator
from engine.core.step.drafting import LATE_SHARE, TOKENS_SHARE, Drafting
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

FIXED_S, ROW_S = 10.3e-3, 72.7e-6
"""The step that is behind the tokens per second of an MI355X with 4 to 256 streams:
vllm-project/vllm#47808."""
STREAMS = (1, 4, 32, 64, 256)
FIXED = (0, 1, 2, 3, 5, 7, 11, 15)
MIXES = {
    "edits": (0.95, 0.9),
    "half": (0.83,),
    "mixed": (0.97, 0.8, 0.5, 0.1),
    "prose": (0.25, 0.1),
    "wrong": (0.0,),
}
KIND = 1
STEPS = 200


def found(chances: list[float]) -> float:
    """The tokens per second of rows whose drafts are right by these chances, over usual answers."""
    rng, tokens, seconds = random.Random(1), 0.0, 0.0
    for _ in range(max(1, 32 // len(chances))):
        acceptances = [Acceptance() for _ in chances]
        for _ in range(STEPS):
            step_s = FIXED_S + ROW_S * len(chances)
            offers = [Offer(own.chance(KIND), 15, ROW_S, own.is_probing) for own in acceptances]
            lengths = lengths_that_pay(offers, len(offers), step_s, math.inf, 1 << 20)
            for chance, own, length in zip(chances, acceptances, lengths, strict=True):
                right = next((at for at in range(length) if rng.random() >= chance), length)
                tokens += 1 + right
                if length:
                    own.learn(KIND, right, all_right=right == length)
                else:
                    own.pass_over()
            seconds += step_s + ROW_S * sum(lengths)
    return tokens / seconds


def fixed(chances: list[float], length: int) -> float:
    tokens = sum(sum(chance**at for at in range(length + 1)) for chance in chances)
    return tokens / (FIXED_S + ROW_S * len(chances) * (length + 1))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("streams", STREAMS)
def test_the_price_is_as_good_as_the_best_fixed_length(mix: str, streams: int) -> None:
    """And as good as none, however large the batch is."""
    chances = [MIXES[mix][at % len(MIXES[mix])] for at in range(streams)]
    assert found(chances) >= 0.97 * max(fixed(chances, length) for length in FIXED)
    assert found(chances) >= 0.99 * fixed(chances, 0)


def test_nothing_is_drafted_where_a_row_costs_what_it_brings() -> None:
    offers = [Offer(0.9, 15, 1e-3)] * 100
    assert lengths_that_pay(offers, 100, 0.1, 1.0, 1000) == [0] * 100


def test_drafts_keep_to_what_is_spare() -> None:
    offers = [Offer(0.9, 15, 1e-4), Offer(0.8, 3, 1e-4)]
    assert sum(lengths_that_pay(offers, 2, 0.1, 1.0, 7)) == 7
    assert sum(lengths_that_pay(offers, 2, 0.1, 4.5e-4, 100)) == 4
    assert lengths_that_pay(offers, 2, 0.1, 1.0, 100)[1] == 3


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


def guessing(streams: int, **options: Any) -> Harness:
    """So many streams of 40 tokens, of a model that guesses: mostly rightly, until a fifth of its guesses."""
    h = Harness(**({"guesses_max": 4, "pages": 400} | options))
    knowing(h.scheduler, StepCost(row_s=1e-5, fixed_s=1e-2))
    for handle in range(streams):
        h.add(handle, [handle, 7, 8, 9], greedy(40, seed=handle + 1))
    h.run()
    h.assert_all_as_solo()
    return h


def test_guesses_are_drafts_of_the_next_step() -> None:
    h = guessing(3)
    assert len(h.plans) < 25
    assert sum(sum(plan.guesses) for plan in h.plans) > 100
    assert all(end.accepted > 0.5 * end.drafted > 10 for end in h.finished.values())
    asked = [plan for plan in h.plans if plan.guesses]
    assert all(len(plan.guesses) == len(plan.slots) for plan in asked)


def test_what_guesses_cost_decides() -> None:
    """As a part of a decode: where one takes as long, none is asked for."""
    none, few, many = (guessing(1, guess_share=share) for share in (1.0, 0.3, 0.01))
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
