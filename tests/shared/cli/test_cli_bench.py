"""The command `penstock bench`, and `python -m tests.bench`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import structlog

from shared import cli
from shared.cli import bench as cli_bench
from shared.process import logs
from tests.bench import __main__ as bench
from tests.bench.figures import Figure, figure


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
    assert bench.main(["a"]) == 0
    printed = capsys.readouterr()
    assert [json.loads(line)["name"] for line in printed.out.splitlines()] == ["a"]
    assert [json.loads(line)["event"] for line in printed.err.splitlines()] == ["redis.down"]


def test_the_command_of_an_installation_knows_every_bench() -> None:
    assert tuple(bench.BENCHES) == cli_bench.OF_A_CHECKOUT


def test_the_command_of_an_installation_says_how_a_bench_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "gateway", "--rows", "a row"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.endswith("python -m tests.bench gateway --rows 'a row'\n")
