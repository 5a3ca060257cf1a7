"""The row of evicted histories: what it reads of an engine's metrics, and that it starts its own engines."""

from __future__ import annotations

import argparse
import asyncio

import pytest

from tests.bench.engine import served
from tests.bench.engine.load import BenchFailed
from tests.bench.engine.tiers import pages_on_disk


def test_the_gauge_of_pages_on_disk_is_read() -> None:
    assert (
        pages_on_disk("# HELP x\npenstock_engine_disk_pages 118.0\npenstock_engine_disk_pages_x 1\n") == 118
    )
    assert pages_on_disk("penstock_engine_kv_pages 1.0\n") == 0


def test_engines_that_run_elsewhere_are_not_asked() -> None:
    parser = argparse.ArgumentParser()
    served.add_arguments(parser)
    options = parser.parse_args(["--rows", "tiers", "--url", "http://127.0.0.1:1/v1", "--model", "m"])
    with pytest.raises(BenchFailed, match="--url"):
        asyncio.run(served.run(options))
