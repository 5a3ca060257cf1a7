"""The real scheduler drives the real runner, in a pool so small that sequences are preempted.

Everything a production step mixes is in here: decodes beside chunks, pages handed from one owner to
the next, prefixes found in the cache, recomputation after preemption. The oracle must not notice.
"""

from __future__ import annotations

import random

import pytest

from engine.core.config import SchedulerConfig
from engine.core.messages import AddSequence, FinishReason, SamplingParams, StepOutput, TokenLogprobs
from engine.core.scheduler import Scheduler
from engine.runtime.model_runner import ModelRunner
from tests.engine.models import FAMILIES, VOCAB_SIZE, reference_logprobs, reference_model
from tests.engine.runtime.conftest import MakeModel, load
from tests.engine.runtime.test_oracle import TOLERANCE, distance

OUTPUTS = 64
PAGES = 32


def serve(scheduler: Scheduler, runner: ModelRunner, added: list[AddSequence]) -> list[StepOutput]:
    """Until nobody is left; the laws are checked after every step."""
    steps: list[StepOutput] = []
    for now, message in enumerate(added):
        scheduler.add(message, float(now))
    while scheduler.has_work:
        plan = scheduler.plan(100.0 + len(steps))
        assert plan is not None
        scheduler.commit(plan, runner.run(plan), 100.5 + len(steps))
        scheduler.check()
        report = scheduler.report()
        assert report is not None
        steps.append(report)
    return steps


@pytest.mark.parametrize("family", FAMILIES)
def test_many_together_twice_under_pressure(tiny_model: MakeModel, family: str) -> None:
    path = tiny_model(family)
    geometry = load(path).cache.geometry
    runner = load(path, max_num_seqs=6, step_tokens_max=48, kv_cache_bytes=PAGES * geometry.page_bytes)
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
        expected = reference_logprobs(model, added.prompt_ids + tokens)[len(added.prompt_ids) - 1 : -1]
        assert tokens == expected.argmax(dim=-1).tolist()
        assert distance(logprobs[added.handle], tokens, expected) < TOLERANCE
    last = steps[-1].stats
    assert last.preemptions > 0
    assert last.prefix_hit_tokens > 200
    assert last.pages_owned == 0
    assert last.pages_free + last.pages_cached == PAGES


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
