"""Two ranks, in processes of their own, say what one says: with the whole scheduler over them.

Chunked prompts, prefixes found in the cache, preemption and swapping, both loops; greedy, drawn, penalised,
stopped. The other rank's clocks are wrong throughout, and run backwards.
"""

from __future__ import annotations

import os
import random
import signal
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.contract.messages import (
    CoreStats,
    FinishReason,
    Plan,
    Runner,
    SamplingParams,
    SlotAssignment,
    Want,
)
from engine.contract.packing import Biases, packed
from engine.core.queue.newcomers import AddSequence
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.core.sequence import Sequence
from engine.runtime.collective.shard import Shard
from engine.runtime.models.decoder_config import read_model_config
from engine.runtime.parallel.leader import LeadingRunner, lead
from engine.runtime.parallel.wire import Landed, RankDone
from engine.runtime.setup.model_errors import BadRunnerConfig, RankLost
from engine.runtime.setup.runner_config import RunnerConfig
from engine.runtime.step.kv_cache import KVGeometry
from engine.runtime.step.states import StateGeometry
from shared.process.setting_values import ConfigError
from tests import effort
from tests.bench.engine.core_window import draft_by
from tests.effort import some
from tests.engine.core.harness import COPIES_ARE_CHEAP, knowing
from tests.engine.models import VOCAB_SIZE
from tests.engine.runtime.config_oracle import Weights
from tests.engine.runtime.conftest import MakeModel, load
from tests.engine.runtime.test_mtp import Silent, mtp_tensors
from tests.engine.runtime.test_with_scheduler import all_said, serve, serve_overlapped
from tests.fake_drafts import FakeDrafts
from tests.services import ROOT

pytestmark = pytest.mark.slow

PAGES = 8
PAGE_SIZE = 16
TOLERANCE = 1e-4
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},  # tied
    "mistral": {
        "num_key_value_heads": 1,
        "own_head": True,
    },  # one for both ranks; windows
    "qwen2": {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 128, "vocab_size": 321},
    "qwen3": {},  # QK norm
}
BY_NATIVE_KERNELS = ("qwen2", "llama")
LAYERS = ["linear_attention", "full_attention"] * 2
WITH_HOST_TIER = "qwen2"
"""The one whose evicted pages go to host memory, a part of each to each rank's, and come back from there."""
COMPANY: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 20, "presence_penalty": 0.7, "frequency_penalty": 0.5},
    {"temperature": 4.0, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 4)), "min_tokens": 3},
    {"temperature": 0.7, "logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 1.0, "min_p": 0.1, "logit_bias": Biases.of(((3, 2.0),)), "logprobs": 0},
)
VECTOR_LEN = 32
UNSAMPLED: tuple[dict[str, Any], ...] = (
    {"max_tokens": 0, "vector_len": VECTOR_LEN},
    {"max_tokens": 0, "scored": packed([5, 7, 300])},
)
"""The parameters of prompts whose vector is asked for, and of those behind which tokens are scored."""
WRONG_CLOCKS = """
import sys, time
if "engine.runtime.parallel.rank" in sys.orig_argv:
    def backwards(real):
        return lambda: 1e9 - 1000 * real()
    for name in ("monotonic", "perf_counter", "time"):
        setattr(time, name, backwards(getattr(time, name)))
"""


