"""Scheduler, pages and tensors together, against transformers.

Many requests of mixed lengths run at once, in chunks, on a cold and then on a warm prefix cache, and
again in a pool so small that sequences are preempted. The oracle computes every answer in one whole
forward pass: a token is greedy's choice when it is the most likely after all that precede it.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.contract.grammars import WHITESPACE, Matcher, Vocabulary, vocabulary_of
from engine.contract.messages import FinishReason, Plan, SamplingParams, StepOutput, TokenLogprobs
from engine.core.grammars.threads import GrammarThreads
from engine.core.queue.newcomers import AddSequence
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.runtime.host.host_runner import HostRunner
from engine.runtime.load import load_runner
from engine.runtime.setup.runner_config import RunnerConfig
from engine.runtime.step.result_tensors import Computed
from tests.core_laws import check
from tests.effort import some
from tests.engine.models import (
    EOS_ID,
    FAMILIES,
    VOCAB_SIZE,
    make_tiny_model,
    reference_logprobs,
    reference_model,
)

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
    ) -> None:
        self.runner = self._load(path, pages, host_pages)
        self._rung = threading.Event()
        self.scheduler = Scheduler(
            # without drafts in a small pool: answers that repeat themselves would end before any is preempted
            SchedulerConfig(step_tokens_max=STEP_TOKENS_MAX, drafts_max=0 if pages else 15),
            self.runner.info,
            grammars=GrammarThreads(_vocabulary(path), self._rung.set),
        )
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[TokenLogprobs]] = defaultdict(list)
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = defaultdict(list)
        self.cached: dict[int, int] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.preemptions = 0
        self.overlaps = 0
        self.longest_step = 0

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

    def run(
        self,
        prompts: dict[int, list[int]],
        sampling: SamplingParams,
        grammars: Sequence[str] = ("",),
        *,
        overlap: bool = False,
    ) -> None:
        """`grammars` are those of the prompts, in turns."""
        for handle, prompt in prompts.items():
            grammar = grammars[handle % len(grammars)]
            added = AddSequence(handle, f"req_{handle}", prompt, sampling, b"", grammar=grammar)
            self.scheduler.add(added, 0.0)
        self._rung.clear()
        while (plan := self.scheduler.plan(0.0)) is not None or self.scheduler.masks.sequences:
            if plan is None:
                assert self._rung.wait(60.0), "no mask came"
                self._rung.clear()
                continue
            if overlap:
                self._overlapped(plan)
                continue
            self.longest_step = max(self.longest_step, sum(plan.lengths))
            self.scheduler.commit(plan, self.runner.run(plan), 0.0)
            check(self.scheduler)
            self._poison()
            if (output := self.scheduler.report()) is not None:
                self._take(output)

    def _overlapped(self, plan: Plan) -> None:
        """Launch steps as long as one can be planned before the one before it is committed."""
        flying: tuple[Plan, Computed] | None = plan, self.runner.launch(plan)
        while flying is not None:
            following = self.scheduler.plan(0.0)
            then = None if following is None else (following, self.runner.launch(following))
            self.overlaps += then is not None
            self.scheduler.commit(flying[0], flying[1].collect(), 0.0)
            check(self.scheduler)
            flying = then
            if (output := self.scheduler.report()) is not None:
                self._take(output)

    @torch.inference_mode()
    def _poison(self) -> None:
        """What nobody holds is not a number, on either side."""
        allocator, cache, host = self.scheduler._allocator, self.runner.cache, self.runner.host
        for layer in (*cache.keys, *cache.values):
            layer[allocator.pages._free] = torch.nan
        for layer in (*host.keys, *host.values):
            layer[allocator.host_tier.host._free] = torch.nan

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


@cache
def _vocabulary(path: Path) -> Vocabulary:
    return vocabulary_of((path / "tokenizer.json").read_text(), VOCAB_SIZE, [EOS_ID])


@pytest.fixture(scope="module", params=some(sorted(FAMILIES, key="mistral".__ne__), usual=1))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """One with windows; by command each. All are under pressure in `runtime/test_with_scheduler.py`."""
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


@pytest.mark.parametrize("host_pages", [40, 5], ids=["all have room", "some have no room"])
def test_tokens_equal_transformers_when_preempted_into_host_memory(
    model: Model, prompts: Prompts, host_pages: int
) -> None:
    path, oracle = model
    engine = Engine(path, pages=24, host_pages=host_pages)
    engine.run(dict(enumerate(prompts)), greedy())
    stats = engine.scheduler.stats()
    assert min(stats.preemptions, stats.swaps_in) > 0
    for handle, prompt in enumerate(prompts):
        assert_greedy(oracle, prompt, engine.tokens[handle], engine.logprobs[handle])


def test_tokens_equal_transformers_when_prefixes_come_back_from_host_memory(
    model: Model, prompts: Prompts
) -> None:
    path, oracle = model
    engine = Engine(path, pages=24, host_pages=78)
    engine.run(dict(enumerate(prompts)), greedy())
    before = engine.scheduler.stats().prefix_host_tokens
    again = {handle + 100: prompt for handle, prompt in enumerate(prompts)}
    engine.run(again, greedy())
    assert engine.scheduler.stats().prefix_host_tokens > before
    for handle, prompt in again.items():
        assert_greedy(oracle, prompt, engine.tokens[handle], engine.logprobs[handle])


def test_two_of_one_prompt_put_out_the_same(model: Model, prompts: Prompts) -> None:
    path, oracle = model
    engine = Engine(path)
    engine.run({1: prompts[6], 2: prompts[6], 3: prompts[3]}, greedy())
    for handle, prompt in ((1, prompts[6]), (2, prompts[6]), (3, prompts[3])):
        assert_greedy(oracle, prompt, engine.tokens[handle], engine.logprobs[handle])


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


SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["small", "large"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["kind", "count", "tags"],
    "additionalProperties": False,
}
ORDERS = Matcher.grammar_from_json_schema(json.dumps(SCHEMA), overrides={"whitespace_pattern": WHITESPACE})
LETTERS = Matcher.grammar_from_regex("[abc]{3}(-[xyz]{5}){1,4}")


def assert_follows(vocabulary: Vocabulary, handle: int, tokens: list[int]) -> None:
    text = vocabulary.decode_str([token for token in tokens if token != EOS_ID])
    if handle % 3 == 1:
        order = json.loads(text)
        assert list(order) == ["kind", "count", "tags"]
        assert order["kind"] in ("small", "large")
        assert 0 <= order["count"] <= 99
        assert all(len(tag) <= 3 for tag in order["tags"])
    elif handle % 3 == 2:
        assert re.fullmatch("[abc]{3}(-[xyz]{5}){1,4}", text)


def test_answers_follow_their_grammars_and_depend_on_no_company(
    tmp_path_factory: pytest.TempPathFactory, prompts: Prompts
) -> None:
    """Beside others without a grammar, in chunks, preempted, swapped, hit in the cache, and overlapped. Masks
    come when they come: which step a row sits out is chance, and changes no token."""
    path = make_tiny_model("llama", tmp_path_factory.mktemp("model"))
    grammars = ("", ORDERS, LETTERS)
    sampling = SamplingParams(seed=5, max_tokens=120, temperature=0.9, top_p=0.95, stop_token_ids=(EOS_ID,))
    asked = dict(enumerate(prompts[:9]))
    alone = Engine(path)
    for handle, prompt in asked.items():
        alone.run({handle: prompt}, sampling, grammars)
    company = Engine(path, pages=30)
    company.run(asked, sampling, grammars)
    assert company.preemptions > 0
    swapped = Engine(path, pages=30, host_pages=60)
    swapped.run(asked, sampling, grammars)
    assert swapped.scheduler.stats().swaps_in > 0
    ahead = Engine(path)
    ahead.run(asked, sampling, grammars, overlap=True)
    assert ahead.overlaps > 0
    assert alone.tokens == company.tokens == swapped.tokens == ahead.tokens
    ended = [handle for handle in asked if handle % 3 and alone.reasons[handle] is FinishReason.STOP]
    assert len(ended) >= 3, "it would prove nothing"
    for handle in ended:
        assert_follows(_vocabulary(path), handle, alone.tokens[handle])
    assert set(alone.reasons.values()) <= {FinishReason.STOP, FinishReason.LENGTH}
