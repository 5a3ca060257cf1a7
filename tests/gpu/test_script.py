"""What of the GPU's script can be known without a GPU: it parses, imports, and does its arithmetic right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.runtime.device.device_runner import DeviceRunner
from tests.bench.engine.gpu import LIMITS_S
from tests.bench.engine.gpu.shapes import LLAMA_8B, QWEN3_06B, decode_floor_s, kv_bytes, prefill_floor_s
from tests.engine.decoders import like
from tests.engine.models import make_tiny_model
from tests.engine.runtime.device.card import FakeGraphs, load_fake
from tests.engine.runtime.device.test_runner import SMALL
from tests.gpu import engine, tokens, whole
from tests.gpu.models import other_model
from tests.gpu.weights import write_model

interpreted = pytest.mark.filterwarnings("ignore::DeprecationWarning:triton.runtime.interpreter")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
H200 = (4.3e12, 788e12)
"""Bandwidth and matrix rate for which the expected figures were worked out by hand."""


@pytest.mark.nightly
@interpreted
def test_tokens_of_a_model_with_states_at_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks beside decodes, and the same steps again from the same states."""
    path = other_model("qwen3_5_text", tmp_path)
    small = {"CUDA": torch.device("cpu"), "PROMPTS": [[5, 6, 7], [8] * 20, [9]], "OUTPUTS": 4, "STEPS": 2}
    for name, value in small.items():
        monkeypatch.setattr(tokens, name, value)
    monkeypatch.setattr(tokens, "CudaGraphDevice", FakeGraphs)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with torch.inference_mode():
        assert tokens.tokens(path)["tokens"] == 12
        assert tokens.graph(path)["ways"] == 1


@pytest.mark.parametrize(
    ("config", "batch", "context", "expected_ms"),
    [
        (LLAMA_8B, 1, 2048, 3.55),
        (LLAMA_8B, 64, 2048, 7.49),
        (QWEN3_06B, 1, 2048, 0.33),
        (QWEN3_06B, 256, 2048, 14.4),
    ],
)
def test_decode_floors(config: object, batch: int, context: int, expected_ms: float) -> None:
    found = decode_floor_s(config, batch, context, H200) * 1e3  # type: ignore[arg-type]
    assert found == pytest.approx(expected_ms, rel=0.02)


def test_prefill_floors_and_kv() -> None:
    assert prefill_floor_s(LLAMA_8B, 2048, H200[1]) * 1e3 == pytest.approx(37.7, rel=0.01)
    assert prefill_floor_s(LLAMA_8B, 8192, H200[1]) * 1e3 == pytest.approx(167, rel=0.01)
    assert kv_bytes(LLAMA_8B) == 128 << 10
    assert kv_bytes(QWEN3_06B) == 112 << 10


def run(*argv: str, results: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PENSTOCK_GPU_RESULTS": str(results), "PYTHONPATH": str(ROOT)}
    return subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def modules() -> list[str]:
    """Those of the parts that the script runs."""
    text = (HERE / "run.sh").read_text()
    parts = text.split("PARTS_ALL=(")[1].split(")")[0].split()
    assert parts
    assert all(f"[{part}]=" in text for part in parts)
    measuring = text.split('MEASURING="')[1].split('"')[0].split()
    assert set(measuring) == LIMITS_S.keys(), "the product's parts"
    return [f"tests.bench.engine.gpu.{p}" if p in measuring else f"tests.gpu.{p}" for p in parts]


def test_the_script_parses_and_its_parts_are_there(tmp_path: Path) -> None:
    assert run("bash", "-n", str(HERE / "run.sh"), results=tmp_path / "none").returncode == 0
    assert all(find_spec(module) for module in modules())


@pytest.mark.nightly
def test_the_parts_import_without_a_gpu(tmp_path: Path) -> None:
    done = run(sys.executable, "-c", "import " + ", ".join(modules()), results=tmp_path / "none")
    assert done.returncode == 0, done.stderr


# -- the script, with a stand-in for Python -------------------------------------------------------

STAND_IN = """#!/bin/bash
case "$*" in
    "-m tests.gpu.part"*) echo "ran $3 within $4 s"; touch "${TRITON_CACHE_DIR:-/tmp}/$3.cubin" ;;
esac
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., tuple[subprocess.CompletedProcess[str], dict[str, int]]]:
    """Runs run.sh -> what it printed, and the limit of each part that ran, in seconds."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(STAND_IN)
    (tmp_path / "bin" / "python3").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    environment.pop("TRITON_CACHE_DIR", None)

    def run_script(*argv: str, **named: str) -> tuple[subprocess.CompletedProcess[str], dict[str, int]]:
        command = ["bash", str(HERE / "run.sh"), *argv]
        own = environment | named
        done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=120)
        ran = [line.split() for line in done.stdout.splitlines() if line.startswith("ran ")]
        return done, {part: int(limit_s) for _, part, _, limit_s, _ in ran}

    return run_script


