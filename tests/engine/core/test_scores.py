"""Tokens that are scored behind prompts which begin alike: nothing is sampled, what they share is computed
once, and nothing but that stays in the cache."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from engine.contract.messages import AddPrompt, AddRequest, FinishReason, SamplingParams, Want
from engine.contract.packing import packed
from engine.core.estimate.cost import StepCost
from engine.core.queue.newcomers import sequences_of
from tests.engine.core.harness import Harness, greedy, knowing

SLOW = StepCost(token_s=1.0, fixed_s=0.1)
"""Tokens so slow that every snapshot of a state pays."""


def shared(length: int) -> list[int]:
    return [7 * at % 50 for at in range(length)]


def asked(
    shared_len: int, suffixes: list[list[int]], first: int = 1, scored: tuple[int, ...] = (3, 9)
) -> AddRequest:
    prompts = [AddPrompt(packed(suffix), 0, 0, [1], packed(scored)) for suffix in suffixes]
    sampling = SamplingParams(1, 0)
    return AddRequest(first, f"req_{first}", prompts, sampling, shared=packed(shared(shared_len)), tenant="t")


def run(h: Harness, request: AddRequest) -> int:
    """Run a request's sequences, the first before the others, as the API process sends them. Returns the
    tokens that were computed."""
    before = sum(sum(plan.lengths) for plan in h.plans)
    first, *others = sequences_of(request)
    for some in ([first], others):
        for message in some:
            h.take(message)
        h.run()
    return sum(sum(plan.lengths) for plan in h.plans) - before


SUFFIXES = [[1, 2, 3], [4, 4], [5, 6, 7, 8, 9, 10, 11, 12, 13], [1, 2, 3, 4]]


@pytest.mark.parametrize("shared_len", [3, 4, 26, 40])
@pytest.mark.parametrize("states", [{}, {"state_bytes": 8, "state_places": 40}])
def test_what_prompts_begin_with_is_computed_once(shared_len: int, states: dict[str, Any]) -> None:
    h = Harness(pages=200, **states)
    knowing(h.scheduler, SLOW)
    known_len = shared_len // 4 * 4
    rest = sum(shared_len - known_len + len(suffix) for suffix in SUFFIXES)
    assert run(h, asked(shared_len, SUFFIXES)) == known_len + rest
    assert run(h, asked(shared_len, SUFFIXES, 11)) == rest, "the same again"
    assert [h.started[handle].cached_len for handle in (12, 13, 14)] == [known_len] * 3
    h.assert_all_as_solo()
    assert {h.reason(handle) for handle in h.messages} == {FinishReason.LENGTH}
    assert not any(any(plan.wants) for plan in h.plans), "nothing is sampled"
    stats = h.scheduler.stats()
    assert stats.pages_cached == known_len // 4, "nobody asks again for what lies behind"
    assert stats.states.kept == bool(states and known_len)


def test_prompts_that_share_nothing_known_leave_their_pages_as_any_other() -> None:
    h = Harness()
    [alone] = sequences_of(msgspec.structs.replace(asked(0, [shared(13)]), shared=b""))
    h.take(alone)
    h.run()
    assert h.scheduler.stats().pages_cached == 3


def test_they_take_what_others_left_beyond_what_they_share() -> None:
    h = Harness()
    h.add(1, shared(20), greedy(1), tenant="t")
    h.run()
    [message] = sequences_of(asked(8, [shared(20)[8:]], 2))
    h.take(message)
    h.run()
    assert h.started[2].cached_len == 19
    h.assert_all_as_solo()


def test_streams_go_on_beside_them_in_every_step() -> None:
    h = Harness(pages=400, slots=8, step_tokens_max=24)
    h.add(100, [1, 2, 3], greedy(40), tenant="victim")
    h.step()
    for message in sequences_of(asked(30, [[n, n + 1] for n in range(40)])):
        h.take(message)
    h.run()
    decodes = [plan.wants.count(Want.SAMPLE) for plan in h.plans[1:40]]
    assert decodes == [1] * 39
    h.assert_all_as_solo()


def test_a_score_that_is_not_finite_ends_its_sequence_alone() -> None:
    h = Harness()
    for message in sequences_of(asked(8, SUFFIXES[:2])):
        h.take(message)
    plan = h.plan()
    while plan is not None:
        result = h.runner.run(plan)
        broken = [
            (slot, [math.nan, *scores[1:]] if h.runner.slots[slot].start.prompt_len == 11 else scores)
            for slot, scores in result.scores
        ]
        h.scheduler.commit(plan, msgspec.structs.replace(result, scores=broken), h.now)
        h.read()
        plan = h.plan()
    assert (h.reason(1), h.reason(2)) == (FinishReason.NUMERIC, FinishReason.LENGTH)
    assert list(h.scores) == [2]


@pytest.mark.parametrize(
    "sampling", [SamplingParams(1, 1, scored=packed([1])), SamplingParams(1, 0, scored=packed([1, 50]))]
)
def test_what_cannot_be_scored_is_never_queued(sampling: SamplingParams) -> None:
    h = Harness()
    h.add(1, [1, 2], sampling)
    h.run()
    assert h.reason(1) is FinishReason.REJECTED


def test_the_ids_of_a_request_are_put_together_as_they_were_sent() -> None:
    made = [*sequences_of(asked(9, SUFFIXES))]
    assert [[*one.prompt_ids] for one in made] == [shared(9) + suffix for suffix in SUFFIXES]
    assert {one.shared_len for one in made} == {9}
    chains = [one.prompt_ids.chain(b"", 4) for one in made]  # type: ignore[attr-defined]
    for one, chain in zip(made, chains, strict=True):
        tokens = one.prompt_ids.tokens  # type: ignore[attr-defined]
        [alone] = sequences_of(msgspec.structs.replace(asked(0, [[*tokens]]), shared=b""))
        own = alone.prompt_ids.chain(b"", 4)  # type: ignore[attr-defined]
        assert chain.extend(tokens, len(tokens) // 4) == own.extend(tokens, len(tokens) // 4)
