"""The real scheduler drives the real runner, in a pool so small that sequences are preempted.

Everything a production step mixes is in here: decodes beside chunks, pages handed from one owner to
the next, prefixes found in the cache, recomputation after preemption. The oracle must not notice.
"""

from __future__ import annotations

import random
from array import array
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from engine.contract.messages import (
    FinishReason,
    Pending,
    Plan,
    Runner,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
)
from engine.contract.packing import TOKENS, Biases
from engine.core.drafts.drafter import Drafts
from engine.core.drafts.prediction import PredictionDrafts
from engine.core.queue.newcomers import AddSequence
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.core.sequence import Sequence
from tests.bench.engine.core_window import draft_by
from tests.core_laws import check
from tests.effort import some
from tests.engine.models import FAMILIES, VOCAB_SIZE, reference_logprobs, reference_model
from tests.engine.runtime.conftest import MakeModel, load
from tests.engine.runtime.test_oracle import TOLERANCE, distance
from tests.fake_drafts import FakeDrafts
from tests.fake_grammars import FakeGrammars

OUTPUTS = 64
PROMPT_LENS = (17, 1, 2, 15, 16, 40)
PAGES = 32


def serve(scheduler: Scheduler, runner: Runner, added: list[AddSequence]) -> list[StepOutput]:
    """Until nobody is left; the laws are checked after every step."""
    steps: list[StepOutput] = []
    for now, message in enumerate(added):
        scheduler.add(message, float(now))
    while scheduler.has_work or scheduler.masks.sequences:
        plan = scheduler.plan(100.0 + len(steps))
        assert plan is not None
        scheduler.commit(plan, runner.launch(plan).collect(), 100.5 + len(steps))
        check(scheduler)
        report = scheduler.report()
        assert report is not None
        steps.append(report)
    return steps


