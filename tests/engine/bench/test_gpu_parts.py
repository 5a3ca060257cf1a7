"""The measurements of `python -m tests.bench gpu` at toy size, in Triton's interpreter on a CPU.

The figures mean nothing, but all of the code runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend
from triton import OutOfResources

from engine.runtime.attention.triton_paged import LibraryPrefill
from engine.runtime.kernels.autotune import Timer
from engine.runtime.models.spec import DeltaNet
from tests.bench.engine.gpu import attention, measuring, profile, results, steps
from tests.bench.engine.gpu.shapes import QWEN3_06B, RandomWeights, decode_floor_s
from tests.bench.engine.gpu.supervise import LOST
from tests.engine.decoders import like
from tests.engine.runtime.kernels.interpreter import prepare_interpreter

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:triton.runtime.interpreter")
TOY = like(
    QWEN3_06B,
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    heads=4,
    kv_heads=2,
    head_dim=16,
    windows=(None,),
)
FLOORS = (4e12, 7e14)
prepare_interpreter()


@dataclass
class Once:
    """A graph whose replay calls the step again."""

    run: Callable[[], Any]
    output: Any

    def replay(self) -> None:
        self.output = self.run()


@dataclass
class FakeGraphs:
    timer: Timer | None = None

    def warm_up(self, run: Callable[[], object]) -> None:
        run()

    def capture(self, run: Callable[[], Any]) -> Once:
        return Once(run, run())


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def once(run: Callable[[], object], repetitions: int = 1) -> float:
        run()
        return 1.0

    monkeypatch.setenv(results.RESULTS_VARIABLE, str(tmp_path / "gpu.jsonl"))
    results.write("floors", "card", read_bytes_per_s=FLOORS[0], bf16_flops=FLOORS[1])
    card = SimpleNamespace(major=9, minor=0, multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    for module in (steps, attention):
        monkeypatch.setattr(module, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(steps, "span_ms", once)
    monkeypatch.setattr(attention, "graph_ms", once)
    monkeypatch.setattr(steps, "CudaGraphDevice", FakeGraphs)
    monkeypatch.setattr(steps, "shortest_replay_us", once)
    monkeypatch.setattr(steps, "compiling_in", lambda workers, card: nullcontext())
    monkeypatch.setattr(steps, "DeviceTimer", lambda: lambda run: 1.0)
    # The interpreter computes bfloat16 wrongly.
    monkeypatch.setattr(torch, "bfloat16", torch.float32)
    monkeypatch.setattr(steps, "RandomWeights", lambda device: RandomWeights(device, torch.float32))


def test_a_row_that_fails_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any error ends its row alone, except an error of the device, after which no result can be trusted."""

    def fail(error: Exception) -> dict[str, Any]:
        raise error

    for error in (
        AssertionError("wrong"),
        OutOfResources(2, 1, "shared memory"),
        TypeError("no such option"),
    ):
        assert not measuring.check("kernels", str(error), partial(fail, error))
    left: list[int] = []
    monkeypatch.setattr(measuring, "_leave", left.append)
    assert not measuring.check("kernels", "lost", partial(fail, torch.AcceleratorError("illegal access")))
    assert left == [LOST]
    assert measuring.check("kernels", "nothing", partial(fail, KeyError("no library")), absent=KeyError)
    assert measuring.check("kernels", "fine", lambda: {"us": 1.0})
    rows = [line for line in results.read() if line["part"] == "kernels"]
    assert [line.get("ok") for line in rows] == [False, False, False, False, None, True]
    assert rows[2]["error"] == "TypeError: no such option"
    assert rows[2]["at"][0].endswith("raise error"), "the innermost place in our own files"
    assert rows[4]["absent"] == "'no library'"


HYBRID = replace(
    TOY,
    layers=(
        replace(TOY.layers[0], attention=DeltaNet(1, 2, 16, 16, 4)),
        replace(TOY.layers[0], attention=replace(TOY.attention, output_gate=True)),
    ),
)


@pytest.mark.nightly
def test_steps_of_a_model_with_states() -> None:
    bench = steps.Bench("hybrid", HYBRID)
    found = bench.decode(2, 65, torch.float32)
    expected = decode_floor_s(HYBRID, 2, 65, FLOORS, 2.0, 4)
    assert found["floor_ms"] == pytest.approx(expected * 1e3)
    assert bench.prefill(70, LibraryPrefill)["tokens"] == 70


def test_delta_nets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LAYERS_MIN", 1), ("TURN_BYTES", 1), ("QWEN3_5_08B", HYBRID)):
        monkeypatch.setattr(attention, name, value)
    assert attention.delta_net(2)["us"] == pytest.approx(1e3)
    assert attention.delta_net(1, 40)["tokens"] == 40


@pytest.mark.nightly
@pytest.mark.parametrize("fp8", [False, True])
def test_steps(fp8: bool) -> None:
    bench = steps.Bench("toy", TOY, fp8=fp8)
    kv_dtype = torch.float8_e4m3fn if fp8 else torch.float32
    found = bench.decode(2, 65, kv_dtype)
    expected = decode_floor_s(TOY, 2, 65, FLOORS, 1.0 if fp8 else 2.0, kv_dtype.itemsize)
    assert found["floor_ms"] == pytest.approx(expected * 1e3)
    assert found["share"] == pytest.approx(expected * 1e3)
    assert found["overlap"] == ["not faster"]
    if not fp8:
        assert bench.decode_dependently(2, 65)["plain_ms"] == 1.0
        assert bench.prefill(70, LibraryPrefill)["tokens"] == 70


def test_flat_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "graph_ms", lambda run: run() and 1.0)
    assert steps.sampling_of_flat_rows(2, 320) == {"rows": 2, "vocab": 320, "ms": 1.0}


def test_attention_by_a_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HEADS", 4), ("KV_HEADS", 2), ("DIM", 16), ("LAYERS_MIN", 2), ("TURN_BYTES", 1)):
        monkeypatch.setattr(attention, name, value)
    for name in ("triton", "torch"):
        found = attention.decode(2, 70, torch.float32, name)
        assert found["back_end"] == name
        assert found["us"] == pytest.approx(1e3 / 2)
        assert found["share"] == pytest.approx(2 * 2 * 70 * 2 * 16 * 4 / 4e12 / 500e-6)


def test_attention_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HEADS", 4), ("KV_HEADS", 2), ("DIM", 16)):
        monkeypatch.setattr(attention, name, value)
    libraries = {"in torch": SDPBackend.MATH}
    monkeypatch.setattr(attention, "LIBRARIES", libraries)
    for name in (*libraries, "triton"):
        assert attention.prefill(70, name)["share"] == pytest.approx(2 * 70 * 70 * 4 * 16 / 7e14 / 1e-3)


def test_a_profile_is_told_by_layers() -> None:
    """From one layer's attention to the next one's; a step's begin and end are in no layer."""
    now, ran = 0.0, list[profile.Ran]()
    layer = [("decode_kernel", 9.0), ("output", 3.0), ("qkv", 5.0)]
    for _ in range(3):
        for name, took in [("begin", 1.0), *layer * 4, ("sample", 2.0)]:
            ran.append(profile.Ran(name, now, now + took))
            now += took + 0.5
    found = profile.summary(ran, replays=3)
    assert found["layer"] == [
        "decode_kernel: 9.00 after 0.50",
        "output: 3.00 after 0.50",
        "qkv: 5.00 after 0.50",
    ]
    assert found["layer_us"] == 18.5
    assert found["busy_us"] == 71.0
    assert found["step_us"] == pytest.approx(77.8, abs=0.1)
