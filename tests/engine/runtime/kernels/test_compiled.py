"""What the kernels become on Hopper: the instructions that were meant, within the machine's limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.effort import drawn, some
from tests.once import once

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
SHARED_BYTES_MAX = 227 << 10
"""Of one multiprocessor."""
STACK_BYTES_MAX = 64
"""A thread's, for numbers that are set aside outside of loops: some 16 registers' worth."""

# Triton 3.7 leaves out an argument of syntax trees, which Python 3.13 and 3.14 warn of.
WARNINGS = ("-W", "error", "-W", "ignore::DeprecationWarning:triton.compiler.code_generator")

Report = dict[str, int]
WEIGHTS_FIRST = ("dependent gated", "dependent matmul", "dependent split")


def program(name: str, cache: Path, *arguments: str) -> str:
    """What one of this package's says, with `cache` as Triton's."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, *WARNINGS, "-m", f"tests.engine.runtime.kernels.{name}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """A quarter of a minute's work, which the processes of a run share."""
    said = once(tmp_path_factory, "compiled", lambda: program("compiled", tmp_path_factory.mktemp("triton")))
    lines = [json.loads(line) for line in said.splitlines()]
    return {line.pop("name"): line for line in lines}


def test_nothing_spills_in_a_loop_and_everything_fits(reports: dict[str, Report]) -> None:
    """Where a step begins, cosines of angles beyond 100,000 keep their digits in memory of their own. Decode
    attention sets a few numbers aside before its loop over keys and reads them behind it, once a segment;
    how many, each Triton decides for itself."""
    for name, report in reports.items():
        assert report["shared_bytes"] <= SHARED_BYTES_MAX, name
        assert report["stack_bytes"] <= STACK_BYTES_MAX, name
        if not name.endswith("begin"):
            assert report["st.local"] == 0, name
            assert report["innermost_spills" if "decode" in name else "looped_spills"] == 0, name


def test_decode_has_a_tile_in_flight_behind_another_in_each_of_three_programs(
    reports: dict[str, Report],
) -> None:
    tile = 2 * 64 * 128 * 2
    for name, tiles in some((("decode 8B", 2), ("decode fp8 cache", 1.5), ("decode window", 2)), usual=2):
        report = reports[name]
        assert tiles * tile <= report["shared_bytes"] <= SHARED_BYTES_MAX // 3 - 1024, name
        assert 3 * 128 * report["registers"] <= 65536, name
        assert report["cp.async.cg"] > 0, name
        assert report["mma.sync"] > 0, name
        assert report["atom.global.gpu.acq_rel"] == 1, name


def test_prefill_feeds_the_tensor_cores_from_shared_memory(reports: dict[str, Report]) -> None:
    tile = 2 * 64 * 128 * 2
    queries = 128 * 128 * 2
    assert queries + 2 * tile <= reports["prefill 8B"]["shared_bytes"]
    for name in some(("8B", "fp8 cache", "window"), usual=2):
        report = reports[f"prefill {name}"]
        assert report["wgmma.mma_async"] > 0, name
        assert report["mma.sync"] == 0, name
        assert report["cp.async.cg"] > 0, name


def test_chunks_of_delta_nets_feed_the_tensor_cores_and_fetch_ahead(reports: dict[str, Report]) -> None:
    """From chunk to chunk by what arrives meanwhile: keys, queries, W, U and P of the next."""
    for name in ("delta prepare", "delta carry"):
        assert reports[name]["wgmma.mma_async"] > 0, name
        assert reports[name]["mma.sync"] == 0, name
    operands = 2 * 64 * (3 * 128 + 32 + 64)
    assert reports["delta carry"]["cp.async.cg"] > 0
    assert operands <= reports["delta carry"]["shared_bytes"]


def test_a_step_of_a_delta_net_has_its_state_in_registers(reports: dict[str, Report]) -> None:
    """And between its tokens, where it verifies drafts."""
    names = ("delta step", "delta step in cells", "delta drafts", "delta step of shared keys")
    for name in some(names, usual=3):
        assert reports[name]["stack_bytes"] == 0, name
        assert 8 * 32 * reports[name]["registers"] <= 65536, name