@pytest.mark.parametrize("family", FAMILIES)
def test_many_together_twice_under_pressure(tiny_model: MakeModel, family: str) -> None:
    path = tiny_model(family)
    geometry = load(path).cache.geometry
    runner = load(path, max_num_seqs=6, max_step_tokens=48, kv_cache_memory=PAGES * geometry.page_bytes)
    rng = random.Random(4)
    prompts = [rng.choices(range(VOCAB_SIZE), k=length) for length in (5, 30, 200, 1, 64, 17, 90, 40)]
    prompts.append(prompts[2] + [7, 8, 9])
    sampling = SamplingParams(seed=1, max_tokens=OUTPUTS, temperature=0.0, logprobs=2)
    cold = [AddSequence(i, f"cold-{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
    warm = [AddSequence(100 + i, f"warm-{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
    scheduler = Scheduler(SchedulerConfig(step_tokens_max=48, queue_len_max=64), runner.info)
    steps = serve(scheduler, runner, cold) + serve(scheduler, runner, warm)

    model = reference_model(path)
    outputs, logprobs = collect(steps)
    for added in (*cold, *warm):
        tokens = outputs[added.handle]
        assert len(tokens) == OUTPUTS
        expected = reference_logprobs(model, [*added.prompt_ids, *tokens])[len(added.prompt_ids) - 1 : -1]
        assert tokens == expected.argmax(dim=-1).tolist()
        assert distance(logprobs[added.handle], tokens, expected) < TOLERANCE
    last = steps[-1].stats
    assert last.preemptions > 0
    assert last.prefix_hit_tokens > 200
    assert last.pages_owned == 0
    assert last.pages_free + last.pages_cached == PAGES


@pytest.mark.parametrize(
    ("kernels", "prompt_len"),
    [*product(["native"], PROMPT_LENS), *product(["torch"], some(PROMPT_LENS, usual=1))],
)
def test_choices_are_what_requests_of_their_own_would_be(
    tiny_model: MakeModel, kernels: str, prompt_len: int
) -> None:
    """With the native kernels to the bit, though all but one take their prompt from another's page."""
    path = tiny_model("qwen3")
    prompt = random.Random(prompt_len).choices(range(VOCAB_SIZE), k=prompt_len)
    choices = []
    for handle in range(7):
        temperature, penalty = handle % 3 / 2, handle % 2 / 2
        sampling = SamplingParams(handle, 20, temperature, logprobs=1, frequency_penalty=penalty)
        choices.append(AddSequence(handle, "req", prompt, sampling))
    runner = load(path, max_num_seqs=3, max_step_tokens=16, kernels=kernels)
    config = SchedulerConfig(step_tokens_max=16, queue_len_max=64)
    steps = serve(Scheduler(config, runner.info), runner, choices)
    alone = load(path, max_num_seqs=3, max_step_tokens=64, kernels=kernels)
    config = SchedulerConfig(step_tokens_max=64, queue_len_max=64, prefix_cache=False)
    in_turn = Scheduler(config, alone.info)
    expected = [step for choice in choices for step in serve(in_turn, alone, [choice])]
    (tokens, logprobs), (tokens_alone, logprobs_alone) = all_said(steps), all_said(expected)
    assert tokens == tokens_alone
    for handle, values in logprobs.items():
        error = 0.0 if kernels == "native" else TOLERANCE
        assert values == pytest.approx(logprobs_alone[handle], abs=error, rel=0.0)
    assert steps[-1].stats.prefix_hit_tokens == 6 * (prompt_len - 1)
    wrong = sum(end.drafted - end.accepted for step in steps for end in step.finished)
    assert sum(step.stats.step_tokens for step in steps) == prompt_len - 1 + 7 * 20 + wrong


def serve_overlapped(
    scheduler: Scheduler, runner: Runner, added: list[AddSequence], least: float = 0.5
) -> list[StepOutput]:
    """The same, each step launched before the one before it is collected: this share of them at least."""
    steps: list[StepOutput] = []
    flying: tuple[Plan, Pending] | None = None
    overlaps = 0
    for now, message in enumerate(added):
        scheduler.add(message, float(now))
    while scheduler.has_work or scheduler.masks.sequences or flying:
        plan = scheduler.plan(100.0 + len(steps))
        following = None if plan is None else (plan, runner.launch(plan))
        if flying is not None:
            overlaps += following is not None
            scheduler.commit(flying[0], flying[1].collect(), 100.5 + len(steps))
        check(scheduler)
        flying = following
        if report := scheduler.report():
            steps.append(report)
    assert overlaps > least * len(steps)
    return steps


def all_said(steps: list[StepOutput]) -> tuple[dict[int, list[int]], dict[int, list[float]]]:
    """By handle: its tokens and then why it ended; and the log-probabilities of prompt and output."""
    tokens: dict[int, list[int]] = defaultdict(list)
    logprobs: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        for handle, entries in step.prompt_logprobs:
            logprobs[handle] += [entry.logprob for entry in entries]
        for row, handle in enumerate(step.handles):
            tokens[handle].append(step.tokens[row])
            if step.logprobs and (entry := step.logprobs[row]) is not None:
                logprobs[handle].append(entry.logprob)
        for end in step.finished:
            tokens[end.handle].append(end.reason)
    return tokens, logprobs


@pytest.mark.parametrize("family", FAMILIES)
def test_overlapped_equals_plain_token_by_token(tiny_model: MakeModel, family: str) -> None:
    """Greedy, drawn, penalised for what came before, stopped, with log-probabilities; under pressure."""
    path = tiny_model(family)
    rng = random.Random(11)
    company: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 20, "presence_penalty": 0.7, "frequency_penalty": 0.5},
        {"temperature": 0.0, "repetition_penalty": 1.4},
        {"temperature": 1.0, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 9)), "min_tokens": 5},
        {"temperature": 0.7, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 1.0, "min_p": 0.1, "logit_bias": Biases.of(((3, 2.0),)), "logprobs": 0},
    ]
    added = []
    for handle in range(14):
        prompt = rng.choices(range(VOCAB_SIZE), k=rng.choice([1, 7, 16, 33, 90]))
        sampling = SamplingParams(**{"seed": handle, "max_tokens": 24} | company[handle % len(company)])
        added.append(AddSequence(handle, f"req-{handle}", prompt, sampling))
    geometry = load(path).cache.geometry
    said = []
    for drive in (serve, serve_overlapped):
        runner = load(path, max_num_seqs=5, max_step_tokens=24, kv_cache_memory=9 * geometry.page_bytes)
        scheduler = Scheduler(SchedulerConfig(step_tokens_max=24, queue_len_max=64), runner.info)
        steps = drive(scheduler, runner, added)
        said.append(all_said(steps))
        assert steps[-1].stats.preemptions > 0
        assert steps[-1].stats.pages_owned == 0
    (tokens, logprobs), (tokens_overlapped, logprobs_overlapped) = said
    assert tokens_overlapped == tokens
    assert {said[-1] for said in tokens.values()} == {FinishReason.LENGTH, FinishReason.STOP}
    assert logprobs_overlapped.keys() == logprobs.keys()
    for handle, values in logprobs.items():
        assert logprobs_overlapped[handle] == pytest.approx(values, abs=TOLERANCE)


