"""A flood of newcomers is taken in bit by bit, and nobody else's newcomer waits behind it."""

from __future__ import annotations

import hashlib
import math
import random

import msgspec
import pytest

from engine.contract.messages import (
    AbortSequences,
    AddPrompt,
    AddRequest,
    CoreInput,
    FinishReason,
    LiftDeadlines,
    PauseSequences,
    ResumeSequences,
    SamplingParams,
)
from engine.contract.packing import packed
from engine.core.queue import newcomers
from engine.core.queue.newcomers import TAKEN_MAX, AddSequence, Intake, sequences_of
from engine.core.scheduler import Scheduler
from tests.bench.engine.core_window import alone
from tests.engine.core.harness import STEP_S, Harness, greedy
from tests.engine.core.test_loop import World

FLOOD = 5 * TAKEN_MAX


def newcomer(handle: int, tenant: str = "flood") -> AddSequence:
    prompt = [handle % 40 + 1] * 5
    return AddSequence(handle, f"req_{handle}", prompt, SamplingParams(seed=1, max_tokens=2), tenant=tenant)


def filled(*newcomers: AddSequence) -> Intake:
    waiting = Intake()
    for each in newcomers:
        waiting.put(each, 0.0)
    return waiting


def test_tenants_take_turns_and_a_tenants_own_keep_their_order() -> None:
    flood = [newcomer(handle) for handle in range(1, FLOOD + 1)]
    others = [newcomer(FLOOD + 1, "a"), newcomer(FLOOD + 2, "b"), newcomer(FLOOD + 3, "a")]
    waiting = filled(*flood, *others)
    first = waiting.take(0.0)
    assert len(first) == TAKEN_MAX
    assert {each.handle for each in others} <= {each.handle for each in first[:6]}
    taken = [*first, *(each for _ in range(FLOOD // TAKEN_MAX) for each in waiting.take(0.0))]
    assert [each for each in taken if each.tenant == "flood"] == flood
    assert not waiting.waiting
    assert not waiting.take(0.0)


def test_a_step_takes_in_no_more_once_their_prompts_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newcomers, "TAKEN_TOKENS_MAX", 11)
    waiting = filled(*(newcomer(handle) for handle in range(1, 8)), newcomer(8, "a"))
    taken = [[each.handle for each in waiting.take(0.0)] for _ in range(3)]
    assert taken == [[1, 8, 2], [3, 4, 5], [6, 7]], "five tokens each, and the third reaches the bound"


def test_a_newcomer_that_is_aborted_is_not_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking in what only ends once held up a step by seconds, when a request of long prompts was left."""
    added = list[int]()

    def add(scheduler: Scheduler, message: AddSequence, now: float) -> None:
        added.append(message.handle)
        scheduler_add(scheduler, message, now)

    scheduler_add = Scheduler.add
    monkeypatch.setattr(Scheduler, "add", add)
    prompt = AddPrompt(packed([1, 2, 3]), 2, 0, list(range(100)))
    left = AddRequest(1, "left", [prompt], SamplingParams(0, 2))
    world = World([left, AbortSequences([*range(1, 101)]), alone(newcomer(101))])
    world.loop.run()
    assert added == [101]
    ends = dict(world.ends)
    assert len(world.ends) == len(ends) == 101
    assert {ends[handle] for handle in range(1, 101)} == {FinishReason.ABORTED}
    assert ends[101] is FinishReason.LENGTH


def test_what_is_computed_of_a_prompt_alone_is_computed_once_for_all_choices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each choice once hashed its prompt and looked through its ids: 17 ms for 130,000 tokens."""
    h, hashed = Harness(pages=64), list[bytes]()

    def sha256(content: bytes) -> hashlib._Hash:
        hashed.append(content)
        return plain(content)

    plain = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", sha256)
    pages_len, size = 10, h.runner.info.page_size
    prompt = AddPrompt(packed([7] * pages_len * size), 2, 0, list(range(8)))
    choices = list(sequences_of(AddRequest(1, "r", [prompt], SamplingParams(0, 2))))
    for choice in choices:
        h.take(choice)
    assert len({id(choice.prompt_ids) for choice in choices}) == 1
    assert sum(len(content) == 32 + 4 * size for content in hashed) <= pages_len
    assert len(hashed) <= pages_len + 8 + 1, "at most one for each choice, of what fills no page"
    monkeypatch.undo()
    h.run_as_solo()


def test_the_newest_is_the_last_before_the_first_that_waits() -> None:
    waiting = filled(*(newcomer(handle) for handle in range(1, FLOOD + 1)), newcomer(FLOOD + 1, "a"))
    assert waiting.newest == 0
    waiting.take(0.0)
    assert waiting.newest == TAKEN_MAX - 1, "one turn was another tenant's"
    while waiting.waiting:
        waiting.take(0.0)
    assert waiting.newest == FLOOD + 1


def test_what_is_taken_by_name_is_not_taken_again() -> None:
    waiting = filled(*(newcomer(handle) for handle in range(1, 6)))
    assert [each.handle for each in waiting.take_named([4, 9, 2], 0.0)] == [4, 2]
    assert not waiting.take_named([4, 2], 0.0)
    assert [each.handle for each in waiting.take(0.0)] == [1, 3, 5]


def test_the_time_until_it_is_taken_in_counts_against_a_newcomers_deadline() -> None:
    hasty = msgspec.structs.replace(newcomer(3), first_token_s=1.0)
    waiting = filled(newcomer(1), newcomer(2, "a"), hasty)
    assert [each.first_token_s for each in waiting.take_named([1], 0.25)] == [math.inf]
    assert [each.first_token_s for each in waiting.take(1.25)] == [math.inf, -0.25]


@pytest.mark.parametrize(
    ("first_token_s", "reason"), [(2.0, FinishReason.LENGTH), (0.25, FinishReason.TOO_LATE)]
)
def test_a_newcomer_whose_time_is_over_when_it_is_taken_in_is_refused(
    first_token_s: float, reason: FinishReason
) -> None:
    h = Harness()
    h.add(1, [1] * 5, greedy(2), first_token_s=first_token_s - 0.5)
    h.run()
    assert h.reason(1) is reason


def test_a_deadline_may_be_lifted_before_its_newcomer_is_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newcomers, "TAKEN_MAX", 1)
    flood: list[CoreInput] = [alone(newcomer(handle)) for handle in range(1, 12)]
    hasty = [alone(msgspec.structs.replace(newcomer(handle), first_token_s=-1.0)) for handle in (12, 13)]
    world = World([*flood, *hasty, LiftDeadlines([12])])
    world.loop.run()
    ends = dict(world.ends)
    assert (ends[12], ends[13]) == (FinishReason.LENGTH, FinishReason.TOO_LATE)


@pytest.mark.parametrize(("steps", "reason"), [(3, FinishReason.TOO_LATE), (300, FinishReason.LENGTH)])
def test_a_newcomers_time_runs_while_the_loop_takes_in_others(
    steps: int, reason: FinishReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its tenant's twelve, one is taken in for a step: when its turn comes, eleven steps are over."""
    monkeypatch.setattr(newcomers, "TAKEN_MAX", 1)
    flood: list[CoreInput] = [alone(newcomer(handle)) for handle in range(1, 12)]
    world = World([*flood, alone(msgspec.structs.replace(newcomer(12), first_token_s=steps * STEP_S))])
    world.loop.run()
    ends = dict(world.ends)
    assert ends[12] is reason
    assert {ends[handle] for handle in range(1, 12)} == {FinishReason.LENGTH}


def test_a_victims_newcomer_is_seated_in_the_next_step_whatever_came_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(newcomers, "TAKEN_MAX", 2)
    flood: list[CoreInput] = [alone(newcomer(handle)) for handle in range(1, 101)]
    world = World([*flood, alone(newcomer(101, "victim"))])
    world.loop.run()
    assert 101 in [started.handle for started in world.outbox.outputs[0].started]
    assert sorted(handle for handle, _ in world.ends) == [*range(1, 102)]


def test_each_newcomer_ends_once_whatever_is_said_of_it_before_it_is_taken_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(newcomers, "TAKEN_MAX", 3)
    for seed in range(30):
        rng, sent, batches = random.Random(seed), 0, list[list[CoreInput]]()
        aborted, paused = set[int](), set[int]()
        for _ in range(12):
            batch: list[CoreInput] = []
            for _ in range(rng.randrange(12)):
                sent += 1
                batch.append(alone(newcomer(sent, rng.choice("ab"))))
            some = rng.sample(range(1, sent + 1), min(sent, 4))
            if some and rng.random() < 0.5:
                aborted |= set(some)
                batch.append(AbortSequences(some))
            elif some:
                paused |= set(some)
                batch.append(PauseSequences(some))
            batches.append(batch)
        world = World(*batches, [ResumeSequences(sorted(paused))])
        world.loop.run()
        ends = dict(world.ends)
        assert sorted(handle for handle, _ in world.ends) == sorted(ends)
        assert sorted(ends) == [*range(1, sent + 1)], seed
        assert {h for h, reason in ends.items() if reason is FinishReason.ABORTED} <= aborted