def test_skinny_products_read_ahead_by_what_hides_the_memorys_latency(reports: dict[str, Report]) -> None:
    """26 KB in flight per multiprocessor; a fp8 weight travels as fp8."""
    for name in ("matmul", "matmul narrow", "matmul 64 rows", "matmul fp8", "matmul fp8 blocks"):
        assert reports[name]["cp.async.cg"] > 0, name
        assert reports[name]["shared_bytes"] > 26_000, name
    for name in reports:
        if name.startswith(("matmul normed", "matmul gated")) and "fp8" not in name:
            report = reports[name]
            assert report["shared_bytes"] > 26_000, name
            assert report["ld.global"] == 0, (
                f"{name}: what a tile needs is fetched ahead, the norm's weight too"
            )
            assert report["mma.sync"] > 0, name
    assert reports["matmul fp8"]["shared_bytes"] < reports["matmul 64 rows"]["shared_bytes"] // 2
    assert reports["matmul 64 rows"]["wgmma.mma_async"] > 0


def test_a_row_that_is_alone_is_read_ahead_and_shares_a_multiprocessor(reports: dict[str, Report]) -> None:
    """By four programs, which together have several times 26 KB in flight."""
    alone = {name: report for name, report in reports.items() if name.startswith("matmul alone")}
    assert len(alone) == drawn(2, whole=6)
    for name, report in alone.items():
        assert report["cp.async.cg"] > 0, name
        assert report["mma.sync"] == report["wgmma.mma_async"] == 0, name
        assert report["ld.global"] == (2 if name.endswith("fp8") else 0), f"{name}: scales at the end"
        assert 4 * report["shared_bytes"] <= SHARED_BYTES_MAX, name
        assert 4 * report["shared_bytes"] > 2 * 52_000, name
        assert 4 * 128 * report["registers"] <= 65536, name


def test_nothing_is_converted_one_number_at_a_time(reports: dict[str, Report]) -> None:
    for name, report in reports.items():
        assert report["cvt.bf16.f16"] == 0, name


def test_many_rows_of_an_fp8_weight_feed_the_tensor_cores(reports: dict[str, Report]) -> None:
    many = [report for name, report in reports.items() if name.startswith("matmul fp8 ") and "rows" in name]
    assert len(many) == drawn(1, whole=4)
    for report in many:
        assert report["wgmma.mma_async"] > 0
        assert report["mma.sync"] == 0
        assert report["cp.async.cg"] > 0


def test_split_products_read_ahead_and_combine_behind_a_release(reports: dict[str, Report]) -> None:
    split = {name: report for name, report in reports.items() if name.startswith("split ")}
    assert len(split) == drawn(1, whole=3)
    for name, report in split.items():
        assert report["wgmma.mma_async"] > 0, name
        assert report["cp.async.cg"] > 0, name
        assert report["shared_bytes"] > 26_000, name
        assert report["atom.global.gpu.acq_rel"] == 1, name


def test_dependently_launched_kernels_wait_before_they_touch_anything_but_weights(
    reports: dict[str, Report],
) -> None:
    dependent = {name: report for name, report in reports.items() if name.startswith("dependent ")}
    assert len(dependent) == drawn(4, whole=19)
    for name, report in dependent.items():
        assert report["waits"] == report["lets_start"] == 1, name
        assert report["touched"] == 0, name
        assert (report["prefetched"] > 0) == name.startswith(WEIGHTS_FIRST), name


def test_what_is_compiled_ahead_in_threads_is_what_a_launch_looks_for(tmp_path: Path) -> None:
    """Three kernels: one of two launches is the other's, with more rows. Another process finds them where
    they are moved to, but for one that is not whole any more."""
    said = json.loads(program("ahead", tmp_path / "compiled"))
    assert said == {"compiled": {"compile": 3}, "loaded": {"compile": 3}}
    shipped = (tmp_path / "compiled").rename(tmp_path / "shipped")
    [machine_code] = shipped.glob("*/silu_mul_kernel.cubin")
    machine_code.unlink()
    found = json.loads(program("again", tmp_path / "empty", str(shipped)))
    assert found == {"compiled": 1, "found": 2}
