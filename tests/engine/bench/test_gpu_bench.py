"""The table of `python -m tests.bench gpu`. tests/gpu/run.sh runs the measurements."""

from __future__ import annotations

import asyncio
import json
from argparse import ArgumentParser
from pathlib import Path

import pytest

from tests.bench import figures
from tests.bench.engine import gpu
from tests.bench.engine.gpu.targets import TARGETS, failures


def test_measured_results_are_kept_and_missing_ones_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part that runs here measures nothing, so all figures come from the file of results."""
    results = tmp_path / "gpu.jsonl"
    lines = [
        {"part": "floors", "row": "card", "read_bytes_per_s": 4e12, "bf16_flops": 7e14},
        {"part": "steps", "row": "decode Qwen3-0.6B batch 1 context 2048", "ok": True, "share": 0.7},
        {"part": "steps", "row": "decode Qwen3-0.6B batch 256 context 2048", "ok": True, "share": 0.7},
        {"part": "engine", "row": "engine idle batch 32", "ok": True, "idle": 0.01},
        {"part": "steps", "row": "prefill Llama-3.1-8B 2048", "ok": False, "error": "RuntimeError: no"},
    ]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran = []

    async def run_part(part: str, results: Path) -> None:
        ran.append(part)

    monkeypatch.setattr(gpu, "_run_part", run_part)
    parser = ArgumentParser()
    gpu.add_arguments(parser)
    options = parser.parse_args(["--only", "matmul", "--results", str(results)])
    found = {figure.name: figure for figure in asyncio.run(gpu.run(options))}
    assert ran == ["matmul"]
    assert len(found) == len(TARGETS)
    assert found["decode step, Qwen3-0.6B, 2k, batch 1"].ok is True
    assert found["decode step, Qwen3-0.6B, 2k, batch 256"].ok is False
    assert found["GPU idle between decode steps, batch 32"].ok is True
    assert found["prefill, Llama-3.1-8B, 2k"] == figures.Figure(
        "prefill, Llama-3.1-8B, 2k", None, "of the matrix rate", ">= 0.75", None
    )
    assert failures(lines) == ["prefill Llama-3.1-8B 2048: RuntimeError: no"]
    asyncio.run(gpu.run(parser.parse_args(["--only", "steps", "--results", str(tmp_path / "new")])))
    assert ran == ["matmul", "floors", "steps"], "shares need floors"
