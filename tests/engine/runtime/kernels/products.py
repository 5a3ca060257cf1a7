"""The tests that compare bits of products, run as a program on the BLAS that OPENBLAS_CORETYPE names.

A program, because the library chooses its kernels once, when NumPy loads it. Prints for which processor
they are.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from tests.engine.runtime.kernels import test_interpreter, test_matmul, test_prefill_attention
from tests.engine.runtime.kernels.interpreter import prepare_interpreter

CORE_NAMES = ("scipy_openblas_get_corename64_", "scipy_openblas_get_corename", "openblas_get_corename")
"""What builds of OpenBLAS call the function that says for which processor their kernels are."""


def blas_core() -> str:
    """The processor for which the loaded OpenBLAS has its kernels, by OpenBLAS's name."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    [path] = [path for path in mapped if "openblas" in path]
    library = ctypes.CDLL(path)
    named = next(getattr(library, name) for name in CORE_NAMES if hasattr(library, name))
    named.restype = ctypes.c_char_p
    core: bytes = named()
    return core.decode()


if __name__ == "__main__":
    prepare_interpreter()
    test_interpreter.test_a_products_terms_are_added_by_halves()
    test_matmul.test_a_rows_bits_do_not_depend_on_the_others()
    test_prefill_attention.test_a_prompt_in_chunks_is_the_prompt_whole()
    print(blas_core())  # noqa: T201
