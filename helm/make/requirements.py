"""`python -m helm.make.requirements`: write the images' requirements, pinned by constraints.txt and hashes.

    gateway/requirements.txt        engine/requirements-cuda.txt    torch from PyPI, with CUDA's libraries
    shared/requirements-build.txt   engine/requirements-cpu.txt     torch from PyTorch's index of CPU wheels

It needs PyPI, and for the CPU's torch the wheel itself (`PIP_FIND_LINKS`), whose hash it takes. Run it when
constraints.txt or the dependencies in pyproject.toml change; `tests/ship/test_requirements.py` fails until
then.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PYTHON = "3.11"
PLATFORM = "x86_64-manylinux_2_31"
HEAD = "# Made by `python -m helm.make.requirements`: what the image installs. Do not edit.\n"
CUDA = re.compile(r"(cuda|nvidia)-|(torch|triton)$")
"""Packages that a machine without a GPU does not need, and torch itself."""
FILES = {
    "gateway": ROOT / "gateway/requirements.txt",
    "cuda": ROOT / "engine/requirements-cuda.txt",
    "cpu": ROOT / "engine/requirements-cpu.txt",
    "build": ROOT / "shared/requirements-build.txt",
}
Pins = dict[str, list[str]]
"""The lines of each requirement: `name==version` and its hashes."""


def resolved(source: str, *options: str) -> Pins:
    """The requirements of `source`, by name, as uv finds them on PyPI."""
    command = (sys.executable, "-m", "uv", "pip", "compile", source, *options, "--quiet", "--no-config")
    command += ("--no-header", "--no-annotate", "--default-index", "https://pypi.org/simple")
    command += ("--only-binary", ":all:", "--python-version", PYTHON, "--python-platform", PLATFORM)
    command += ("--system-certs", "--generate-hashes", "--constraints", "constraints.txt")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    return pins(done.stdout)


def pins(text: str) -> Pins:
    """The requirements in a file, by name."""
    found: Pins = {}
    for block in re.findall(r"^[\w.-]+==.+(?:\n    --hash=.+)*", text, re.MULTILINE):
        name = block.partition("==")[0].lower().replace("_", "-").replace(".", "-")
        found[name] = [line.strip(" \\") for line in block.splitlines()]
    return found


def written(requirements: Pins) -> str:
    return HEAD + "".join(" \\\n    ".join(lines) + "\n" for _, lines in sorted(requirements.items()))


def cpu_torch(version: str) -> list[str]:
    """The requirement of torch's build for CPUs, whose wheel must be at hand."""
    folder = Path(os.environ.get("PIP_FIND_LINKS", "/opt/wheels"))
    [wheel] = folder.glob(f"torch-{version}+cpu-cp{PYTHON.replace('.', '')}-*.whl")
    return [f"torch=={version}+cpu", f"--hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"]


def main() -> None:
    engine = resolved("pyproject.toml", "--extra", "engine", "--extra", "otel")
    version = engine["torch"][0].partition("==")[2]
    cpu = {name: lines for name, lines in engine.items() if not CUDA.match(name)}
    with tempfile.NamedTemporaryFile("w", suffix=".in") as build:
        build.write("hatchling\n")
        build.flush()
        built = resolved(build.name)
    made = {
        "gateway": resolved("pyproject.toml", "--extra", "gateway", "--extra", "otel"),
        "cuda": engine,
        "cpu": {**cpu, "torch": cpu_torch(version)},
        "build": built,
    }
    for name, requirements in made.items():
        FILES[name].write_text(written(requirements))


if __name__ == "__main__":
    main()
