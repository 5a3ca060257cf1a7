"""A row that ends its process in any way costs no other row; and rows are shared between processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.bench.engine.gpu import supervise
from tests.bench.engine.gpu.results import read
from tests.bench.engine.gpu.supervise import TIMED_OUT, Part, run_part

ROOT = Path(__file__).parents[3]
BREAKING = """
import os, sys, threading
import torch
from tests.bench.engine.gpu.measuring import check

def killed():
    os.kill(os.getpid(), 9)

def lost():
    raise torch.AcceleratorError("illegal memory access")

def forever():
    threading.Event().wait()

def wrong():
    assert 1 == 2, "one is not two"

rows = {"first": lambda: {"us": 1.0}, "killed": killed, "lost": lost, "forever": forever, "wrong": wrong}
oks = [check("broken", row, run, limit_s=0.2) for row, run in rows.items()]
check("broken", "last", dict)
sys.exit(0 if all(oks) else 1)
"""


def supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, **how: Any) -> tuple[int, Path]:
    (tmp_path / "penstock_fake_part.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT), *sys.path[1:]]))
    results = tmp_path / "gpu.jsonl"
    results.write_text(json.dumps({"part": "broken", "row": "killed", "ok": True}) + "\n")  # of another day
    part = Part("broken", ["penstock_fake_part"], **{"limit_s": 120.0} | how)
    return asyncio.run(run_part(part, results)), results


def by_row(results: Path) -> Mapping[str, Mapping[str, Any]]:
    return {line["row"]: line for line in read(results)[1:]}


@pytest.mark.nightly
def test_a_row_that_ends_its_process_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, results = supervised(tmp_path, monkeypatch, BREAKING)
    assert status == 1
    assert len(read(results)) == 1 + 6, "no row is run twice"
    rows = by_row(results)
    assert rows["first"]["ok"] is rows["last"]["ok"] is True
    errors = {row: line["error"] for row, line in rows.items() if not line["ok"]}
    assert errors == {
        "killed": "ended its process by SIGKILL",
        "lost": "AcceleratorError: illegal memory access",
        "forever": "not done in 0.2 s",
        "wrong": "AssertionError: one is not two",
    }
    assert rows["wrong"]["at"] == [], "places in our own files only"


@pytest.mark.nightly
def test_rows_are_shared_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
import os
from tests.bench.engine.gpu.measuring import check

for number in range(7):
    check("shared", f"row {number}", lambda: {"pid": os.getpid()})
"""
    status, results = supervised(tmp_path, monkeypatch, source, shares=3)
    assert status == 0
    pids = [by_row(results)[f"row {number}"]["pid"] for number in range(7)]
    assert len(set(pids)) == 3
    assert pids[:4] == pids[3:]


def test_a_part_that_exceeds_its_time_limit_names_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def once(share: Any) -> int:
        share._tried.write_text("done\nlong\n")
        return TIMED_OUT

    monkeypatch.setattr(supervise._Share, "_once", once)
    status, results = supervised(tmp_path, monkeypatch, "", limit_s=5.0)
    assert status == TIMED_OUT
    assert by_row(results) == {
        "long": {
            "part": "broken",
            "row": "long",
            "ok": False,
            "error": "not done when the part's 5 s were up",
        }
    }
