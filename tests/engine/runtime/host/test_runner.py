"""The runner's bookkeeping: plans that follow, plans that do not, and what loading tells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.contract.messages import NUMERIC_FAILURE, Plan, SamplingParams, SlotAssignment, Want
from engine.contract.packing import Biases
from engine.runtime.host.host_runner import HostRunner
from engine.runtime.load import choose_device, load_runner
from engine.runtime.setup.model_errors import BadRunnerConfig, ModelUnavailable
from engine.runtime.setup.runner_config import RunnerConfig
from tests.engine.models import CONTEXT_LEN, VOCAB_SIZE
from tests.engine.runtime.conftest import MakeModel, load
from tests.engine.runtime.driver import Driver

GREEDY = SamplingParams(seed=0, max_tokens=8, temperature=0.0)


@pytest.fixture
def runner(tiny_model: MakeModel) -> HostRunner:
    return load(tiny_model("qwen2"))


@pytest.fixture
def twin(tiny_model: MakeModel) -> HostRunner:
    """The same weights over a cache of its own."""
    return load(tiny_model("qwen2"))


def test_loading_tells_what_it_does_and_what_it_offers(tiny_model: MakeModel) -> None:
    stages: list[str] = []
    config = RunnerConfig(
        str(tiny_model("qwen2")), "cpu", dtype="bfloat16", max_model_len=100, max_num_seqs=3, threads=1
    )
    info = load_runner(config, stages.append).info
    words = [stage.split()[0] for stage in stages]
    assert words == ["device", "loading", "computing", "allocating", "warming"]
    assert stages[1] == "loading Qwen2ForCausalLM in bfloat16"
    assert (info.dtype, info.max_model_len, info.slots, info.page_size) == ("bfloat16", 100, 3, 64)
    assert (info.vocab_size, info.pages) == (VOCAB_SIZE, 3 * 2 * 5 // 4)
    assert info.load_s > 0
    assert info.warmup_s > 0
    assert (info.page_bytes, info.host_pages) == (2 * 2 * 1 * 64 * 16 * 2, 3 * 2)
    assert 0 < info.page_copy_s < 1
    assert [len(step.positions) for step in info.timed_steps] == [1, 1, 1, 1, 1, 3]
    assert [step.lengths[0] for step in info.timed_steps] == [64, 16, 16, 1, 1, 1]
    assert [step.positions[0] for step in info.timed_steps[:3]] == [0, 64, 80]
    assert all(step.seconds > 0 for step in info.timed_steps)


@pytest.mark.parametrize(
    ("settings", "has_gpu", "device"),
    [
        ({}, False, "cpu"),
        ({}, True, "cuda"),
        ({"device": "cpu"}, True, "cpu"),
        ({"weights": "int8"}, True, "cpu"),
        ({"kernels": "torch"}, True, "cpu"),
        ({"weights": "fp8"}, True, "cuda"),
        ({"enforce_eager": True}, False, "cpu"),
    ],
)
def test_auto_is_a_gpu_unless_a_setting_is_for_cpus(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], has_gpu: bool, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert choose_device(RunnerConfig("m", **settings)).type == device


@pytest.mark.parametrize(
    ("settings", "has_gpu", "says"),
    [
        ({"device": "cuda"}, False, "finds no GPU"),
        ({"device": "cuda", "kernels": "native"}, True, "kernels=native: only for CPUs"),
        ({"device": "cuda", "weights": "int8"}, True, "weights=int8: only for CPUs"),
        ({"weights": "fp8"}, False, "weights=fp8: only for GPUs"),
        ({"device": "cpu", "kv_cache_dtype": "fp8"}, True, "kv_cache_dtype=fp8: only for GPUs"),
        ({"device": "cpu", "attention_backend": "triton"}, True, "attention_backend=triton: only for GPUs"),
    ],
)
def test_settings_for_the_other_device_are_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], has_gpu: bool, says: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with pytest.raises(BadRunnerConfig, match=says):
        choose_device(RunnerConfig("m", **settings))


@pytest.mark.slow
def test_loading_imports_no_compiler(tiny_model: MakeModel) -> None:
    """Some operations on tensors without data do, and a third of the engine's memory is gone."""
    program = (
        "import sys; from engine.runtime.setup.runner_config import RunnerConfig; "
        "from engine.runtime.load import load_runner; "
        f"path = {str(tiny_model('qwen3'))!r}; "
        "[load_runner(RunnerConfig(path, kernels=name, threads=1), print) for name in ('native', 'torch')]; "
        "assert not {'torch._dynamo', 'sympy', 'triton'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


@pytest.mark.parametrize(("native", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_what_the_processor_multiplies(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch, native: bool, dtype: str
) -> None:
    monkeypatch.setattr("engine.runtime.start.starting.multiplies_bf16", lambda: native)
    assert load(tiny_model("qwen2"), dtype="auto").info.dtype == dtype


def test_the_context_is_the_models_and_cannot_be_stretched(tiny_model: MakeModel, runner: HostRunner) -> None:
    assert runner.info.max_model_len == CONTEXT_LEN
    with pytest.raises(BadRunnerConfig, match=f"{CONTEXT_LEN} positions"):
        load(tiny_model("qwen2"), max_model_len=CONTEXT_LEN + 1)


@pytest.mark.parametrize(("context", "pages"), [(1, 2), (3, 2), (512, 2)])
def test_warm_up_fits_into_the_smallest_pool(tiny_model: MakeModel, context: int, pages: int) -> None:
    page_bytes = 2 * 2 * 1 * 16 * 16 * 4
    load(tiny_model("qwen2"), max_model_len=context, max_num_seqs=2, kv_cache_memory=pages * page_bytes)


def test_warm_up_leaves_nothing_behind(runner: HostRunner, twin: HostRunner) -> None:
    """Every slot can be seated, and nothing that warm-up left in a page is seen."""
    driver = Driver(runner, poison=False)
    clean = Driver(twin, poison=True)
    for slot in range(runner.info.slots):
        first, second = (d.seat(slot, [slot + 1, 5, 9], GREEDY) for d in (driver, clean))
        driver.finish([slot], 5)
        clean.finish([slot], 5)
        assert first.output == second.output


def test_a_plan_without_rows_still_moves_people(runner: HostRunner) -> None:
    seat = Plan(0, [], [SlotAssignment.of(2, [1, 2], 2, GREEDY)], [], [], [], [], [])
    assert runner.run(seat).tokens == []
    assert runner.run(Plan(1, [2], seat.seated, [(2, [0])], [2], [0], [2], [Want.SAMPLE])).tokens[0] >= 0


def test_the_head_is_for_last_tokens_alone(runner: HostRunner) -> None:
    """Of a prompt's other tokens nobody wants the followers."""
    model, rows = runner.model, []

    class Watched:
        forward = staticmethod(model.forward)

        def logits(self, hidden: Tensor) -> Tensor:
            rows.append(len(hidden))
            return model.logits(hidden)

    runner.model = Watched()
    seated = [SlotAssignment.of(0, list(range(20)), 20, GREEDY), SlotAssignment.of(1, [1, 2, 3], 3, GREEDY)]
    runner.run(
        Plan(0, [], seated, [(0, [4, 5]), (1, [2])], [0, 1], [0, 0], [12, 3], [Want.NOTHING, Want.SAMPLE])
    )
    runner.run(Plan(1, [], [], [], [0], [12], [4], [Want.NOTHING]))
    runner.run(Plan(2, [], [], [], [1, 0], [3, 16], [1, 4], [Want.SAMPLE, Want.SAMPLE]))
    assert rows == [1, 2]


@pytest.mark.parametrize(
    ("plan", "law"),
    [
        (Plan(1, [], [SlotAssignment.of(0, [1], 1, GREEDY)], [], [], [], [], []), "taken"),
        (Plan(1, [1], [], [], [], [], [], []), "left twice"),
        (Plan(1, [], [], [], [1], [0], [1], [Want.SAMPLE]), "empty"),
        (Plan(1, [], [], [(1, [3])], [], [], [], []), "empty"),
        (Plan(1, [], [], [(0, list(range(33)))], [], [], [], []), "outgrows"),
        (Plan(1, [], [], [], [0], [0], [18], [Want.NOTHING]), "pages"),
        (Plan(1, [], [], [], [0], [0], [21], [Want.NOTHING]), "knows 20 tokens"),
        (Plan(1, [], [], [], [0], [0], [4], [Want.SAMPLE]), "before its end"),
        (Plan(1, [], [], [], [0], [4], [0], [Want.NOTHING]), "knows"),
    ],
)
def test_a_plan_that_does_not_follow_is_a_bug_and_says_so(runner: HostRunner, plan: Plan, law: str) -> None:
    runner.run(Plan(0, [], [SlotAssignment.of(0, list(range(20)), 20, GREEDY)], [(0, [4])], [], [], [], []))
    with pytest.raises(AssertionError, match=law):
        runner.run(plan)


def test_pages_change_places_within_one_step(runner: HostRunner, twin: HostRunner) -> None:
    """One goes out, another comes back into the pages that it left, and a third is computed into the rest:
    each goes on as if nothing had happened, in mid-prompt, too."""
    driver, quiet = Driver(runner), Driver(twin, poison=False)
    prompts = [[7 * slot + i for i in range(70)] for slot in range(3)]
    undisturbed = [quiet.seat(slot, prompt, GREEDY) for slot, prompt in enumerate(prompts)]
    quiet.finish(range(3), 20)

    first, second = driver.seat(0, prompts[0], GREEDY), driver.seat(1, prompts[1], GREEDY)
    driver.step([(0, 70), (1, 37)])
    assert driver.swap_out(1) is second
    driver.finish([0], 9)
    driver.swap_out(0)
    driver.swap_in(5, second)
    third = driver.seat(2, prompts[2], GREEDY)
    driver.step([(2, 40), (5, 33)])
    driver.swap_in(0, first)
    driver.finish([0, 2, 5], 20)
    assert [life.output for life in (first, second, third)] == [life.output for life in undisturbed]


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("length", [1, 15, 16, 20, 69])
def test_a_fork_goes_on_as_what_it_was_copied_from(tiny_model: MakeModel, kernels: str, length: int) -> None:
    """By itself to the bit, with all that lies behind the copied tokens changed since."""
    driver = Driver(load(tiny_model("qwen3"), kernels=kernels))
    prompt = [7 + i for i in range(70)]
    drawn = SamplingParams(seed=5, max_tokens=8, temperature=0.8, logprobs=2)
    alone = driver.seat(0, prompt, drawn)
    driver.step([(0, 70)])
    first = driver.seat(1, prompt, GREEDY)
    driver.step([(1, 70)])
    driver.finish([1], 3)
    second = driver.fork(2, first, length, drawn)
    driver.step([(2, 70 - length)])
    driver.finish([0], 6)
    driver.finish([2], 6)
    assert second.output == alone.output
    if kernels == "native":
        assert second.logprobs == alone.logprobs


def test_logprobs_only_for_those_who_ask(runner: HostRunner) -> None:
    driver = Driver(runner)
    asking = SamplingParams(seed=0, max_tokens=2, temperature=0.0, logprobs=2)
    bare = SamplingParams(seed=0, max_tokens=2, temperature=0.0, logprobs=0)
    driver.seat(0, [1, 2, 3], GREEDY)
    assert driver.step([(0, 3)]).logprobs == []
    driver.seat(1, [1, 2, 3], asking)
    driver.seat(2, [1, 2, 3], bare)
    result = driver.step([(0, 1), (1, 3), (2, 3)])
    none, two, zero = result.logprobs
    assert none is None
    assert two is not None
    assert zero is not None
    assert two.top_ids[0] == result.tokens[1]
    assert two.top_logprobs[0] == two.logprob == zero.logprob
    assert (len(two.top_ids), zero.top_ids) == (2, [])


def test_logprobs_are_of_the_raw_distribution(runner: HostRunner) -> None:
    driver = Driver(runner)
    raw = SamplingParams(seed=0, max_tokens=1, logprobs=VOCAB_SIZE, temperature=0.0)
    edited = SamplingParams(
        seed=0,
        max_tokens=1,
        logprobs=VOCAB_SIZE,
        temperature=0.3,
        top_k=2,
        logit_bias=Biases.of(((7, 50.0),)),
    )
    lives = driver.seat(0, [1, 2, 3], raw), driver.seat(1, [1, 2, 3], edited)
    driver.finish([0, 1], 1)
    assert lives[1].output == [7]
    assert lives[0].logprobs[0].top_logprobs == pytest.approx(lives[1].logprobs[0].top_logprobs, abs=1e-5)


def test_numeric_failure_ends_its_row_alone(runner: HostRunner) -> None:
    """One cache is spoiled: that row says so, its neighbour and its heir in the slot do not notice."""
    driver = Driver(runner, poison=False)
    sick, sound = driver.seat(0, [4, 5, 6], GREEDY), driver.seat(1, [4, 5, 6], GREEDY)
    driver.finish([0, 1], 3)
    with torch.inference_mode():
        runner.cache.keys[0][sick.pages[0]] = torch.nan
    result = driver.step([(0, 1), (1, 1)])
    assert result.tokens[0] == NUMERIC_FAILURE
    assert result.tokens[1] >= 0
    driver.leave(0)
    heir = driver.seat(0, [4, 5, 6], GREEDY)
    driver.finish([0, 1], 8)
    assert heir.output == sound.output


def test_penalties_follow_the_output_through_preemption(runner: HostRunner) -> None:
    """What counts as output is told by prompt_len, not by when it was computed."""
    params = SamplingParams(seed=5, max_tokens=30, frequency_penalty=1.5, temperature=0.0)
    driver = Driver(runner)
    straight, broken = driver.seat(0, [3, 4, 5], params), driver.seat(1, [3, 4, 5], params)
    driver.finish([0], 30)
    driver.finish([1], 12)
    driver.leave(1)
    again = driver.seat(1, broken.tokens, params, prompt_len=3)
    driver.finish([1], 30)
    assert again.output == straight.output
    plain = driver.seat(2, [3, 4, 5], GREEDY)
    driver.finish([2], 30)
    assert plain.output != straight.output


def test_random_tokens_are_the_same_alone_and_in_company(runner: HostRunner) -> None:
    def params(seed: int) -> SamplingParams:
        return SamplingParams(seed=seed, max_tokens=20, temperature=0.8, top_p=0.9)

    driver = Driver(runner)
    alone = driver.seat(0, [9, 8, 7], params(77))
    driver.finish([0], 20)
    lives = [driver.seat(slot, [9, 8, 7], params(70 + slot)) for slot in range(1, 8)]
    driver.finish(range(1, 8), 20, chunk=2)
    assert lives[6].output == alone.output
    assert len({tuple(life.output) for life in lives}) == 7


def test_a_sequence_may_fill_the_context_to_its_last_token(tiny_model: MakeModel) -> None:
    driver = Driver(load(tiny_model("qwen2"), max_model_len=21))
    life = driver.seat(0, [1] * 20, GREEDY)
    driver.finish([0], 1)
    assert len(life.tokens) == 21


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"config\.json"):
        load(tmp_path / "nothing")
