"""Compiles the C++ sources beside this file, once per instruction set.

    python engine/runtime/native/build.py

An installation does that too (hatch_hook.py), editable ones included. Each library's name contains the digest
of its sources and flags, so that a library older than its sources is never loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
LIBRARIES: Final = HERE / "lib"
SOURCE: Final = "decoder.cpp"
FLAGS: Final = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-fno-trapping-math",
    "-mprefer-vector-width=512", "-Wall", "-Wextra", "-Wno-psabi", "-static-libstdc++", "-static-libgcc",
    "-Wno-maybe-uninitialized",  # GCC 12 complains of its own intrinsics
    "-fvisibility=hidden",  # or the first library loaded lends its tables to those of other instruction sets
)  # fmt: skip
ISAS: Final[Mapping[str, tuple[str, ...]]] = {
    "amx_bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"),
    "avx512_bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
    "avx512_vnni": ("-march=x86-64-v4", "-mavx512vnni"),
    "avx512": ("-march=x86-64-v4",),
    "avx2": ("-march=x86-64-v3",),
    "portable": (),
}
"""The instruction sets and their compiler flags, best first."""
COMPILE_TIMEOUT_S: Final = 1200.0  # a minute each on an idle core; images are built on loaded ones


class BuildFailed(Exception):
    """There is no compiler for this machine, or it failed."""


def library_path(isa: str) -> Path:
    """The path of an instruction set's library, built from the present sources."""
    return LIBRARIES / f"penstock-{isa}-{_digest(isa)}.so"


def build() -> None:
    """Compile missing libraries, all at the same time, and remove stale ones. Raises BuildFailed."""
    missing = {isa: library_path(isa) for isa in ISAS if not library_path(isa).exists()}
    if not missing:
        return
    found = compiler()
    LIBRARIES.mkdir(exist_ok=True)
    # Made under a name of this process: another process sees a whole library, or none.
    made = {path: path.with_suffix(f".{os.getpid()}") for path in missing.values()}
    jobs = [(path, _compile(found, isa, made[path])) for isa, path in missing.items()]
    complaints = [_finish(path, made[path], job) for path, job in jobs]
    if any(complaints):
        raise BuildFailed("\n".join(filter(None, complaints)))
    current = {library_path(isa) for isa in ISAS}
    for stale in set(LIBRARIES.glob("*.so")) - current:
        stale.unlink(missing_ok=True)


def compiler() -> str:
    """The path of the C++ compiler. Raises BuildFailed."""
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        raise BuildFailed(f"there are no kernels for {platform.machine()} on {sys.platform}")
    found = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "c++", "clang++"))), None)
    if found is None:
        raise BuildFailed("no C++ compiler (g++, c++, clang++, or CXX)")
    return found


def _compile(compiler: str, isa: str, made: Path) -> subprocess.Popen[str]:
    command = [compiler, *FLAGS, *ISAS[isa], str(HERE / SOURCE), "-o", str(made)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _finish(path: Path, made: Path, job: subprocess.Popen[str]) -> str | None:
    """The compiler's messages, if it failed; else the library is moved into place."""
    try:
        said, _ = job.communicate(timeout=COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        job.kill()
        said, _ = job.communicate()
    if job.returncode == 0:
        made.replace(path)
        return None
    made.unlink(missing_ok=True)
    return said or f"{path.name}: the compiler was stopped"


def _digest(isa: str) -> str:
    digest = hashlib.sha256(" ".join((*FLAGS, *ISAS[isa])).encode())
    for source in sorted((*HERE.glob("*.h"), *HERE.glob("*.cpp"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    try:
        build()
    except BuildFailed as failure:
        sys.exit(f"not built: {failure}")
