"""What of the GPU's script can be known without a GPU: it parses, imports, and does its arithmetic right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.bench.gpu import LIMITS_S
from engine.bench.gpu.shapes import LLAMA_8B, QWEN3_06B, decode_floor_s, kv_bytes, prefill_floor_s
from engine.bench.gpu.targets import TARGETS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
H200 = (4.3e12, 788e12)
"""Bandwidth and matrix rate for which the expected figures were worked out by hand."""


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


def test_the_script_parses_and_its_parts_import(tmp_path: Path) -> None:
    assert run("bash", "-n", str(HERE / "run.sh"), results=tmp_path / "none").returncode == 0
    text = (HERE / "run.sh").read_text()
    parts = text.split("PARTS_ALL=(")[1].split(")")[0].split()
    assert parts
    assert all(f"[{part}]=" in text for part in parts)
    measuring = text.split('MEASURING="')[1].split('"')[0].split()
    assert set(measuring) == LIMITS_S.keys(), "the product's parts"
    modules = [f"engine.bench.gpu.{p}" if p in measuring else f"tests.gpu.{p}" for p in parts]
    done = run(sys.executable, "-c", "import " + ", ".join(modules), results=tmp_path / "none")
    assert done.returncode == 0, done.stderr


def test_what_was_not_measured_says_so(tmp_path: Path) -> None:
    results = tmp_path / "gpu.jsonl"
    lines = [
        {
            "part": "steps",
            "row": "decode Llama-3.1-8B batch 1 context 2048",
            "ok": True,
            "share": 0.5,
            "ms": 8.0,
        },
        {
            "part": "steps",
            "row": "decode Llama-3.1-8B fp8 batch 1 context 2048",
            "ok": True,
            "share": 0.4,
            "ms": 4.0,
        },
        {"part": "kernels", "row": "norm", "ok": False, "error": "AssertionError: wrong"},
    ]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run(sys.executable, "-m", "tests.gpu.table", results=results)
    assert done.returncode == 0, done.stderr
    assert "1 checks failed\n  norm: AssertionError: wrong" in done.stdout
    written = [json.loads(line) for line in results.read_text().splitlines()]
    measured = {line["row"]: line["measured"] for line in written if line["part"] == "table"}
    assert len(measured) == len(TARGETS)
    assert measured.pop("decode step, Llama-3.1-8B, 2k, batch 1") == 0.5
    assert measured.pop("fp8 weights, Llama-3.1-8B, batch 1, against bf16") == 2.0
    assert set(measured.values()) == {"not measured"}
