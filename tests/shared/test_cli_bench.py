"""The command `penstock bench`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import structlog

from shared import cli, logs
from shared.bench.figures import Figure, figure
from shared.cli import bench


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    """The command sets up the log of its process, with a level that hides what other tests look for."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


async def run(_: argparse.Namespace) -> list[Figure]:
    log = logs.get(__name__)
    log.info("redis.up")
    log.error("redis.down")
    return [figure("a", 1.0, "ms")]


def test_what_is_printed_is_figures_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = ModuleType("tests.a_bench")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(bench, "BENCHES", {"a": (module.__name__, "nothing")})
    module.run, module.add_arguments, module.BenchFailed = run, lambda _: None, OSError  # type: ignore[attr-defined]
    assert cli.main(["bench", "a"]) == 0
    printed = capsys.readouterr()
    assert [json.loads(line)["name"] for line in printed.out.splitlines()] == ["a"]
    assert [json.loads(line)["event"] for line in printed.err.splitlines()] == ["redis.down"]