def test_all_parts_share_the_time_and_one_alone_has_all_of_it(tmp_path: Path, script: Any) -> None:
    done, limits_s = script("--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert list(limits_s)[:3] == ["floors", "kernels", "steps"]
    assert list(limits_s)[-4:] == ["matmul", "profile", "ranks", "backends"]
    assert 25 <= limits_s["floors"] <= 30
    assert limits_s["backends"] <= 585, "what the others left over is the last one's"
    [results] = (tmp_path / "out").iterdir()
    assert str(results) in done.stdout
    _, limits_s = script("--out", str(tmp_path / "out"), "steps")
    assert limits_s["steps"] >= 575
    _, limits_s = script("--out", str(tmp_path / "out"), "steps", LIMITS="steps=33")
    assert limits_s["steps"] == 33


def test_a_second_command_takes_floors_and_compiled_kernels_from_the_first(
    tmp_path: Path, script: Any
) -> None:
    first, kept = tmp_path / "first.jsonl", tmp_path / "kept"
    first.write_text(
        '{"part": "floors", "row": "card", "bf16_flops": 1.0}\n{"part": "steps", "row": "other"}\n'
    )
    out = ["--out", str(tmp_path / "out"), "--floors", str(first)]
    done, _ = script(*out, "--cache-out", str(kept), "kernels")
    assert done.returncode == 0, done.stderr
    [results] = (tmp_path / "out").iterdir()
    assert [json.loads(line)["part"] for line in results.read_text().splitlines()] == ["floors", "kernels"]
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    script(*out, "--cache-in", str(kept), "steps", TRITON_CACHE_DIR=str(kernels))
    assert {path.name for path in kernels.iterdir()} == {"kernels.cubin", "steps.cubin"}


TOY = like(
    QWEN3_06B,
    vocab_size=321,
    hidden_size=32,
    intermediate_size=48,
    heads=2,
    kv_heads=1,
    head_dim=16,
    windows=(None,),
)


def toy_runner(path: Path, slots: int, longest: int) -> DeviceRunner:
    settings: dict[str, Any] = {
        "max_num_seqs": slots,
        "max_model_len": longest,
        "max_step_tokens": max(8, slots),
    }
    return load_fake(path, kv_cache_memory=1 << 20, **settings)


@pytest.mark.nightly
@interpreted
def test_the_benchmark_of_the_whole_engine_at_toy_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "TOKEN_MAX", TOY.vocab_size - 1)
    path = write_model(TOY, tmp_path / "toy", torch.device("cpu"))
    wanted = whole.nano_vllm(2, 2, 5)
    found = whole.throughput(path, TOY, wanted, H200, toy_runner)
    assert found["output_tokens"] == sum(request.outputs for request in wanted)
    assert 0.0 < found["share"] < 1.0
    marks: list[FakeMark] = []

    def mark() -> FakeMark:
        marks.append(FakeMark())
        return marks[-1]

    found = whole.idle(path, 2, 3, 14, toy_runner, mark)
    assert found["idle"] == 0.5, "each mark is a millisecond after the one before"
    assert found["step_ms"] == 2.0


@pytest.mark.nightly
@interpreted
def test_a_long_prompt_beside_streams_at_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "TOKEN_MAX", TOY.vocab_size - 1)
    path = write_model(TOY, tmp_path / "toy", torch.device("cpu"))
    found = whole.beside(path, 2, 3, 20, 24, toy_runner)
    assert found["steps"] >= 2, "the prompt takes several steps of at most 8 tokens"
    assert found["gap_max_ms"] >= found["gap_p50_ms"] > 0.0
    assert found["first_token_ms"] > 0.0
    assert EngineConfig("model").gap_target_ms == whole.GAP_TARGET_S * 1e3


class FakeMark:
    """A clock that ticks when it is looked at."""

    now_ms = 0.0

    def record(self) -> None:
        FakeMark.now_ms += 1.0
        self.at_ms = FakeMark.now_ms

    def elapsed_time(self, end: FakeMark) -> float:
        return end.at_ms - self.at_ms


def test_the_floor_of_many_requests() -> None:
    """By hand: two prefills, and of the steps after the first token two with both, two with one."""
    wanted = [whole.Wanted([1] * 10, 3), whole.Wanted([1] * 20, 5)]
    prefills = prefill_floor_s(QWEN3_06B, 10, H200[1]) + prefill_floor_s(QWEN3_06B, 20, H200[1])
    decodes = [(2, 16), (2, 17), (1, 23), (1, 24)]
    expected = prefills + sum(decode_floor_s(QWEN3_06B, n, context, H200) for n, context in decodes)
    assert whole.requests_floor_s(QWEN3_06B, wanted, H200) == pytest.approx(expected, rel=1e-3)


@pytest.mark.nightly
@interpreted
def test_the_checks_of_the_whole_engine_at_toy_size(tmp_path: Path) -> None:
    path = make_tiny_model("qwen3", tmp_path / "tiny", **SMALL)

    def load(path: Path, **settings: Any) -> DeviceRunner:
        sizes: dict[str, Any] = {"max_num_seqs": 2, "max_step_tokens": engine.STEP_TOKENS_MAX}
        return load_fake(path, kv_cache_memory=1 << 20, **sizes, **settings)

    assert engine.through_the_core(path, load, count=2, outputs=2)["tokens"] == 8
    assert engine.graphs(path, load, count=2, outputs=3)["steps"] > 2

    def load_drafting(path: Path, **settings: Any) -> DeviceRunner:
        return load(path, **{"max_drafts": 3} | settings, enforce_eager=True)

    found = engine.drafted(path, load_drafting, count=3, outputs=8)
    assert found["steps"] <= found["steps_plain"]
    assert engine.choices(path, load, count=3, outputs=2)["tokens"] == 24
    hybrid = other_model("qwen3_5_text", tmp_path / "hybrid")
    assert engine.snapshots(hybrid, load, count=2, outputs=3)["restored"] > 0
