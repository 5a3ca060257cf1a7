"""The compiled library, through ctypes: plain pointers, and the interpreter lock released in every call."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, Final

from engine.runtime.native.build import ISAS, library_path
from engine.runtime.setup.hardware import PROC, processor_flags

_AVX512: Final = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
NEEDED_FLAGS: Final[Mapping[str, frozenset[str]]] = {
    "amx_bf16": _AVX512 | {"avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile"},
    "avx512_bf16": _AVX512 | {"avx512_bf16", "avx512_vnni"},
    "avx512_vnni": _AVX512 | {"avx512_vnni"},
    "avx512": _AVX512,
    "avx2": frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}),
    "portable": frozenset(),
}
assert list(NEEDED_FLAGS) == list(ISAS)
# <asm/unistd_64.h>, <asm/prctl.h>, <asm/fpu/types.h>
SYS_ARCH_PRCTL: Final = 158
ARCH_REQ_XCOMP_PERM: Final = 0x1023
XFEATURE_XTILEDATA: Final = 18


class Shape(ctypes.Structure):
    """`PenstockShape` in decoder.cpp."""

    _fields_ = (
        ("vocab", c_int64),
        ("hidden", c_int64),
        ("inner", c_int64),
        ("layers", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("page_size", c_int64),
        ("norm_eps", c_float),
        ("bf16", c_int32),
        ("quantised", c_int32),
    )


class Step(ctypes.Structure):
    """`PenstockStep` in decoder.cpp."""

    _fields_ = (
        ("rows", c_int64),
        ("slots", POINTER(c_int64)),
        ("starts", POINTER(c_int64)),
        ("lengths", POINTER(c_int64)),
        ("tokens_stride", c_int64),
        ("tables_stride", c_int64),
        ("tokens", c_void_p),
        ("tables", c_void_p),
    )


class Draw(ctypes.Structure):
    """`PenstockDraw` in decoder.cpp."""

    _fields_ = (
        ("count", c_int64),
        ("vocab", c_int64),
        ("rows", POINTER(c_int64)),
        ("slots", POINTER(c_int64)),
        ("positions", POINTER(c_int64)),
        ("logits", c_void_p),
        ("temperature", c_void_p),
        ("min_p", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("seed", c_void_p),
        ("masks", POINTER(c_char_p)),
        ("mask_len", c_int64),
    )


_NO_MEMORY: Final = -1
_SIGNATURES: Final[Mapping[str, tuple[Any, tuple[Any, ...]]]] = {
    "penstock_isa": (c_char_p, ()),
    "penstock_new": (c_void_p, (POINTER(Shape), c_int32)),
    "penstock_delete": (None, (c_void_p,)),
    "penstock_set_linear": (c_int32, (c_void_p, c_int64, c_int32, c_void_p, c_void_p)),
    "penstock_set_norm": (c_int32, (c_void_p, c_int64, c_int32, c_void_p, c_int64)),
    "penstock_set_cache": (None, (c_void_p, c_int64, c_void_p, c_void_p, c_int64)),
    "penstock_set_tables": (None, (c_void_p, c_void_p, c_void_p, c_void_p)),
    "penstock_forward": (c_int32, (c_void_p, POINTER(Step), c_void_p)),
    "penstock_logits": (c_int32, (c_void_p, c_void_p, c_int64, c_void_p)),
    "penstock_draw": (c_int32, (c_void_p, POINTER(Draw), c_void_p)),
}


def built_isas(proc: Path = PROC) -> list[str]:
    """The instruction sets that have a library and that this processor and its system support, best first."""
    flags = processor_flags(proc)
    return [
        isa
        for isa, needed in NEEDED_FLAGS.items()
        if needed <= flags and library_path(isa).exists() and ("amx_tile" not in needed or may_use_tiles())
    ]


@cache
def may_use_tiles() -> bool:
    """True if the registers of the matrix unit may be used: Linux (5.16 or later) grants them to all threads
    of the process on request, as they are 8 KiB more to save."""
    if platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)


def _checked(result: int | None, function: Any, _: object) -> int | None:
    """The result of a function that returns a model, or whether it had the memory. Raises MemoryError."""
    if result == (None if function.restype is c_void_p else _NO_MEMORY):
        raise MemoryError("the native kernels can have no more memory, or no more threads")
    return result


@cache
def library(isa: str) -> ctypes.CDLL:
    """The library for one of `built_isas()`."""
    loaded = ctypes.CDLL(str(library_path(isa)))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
        if result in (c_int32, c_void_p):
            function.errcheck = _checked
    assert loaded.penstock_isa() == isa.encode()
    return loaded
