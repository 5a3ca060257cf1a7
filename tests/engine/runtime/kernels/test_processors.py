"""Products in the interpreter have the same bits on every processor, and so do the tests of kernels.

NumPy's BLAS has kernels for each family of processors, and some of them add a row's terms in an order that
depends on the row's place. The native kernels need no such test: theirs run with each instruction set that
this processor has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.runtime.setup.hardware import processor_flags

ROOT = Path(__file__).parents[4]
CORES: dict[str, set[str]] = {
    "Prescott": {"pni"},
    "Haswell": {"avx2", "fma"},
    "Zen": {"avx2", "fma"},
    "SkylakeX": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}
"""OpenBLAS's names of processors, and what its kernels for them need of the one at hand."""


def blas_core(core: str) -> str:
    """Run the tests of products as if the processor were `core`; return whose kernels OpenBLAS chose."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.runtime.kernels.products"],
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_CORETYPE": core},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{core}: {done.stderr}"
    return done.stdout.strip()


@pytest.mark.nightly
def test_products_have_the_same_bits_with_the_blas_of_every_processor() -> None:
    flags = processor_flags()
    cores = [core for core, needed in CORES.items() if needed <= flags]
    chosen = {core: blas_core(core) for core in cores}
    # Builds of OpenBLAS that have none of their own for Zen take Haswell's.
    assert len(set(chosen.values())) >= len(set(cores) - {"Zen"}), f"the variable chose nothing: {chosen}"
