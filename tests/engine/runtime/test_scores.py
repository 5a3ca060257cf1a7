"""The log-probabilities of tokens behind prompts that begin alike: those of transformers, and to the bit the
same whatever is cached, beside them, or in the chunk."""

from __future__ import annotations

import random

import pytest
import torch

from engine.contract.messages import AddPrompt, AddRequest, Runner, SamplingParams
from engine.contract.packing import packed
from engine.core.queue.newcomers import AddSequence, sequences_of
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from tests.engine.models import FAMILIES, VOCAB_SIZE, reference_logprobs, reference_model
from tests.engine.runtime.conftest import MakeModel, load
from tests.engine.runtime.test_with_scheduler import serve, serve_overlapped

SHARED = random.Random(3).choices(range(VOCAB_SIZE), k=75)
SUFFIXES = [random.Random(n).choices(range(VOCAB_SIZE), k=n) for n in (1, 2, 30, 17, 5, 90)]
SCORED = [[5], [7, 300, 7], [1, 2, 3, 4], [319, 0], list(range(60)), [9, 8]]
TOLERANCE = 1e-4


def asked(first: int = 0) -> list[AddSequence]:
    prompts = [
        AddPrompt(packed(suffix), 0, 0, [0], packed(scored))
        for suffix, scored in zip(SUFFIXES, SCORED, strict=True)
    ]
    request = AddRequest(first, "req", prompts, SamplingParams(0, 0), shared=packed(SHARED))
    return list(sequences_of(request))


def scheduler(runner: Runner, tokens: int, **settings: bool) -> Scheduler:
    config = SchedulerConfig(step_tokens_max=tokens, queue_len_max=64, **settings)  # type: ignore[arg-type]
    return Scheduler(config, runner.info)


@pytest.mark.parametrize(
    ("family", "kernels"), [*((family, "native") for family in FAMILIES), ("llama", "torch")]
)
def test_scores_are_those_of_the_models_logits(tiny_model: MakeModel, family: str, kernels: str) -> None:
    path = tiny_model(family)
    runner = load(path, max_num_seqs=4, max_step_tokens=32, kernels=kernels)
    company = SamplingParams(3, 30, 0.7, logprobs=2, prompt_logprobs=1, frequency_penalty=0.5)
    beside = [AddSequence(100, "beside", SHARED[:20], company, tenant="victim")]
    steps = serve(scheduler(runner, 32), runner, [*beside, *asked()])
    scores = {handle: values for step in steps for handle, values in step.scores}
    model = reference_model(path)
    for handle, (suffix, scored) in enumerate(zip(SUFFIXES, SCORED, strict=True)):
        expected = reference_logprobs(model, SHARED + suffix)[-1][scored]
        assert torch.allclose(torch.tensor(scores[handle]), expected, atol=TOLERANCE, rtol=0)
        ours, theirs = torch.tensor(scores[handle]).softmax(-1), expected.softmax(-1)
        assert torch.allclose(ours, theirs, atol=TOLERANCE, rtol=0)
    assert sum(len(step.tokens) for step in steps) == 30, "the stream's, and nothing else is sampled"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_scores_are_the_same_to_the_bit_cold_warm_beside_others_and_in_chunks(
    tiny_model: MakeModel, family: str
) -> None:
    path = tiny_model(family)
    alone = load(path, max_num_seqs=1, max_step_tokens=512, kernels="native")
    in_turn = scheduler(alone, 512, prefix_cache=False)
    expected = {
        handle: values
        for message in asked()
        for step in serve(in_turn, alone, [message])
        for handle, values in step.scores
    }
    assert len(expected) == len(SUFFIXES)
    for tokens, slots in ((8, 8), (33, 3), (512, 6)):
        runner = load(path, max_num_seqs=slots, max_step_tokens=tokens, kernels="native")
        core = scheduler(runner, tokens)
        company = SamplingParams(3, 60, 0.7, logprobs=2, frequency_penalty=0.5)
        beside = [AddSequence(900, "beside", SHARED[:20], company)]
        cold, warm = (serve_overlapped(core, runner, [*beside, *asked()]), serve(core, runner, asked(1000)))
        found = {
            handle % 1000: values
            for steps in (cold, warm)
            for step in steps
            for handle, values in step.scores
        }
        told = [handle for steps in (cold, warm) for step in steps for handle, _ in step.scores]
        assert sorted(told) == [*range(6), *range(1000, 1006)]
        assert found == expected
        assert {handle: values for step in cold for handle, values in step.scores} == expected
        assert warm[-1].stats.prefix_hit_tokens >= 6 * 64
