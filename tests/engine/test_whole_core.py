"""Scheduler, pages and tensors together, against transformers.

Many requests of mixed lengths run at once, in chunks, on a cold and then on a warm prefix cache, and
again in a pool so small that sequences are preempted. The oracle computes every answer in one whole
forward pass: a token is greedy's choice when it is the most likely after all that precede it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.contract.messages import FinishReason, SamplingParams, StepOutput, TokenLogprobs
from engine.core.config import SchedulerConfig
from engine.core.queue.newcomers import AddSequence
from engine.core.scheduler import Scheduler
from engine.core.step.swap import Preference
from engine.runtime.host.runner import HostRunner
from engine.runtime.load import load_runner
from engine.runtime.setup.config import RunnerConfig
from tests.engine.models import FAMILIES, VOCAB_SIZE, make_tiny_model, reference_logprobs, reference_model

OUTPUT_LEN = 64
PROMPT_LENS = (1, 2, 15, 16, 17, 33, 64, 65, 100, 180)
SLOTS = 6
STEP_TOKENS_MAX = 40
PAGE_SIZE = 16
TOLERANCE = 1e-4

Model = tuple[Path, Any]
"""Where it lies, and the same in transformers."""
Prompts = list[list[int]]


class Engine:
    """The core without its loop: one runner, one scheduler, stepped until nobody is left."""

    def __init__(
        self,
        path: Path,
        pages: int | None = None,
        host_pages: int = 0,
        prefers_swap: Preference = lambda _: True,
        *,
        host_tier: bool = False,
    ) -> None:
        self.runner = self._load(path, pages, host_pages)
        self.runner.info = msgspec.structs.replace(self.runner.info, host_tier=host_tier)
        self.scheduler = Scheduler(
            SchedulerConfig(step_tokens_max=STEP_TOKENS_MAX), self.runner.info, prefers_swap=prefers_swap
        )
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[TokenLogprobs]] = defaultdict(list)
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = defaultdict(list)
        self.cached: dict[int, int] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.preemptions = 0
        self.longest_step = 0
        self.replaced = 0

    @staticmethod
    def _load(path: Path, pages: int | None, host_pages: int) -> HostRunner:
        settings = RunnerConfig(
            str(path),
            device="cpu",
            dtype="float32",
            page_size=PAGE_SIZE,
            max_num_seqs=SLOTS,
            max_step_tokens=STEP_TOKENS_MAX,
            threads=1,
        )
        runner = load_runner(settings, lambda stage: None)
        # the scheduler sees fewer pages than there are
        info = msgspec.structs.replace(runner.info, pages=pages or runner.info.pages, host_pages=host_pages)
        runner.info = info
        assert isinstance(runner, HostRunner)
        return runner

    def run(self, prompts: dict[int, list[int]], sampling: SamplingParams) -> None:
        for handle, prompt in prompts.items():
            self.scheduler.add(AddSequence(handle, f"req_{handle}", prompt, sampling, b""), 0.0)
        while (plan := self.scheduler.plan(0.0)) is not None:
            self.longest_step = max(self.longest_step, sum(plan.lengths))
            self.scheduler.commit(plan, self.runner.run(plan), 0.0)
            self.scheduler.check()
            self._poison()
            self.replaced += len(plan.replaced)
            if (output := self.scheduler.report()) is not None:
                self._take(output)

    @torch.inference_mode()
    def _poison(self) -> None:
        """What nobody holds is not a number, on either side."""
        allocator, cache, host = self.scheduler._allocator, self.runner.cache, self.runner.host
        for layer in (*cache.keys, *cache.values):
            layer[allocator.pages._free] = torch.nan
        for layer in (*host.keys, *host.values):
            layer[allocator.swapper.host._free] = torch.nan

    def _take(self, output: StepOutput) -> None:
        for i, handle in enumerate(output.handles):
            self.tokens[handle].append(output.tokens[i])
            if output.logprobs and (entry := output.logprobs[i]) is not None:
                self.logprobs[handle].append(entry)
        for handle, entries in output.prompt_logprobs:
            self.prompt_logprobs[handle] += entries
        for started in output.started:
            self.cached[started.handle] = started.cached_len
        for finished in output.finished:
            self.reasons[finished.handle] = finished.reason
            self.preemptions += finished.preemptions


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = make_tiny_model(request.param, tmp_path_factory.mktemp("model"))
    return path, reference_model(path)


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    rng = random.Random(7)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENS]


def assert_greedy(oracle: Any, prompt: list[int], tokens: list[int], logprobs: list[TokenLogprobs]) -> None:
    """Every token is the oracle's first choice, with the oracle's log-probability."""
    assert len(tokens) == OUTPUT_LEN
    expected = reference_logprobs(oracle, [*prompt, *tokens])[len(prompt) - 1 : -1]
    assert expected.argmax(dim=-1).tolist() == tokens
    assert [entry.logprob for entry in logprobs] == pytest.approx(
        expected.max(dim=-1).values.tolist(), abs=TOLERANCE
    )
    for entry, row in zip(logprobs, expected, strict=True):
        assert entry.top_logprobs == pytest.approx(row.topk(3).values.tolist(), abs=TOLERANCE)


def greedy(prompt_logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(
        seed=1, max_tokens=OUTPUT_LEN, temperature=0.0, logprobs=3, prompt_logprobs=prompt_logprobs
    )


def test_tokens_equal_transformers_cold_and_warm(model: Model, prompts: Prompts) -> None:
    path, oracle = model
    engine = Engine(path)
    cold = dict(enumerate(prompts))
    warm = {handle + 100: prompt for handle, prompt in cold.items()}
    engine.run(cold, greedy())
    engine.run(warm, greedy())
    for handle, prompt in (cold | warm).items():
        assert_greedy(oracle, prompt, engine.tokens[handle], engine.logprobs[handle])
        assert engine.reasons[handle] is FinishReason.LENGTH
    assert engine.longest_step == STEP_TOKENS_MAX, "nothing was chunked"
    assert all(engine.cached[handle] == 0 for handle in cold)
    for handle, prompt in warm.items():
        assert engine.cached[handle] == len(prompt) - 1
    assert engine.preemptions == 0


def test_tokens_equal_transformers_under_preemption(model: Model, prompts: Prompts) -> None:
    path, oracle = model
    engine = Engine(path, pages=24)  # one long sequence takes 16; all together would take 78
    engine.run(dict(enumerate(prompts)), greedy())
    assert engine.preemptions > 0
    for handle, prompt in enumerate(prompts):
        assert_greedy(oracle, prompt, engine.tokens[handle], engine.logprobs[handle])


@pytest.mark.parametrize("host_pages", [40, 5], ids=["all are swapped", "some have no room"])
def test_tokens_equal_transformers_when_swapped(model: Model, prompts: Prompts, host_pages: int) -> None:
    path, oracle = model
    engine = Engine(path, pages=24, host_pages=host_pages)
    engine.run(dict(enumerate(prompts)), greedy())
    stats = engine.scheduler.stats()
    assert min(stats.swaps_out, stats.swaps_in) > 0
    assert (stats.swaps_out == stats.preemptions) == (host_pages == 40)
    for handle, prompt in enumerate(prompts):
        assert_greedy(oracle, prompt, engine.tokens[handle], engine.logprobs[handle])


def test_tokens_equal_transformers_when_prefixes_come_back_from_host_memory(
    model: Model, prompts: Prompts
) -> None:
    path, oracle = model
    engine = Engine(path, pages=24, host_pages=78, host_tier=True)
    engine.run(dict(enumerate(prompts)), greedy())
    before = engine.scheduler.stats().prefix_host_tokens
    again = {handle + 100: prompt for handle, prompt in enumerate(prompts)}
    engine.run(again, greedy())
    assert engine.scheduler.stats().prefix_host_tokens > before
    for handle, prompt in again.items():
        assert_greedy(oracle, prompt, engine.tokens[handle], engine.logprobs[handle])


def test_doubles_are_merged_and_nobody_notices(model: Model, prompts: Prompts) -> None:
    """Two of the same prompt put out the same, into pages of their own until these are full."""
    path, oracle = model
    engine = Engine(path)
    engine.run({1: prompts[6], 2: prompts[6], 3: prompts[3]}, greedy())
    for handle, prompt in ((1, prompts[6]), (2, prompts[6]), (3, prompts[3])):
        assert_greedy(oracle, prompt, engine.tokens[handle], engine.logprobs[handle])
    assert (
        engine.replaced
        == (len(prompts[6]) + OUTPUT_LEN - 1) // PAGE_SIZE - (len(prompts[6]) - 1) // PAGE_SIZE
    )


def test_prompt_logprobs_equal_transformers_under_preemption(model: Model, prompts: Prompts) -> None:
    path, oracle = model
    engine = Engine(path, pages=24)
    engine.run(dict(enumerate(prompts)), greedy(prompt_logprobs=2))
    assert engine.preemptions > 0
    for handle, prompt in enumerate(prompts):
        expected = reference_logprobs(oracle, prompt)[:-1].gather(
            1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None]
        )
        found = [entry.logprob for entry in engine.prompt_logprobs[handle]]
        assert found == pytest.approx(expected[:, 0].tolist(), abs=TOLERANCE)


def test_a_seeded_draw_does_not_depend_on_company(model: Model, prompts: Prompts) -> None:
    """Law 3 for random tokens: alone, in company, on a warm cache and preempted."""
    path, _ = model
    sampling = SamplingParams(seed=11, max_tokens=OUTPUT_LEN, temperature=0.8, top_p=0.95, top_k=50)
    company = Engine(path, pages=24)
    company.run(dict(enumerate(prompts)), sampling)
    assert company.preemptions > 0
    alone = Engine(path)
    for handle, prompt in enumerate(prompts):
        alone.run({handle: prompt}, sampling)
    assert alone.tokens == company.tokens