def collect(steps: list[StepOutput]) -> tuple[dict[int, list[int]], dict[int, list[TokenLogprobs]]]:
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[TokenLogprobs]] = {}
    for step in steps:
        for handle, token, entry in zip(step.handles, step.tokens, step.logprobs, strict=True):
            assert entry is not None
            tokens.setdefault(handle, []).append(token)
            logprobs.setdefault(handle, []).append(entry)
        assert all(finished.reason is FinishReason.LENGTH for finished in step.finished)
    return tokens, logprobs


FEATURES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.01},
    {"temperature": 1.0, "frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.3},
    {"temperature": 1.0, "logit_bias": Biases.of([(3, 4.0), (5, -50.0)])},
    {"temperature": 1.5, "stop_token_ids": (1, 2, 3, 4, 5, 6, 7, 8), "min_tokens": 9},
)


@pytest.mark.parametrize(
    ("family", "dtype", "right_share"),
    [
        ("llama", "bfloat16", 0.0),
        ("llama", "bfloat16", 1.0),
        ("mistral", "bfloat16", 0.6),
        ("qwen3", "float32", 0.6),
    ],
)
def test_drafts_change_no_bit(tiny_model: MakeModel, family: str, dtype: str, right_share: float) -> None:
    """Whatever share of them is right: tokens, log-probabilities and reasons of ends are the same, of all
    that a request may ask for, in a pool in which sequences are preempted."""
    path = tiny_model(family)
    page_bytes = load(path, dtype=dtype).cache.geometry.page_bytes
    rng = random.Random(f"{family} {right_share}")
    added = []
    for handle, fields in enumerate(FEATURES * 2):
        prompt = rng.choices(range(VOCAB_SIZE), k=rng.choice((1, 5, 15, 16, 17, 60)))
        usual = {"seed": handle, "max_tokens": 40, "logprobs": handle % 3, "prompt_logprobs": 1}
        sampling = SamplingParams(**usual | fields)
        grammar = f"grammar {handle}" if handle % 4 == 1 else ""
        added.append(AddSequence(handle, f"req-{handle}", prompt, sampling, grammar=grammar))

    def served(drafter_of: Callable[[Sequence], Drafts] | None) -> tuple[list[StepOutput], Scheduler]:
        runner = load(path, dtype=dtype, max_num_seqs=6, max_step_tokens=64, kv_cache_memory=12 * page_bytes)
        config = SchedulerConfig(step_tokens_max=64, queue_len_max=64, drafts_max=15 if drafter_of else 0)
        scheduler = Scheduler(config, runner.info, grammars=FakeGrammars(lambda: 0.0, VOCAB_SIZE))
        if drafter_of is not None:
            draft_by(scheduler, drafter_of)
        return serve(scheduler, runner, added), scheduler

    plain, _ = served(None)
    tokens, logprobs = all_said(plain)
    answers = {handle: own[:-1] for handle, own in tokens.items()}
    drafters: list[FakeDrafts] = []

    def drafter_of(sequence: Sequence) -> Drafts:
        handle, prompt_len = sequence.handle, sequence.prompt_len
        own = [*added[handle].prompt_ids, *answers[handle]]
        if handle % 3 == 0:  # by what its caller predicts, of which as much is right
            rng, stops = random.Random(handle), sequence.sampling.stop_token_ids
            told = [t if rng.random() < right_share else rng.randrange(VOCAB_SIZE) for t in answers[handle]]
            return PredictionDrafts(array(TOKENS, told), prompt_len, prompt_len + 40, stops)
        shares = right_share, random.Random(handle)
        drafters.append(FakeDrafts(own, sequence.sampling.stop_token_ids, VOCAB_SIZE, *shares))
        return drafters[-1]

    drafted, _ = served(drafter_of)
    assert all_said(drafted) == (tokens, logprobs)
    assert plain[-1].stats.preemptions > 0
    has_predicted = any(step.predicted for step in drafted)
    assert has_predicted or right_share == 0.0, "one that is all wrong is lost at its first token"
    verified, right = sum(each.verified for each in drafters), sum(each.right for each in drafters)
    assert verified > 100
    assert (len(drafted) < 0.6 * len(plain)) or right_share < 1.0
    assert right == verified or right_share < 1.0
    assert right_share == 0.0 or right > 0.3 * right_share * verified