@pytest.fixture
def wrong_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(WRONG_CLOCKS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")


@contextmanager
def two_ranks(path: Path, reasons: list[str] | None = None, **settings: Any) -> Iterator[LeadingRunner]:
    heard: list[str] = [] if reasons is None else reasons
    config = RunnerConfig(str(path), tensor_parallel_size=2, **small(path, 2) | settings)
    runner = lead(config, lambda stage: None, heard.append)
    try:
        yield runner
    finally:
        runner.close()


def small(path: Path, size: int) -> dict[str, Any]:
    """Settings of a pool that is too small for all who come, with as many pages whatever the ranks."""
    own = Shard(0, size).of(read_model_config(path))
    layers = len(own.attentions)
    page_bytes = KVGeometry(layers, own.kv_heads, PAGE_SIZE, own.head_dim, torch.float32).page_bytes
    slots, state_bytes = 5, StateGeometry.of(own, torch.float32).slot_bytes
    return {
        "dtype": "float32",
        "page_size": PAGE_SIZE,
        "max_num_seqs": slots,
        "max_step_tokens": 24,
        "threads": 1,
        "embeddings": "mean",
        "kv_cache_memory": 2 * slots * state_bytes + PAGES * page_bytes,
    }


def requests(first_handle: int) -> list[AddSequence]:
    rng = random.Random(11)
    added = []
    for number in range(12):
        prompt = rng.choices(range(VOCAB_SIZE), k=rng.choice([1, 7, 16, 33, 90]))
        sampling = SamplingParams(**{"seed": number, "max_tokens": 18} | COMPANY[number % len(COMPANY)])
        added.append(AddSequence(first_handle + number, f"req-{number}", prompt, sampling))
    return added


def unsampled(first_handle: int) -> list[AddSequence]:
    rng, added = random.Random(12), []
    for number, length in enumerate((1, 16, 33, 70, 7, 60)):
        prompt = rng.choices(range(VOCAB_SIZE), k=length)
        sampling = SamplingParams(seed=number, **UNSAMPLED[number % len(UNSAMPLED)])
        added.append(AddSequence(first_handle + number, f"unsampled-{number}", prompt, sampling))
    return added


def company(first_handle: int) -> list[AddSequence]:
    """Those that are answered, with vectors and scores between them."""
    answered, others = requests(first_handle), unsampled(first_handle + 50)
    return [*answered[:4], *others, *answered[4:]]


def said(runner: Runner) -> tuple[dict[int, list[int]], dict[int, list[float]], CoreStats]:
    """Everybody twice, plain and overlapped; then one twice alone, so that it finds its own pages. The
    numbers of vectors, and the scores, are told as log-probabilities are."""
    config = SchedulerConfig(step_tokens_max=24, queue_len_max=64)
    scheduler = knowing(Scheduler(config, runner.info), COPIES_ARE_CHEAP)
    steps = serve(scheduler, runner, company(0)) + serve_overlapped(scheduler, runner, company(100))
    for first_handle in (200, 300):
        longest = max(requests(first_handle), key=lambda request: len(request.prompt_ids))
        steps += serve(scheduler, runner, [longest])
    tokens, numbers = all_said(steps)
    for step in steps:
        numbers |= {handle: [*scores] for handle, scores in step.scores}
        numbers |= {handle: [*struct.unpack(f"<{VECTOR_LEN}f", vector)] for handle, vector in step.vectors}
    assert len(numbers.keys() & {one.handle for at in (0, 100) for one in unsampled(at + 50)}) == 12
    return tokens, numbers, steps[-1].stats


@pytest.mark.usefixtures("wrong_clocks")
@pytest.mark.parametrize("family", some(["qwen2", "mistral", "llama", "qwen3"], usual=1))
def test_two_ranks_say_what_one_says(tiny_model: MakeModel, family: str) -> None:
    path = tiny_model(family, **MODELS[family])
    kernels = "native" if family in BY_NATIVE_KERNELS else "torch"
    tokens, logprobs, _ = said(load(path, kernels=kernels, **small(path, 1)))
    has_tier = family == WITH_HOST_TIER
    with two_ranks(path, swap_memory=has_tier << 20, kernels=kernels) as runner:
        found_tokens, found_logprobs, stats = said(runner)
    assert found_tokens == tokens
    assert {ended[-1] for ended in tokens.values()} == {FinishReason.LENGTH, FinishReason.STOP}
    assert found_logprobs.keys() == logprobs.keys()
    for handle, values in logprobs.items():
        assert found_logprobs[handle] == pytest.approx(values, abs=TOLERANCE)
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    assert (stats.prefix_host_tokens > 0) == has_tier
    assert stats.pages_owned == 0


@pytest.mark.parametrize("kernels", effort.some(["native", "torch"], usual=1))
def test_two_ranks_with_states_say_what_one_says(tmp_path: Path, kernels: str) -> None:
    """Delta nets by their heads; snapshots are found, and states lost, on both ranks alike."""
    weights = Weights("qwen3_5_text", intermediate=96, layers=4, heads=4, kv_heads=2, vocab=VOCAB_SIZE)
    path = weights.saved(tmp_path, max_position_embeddings=128, layer_types=LAYERS)
    alone = load(path, kernels=kernels, **small(path, 1))
    tokens, logprobs, expected = said(alone)
    with two_ranks(path, kernels=kernels) as runner:
        assert runner.info.state_bytes == alone.info.state_bytes
        found_tokens, found_logprobs, stats = said(runner)
    assert found_tokens == tokens
    for handle, values in logprobs.items():
        assert found_logprobs[handle] == pytest.approx(values, abs=TOLERANCE)
    assert stats.preemptions == expected.preemptions > 0
    assert stats.prefix_hit_tokens == expected.prefix_hit_tokens > 0
    assert stats.pages_owned == 0


def with_mtp(path: Path) -> Path:
    """A model with states and an MTP layer."""
    weights = Weights("qwen3_5_text", intermediate=96, layers=4, heads=4, kv_heads=2, vocab=VOCAB_SIZE)
    weights.saved(path, max_position_embeddings=128, layer_types=LAYERS, mtp_num_hidden_layers=1)
    file = path / "model.safetensors"
    save_file(load_file(file) | mtp_tensors(inner=96), file, {"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("has_states", "kernels"), some([(True, "native"), (True, "torch"), (False, "native")], usual=1)
)
def test_drafts_change_no_bit_on_ranks(
    tmp_path: Path, tiny_model: MakeModel, has_states: bool, kernels: str
) -> None:
    """All ranks verify what rank 0's scheduler says, right or wrong, and guess what it asks for."""
    path = with_mtp(tmp_path) if has_states else tiny_model("llama", **MODELS["llama"])
    answers: dict[int, list[int]] = {}

    def drafter_of(sequence: Sequence) -> FakeDrafts:
        answer = answers.get(sequence.handle % 100, [])
        whole = [*sequence.tokens[: sequence.prompt_len], *answer]
        stops, rng = sequence.sampling.stop_token_ids, random.Random(sequence.handle)
        return FakeDrafts(whole, stops, VOCAB_SIZE, 0.7, rng)

    memory: dict[str, Any] = {"kv_cache_memory": 270_000} if has_states else {}
    with two_ranks(path, kernels=kernels, **memory) as runner:
        info = msgspec.structs.replace(runner.info, guess_share=0.01)
        assert info.drafts_max > 3
        assert (info.guesses_max > 0) == has_states
        scheduler = knowing(Scheduler(SchedulerConfig(24, 64), info), COPIES_ARE_CHEAP)
        draft_by(scheduler, lambda _: Silent())
        plain = serve(scheduler, runner, requests(0))
        tokens, logprobs = all_said(plain)
        answers |= {handle: own[:-1] for handle, own in tokens.items()}
        draft_by(scheduler, drafter_of)
        drafted = serve(scheduler, runner, requests(100))
    found_tokens, found_logprobs = all_said(drafted)
    assert [own for _, own in sorted(found_tokens.items())] == [own for _, own in sorted(tokens.items())]
    assert [own for _, own in sorted(found_logprobs.items())] == [own for _, own in sorted(logprobs.items())]
    assert sum(end.accepted for step in drafted for end in step.finished) > 20
    assert has_states or drafted[-1].stats.preemptions > 0


def plan(step: int) -> Plan:
    start = SlotAssignment.of(0, [5, 6, 7], 3, SamplingParams(seed=1, max_tokens=9, temperature=0.0))
    return Plan(step, [], [start], [(0, [0])], [0], [0], [3], [Want.SAMPLE])


def test_a_rank_that_finds_other_tokens_ends_it_all(tiny_model: MakeModel) -> None:
    reasons: list[str] = []
    with two_ranks(tiny_model("qwen3"), reasons) as runner:
        runner.launch(plan(17))
        runner.ranks.send(Landed(17, 0))
        with pytest.raises(RankLost, match="rank 1: its tokens of step 17 are not those of rank 0"):
            runner.ranks.answers(RankDone)
    assert reasons == ["rank 1: its tokens of step 17 are not those of rank 0"]


@pytest.mark.nightly
def test_a_step_without_the_other_rank(tiny_model: MakeModel) -> None:
    """The main thread's collective ends, by an error that names who is missing."""
    with two_ranks(tiny_model("qwen3")) as runner:
        [other] = runner.ranks._ranks
        assert other.process is not None
        os.kill(other.process.pid, signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 1 was ended by SIGKILL"):
            runner.run(plan(1))


@pytest.mark.parametrize("settings", some([{"weights": "int8"}, {"kernels": "native"}], usual=1))
def test_what_the_native_kernels_do_not_split_is_refused_where_they_are_asked_for(
    tiny_model: MakeModel, settings: dict[str, Any]
) -> None:
    path = tiny_model("qwen3", intermediate_size=144)
    with pytest.raises((BadRunnerConfig, RankLost), match="intermediate_size 72 cannot be divided by 16"):
        lead(RunnerConfig(str(path), tensor_parallel_size=2, **settings), lambda stage: None, lambda _: None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel_size": 3}, "--tensor-parallel-size 3 does not divide num_attention_heads"),
    ],
)
def test_what_cannot_be_split_is_refused(tiny_model: MakeModel, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRunnerConfig, match=words):
        lead(RunnerConfig(str(tiny_model("qwen3")), **settings), lambda stage: None, lambda reason: None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: must be"),
        ({"rank_timeout_s": 0.0}, "rank_timeout_s: must be"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RunnerConfig("model", **settings)
