"""constraints.txt on a machine that has nothing yet: all comes from PyPI, torch's CUDA build included.

The machine at hand proves little. A wheel that lies about on it, such as a build of torch for CPUs, has other
requirements than PyPI's and hides what contradicts those. So uv resolves as such a machine would, for Linux
on x86-64, from metadata alone.

Which Pythons count is said by pyproject.toml's classifiers. A new one is added there when all that is pinned
has wheels for it, torch last of all; until then nothing is promised for it and nothing fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.network]

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
CLASSIFIER = "Programming Language :: Python :: "
PYTHONS = [
    line.removeprefix(CLASSIFIER)
    for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    if line.startswith(CLASSIFIER)
]
PLATFORM = "x86_64-manylinux_2_31"
"""The oldest that all wheels run on: torch's do from 2.28, llguidance's from 2.31."""
CUDA = ("cuda-", "nvidia-")
"""Packages whose versions torch itself fixes."""
RESOLVE = (
    *(sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--extra", "dev", "--quiet"),
    *("--no-config", "--no-header", "--no-annotate", "--default-index", "https://pypi.org/simple"),
    *("--only-binary", ":all:", "--python", sys.executable, "--python-platform", PLATFORM, "--system-certs"),
)


def resolve(python: str, constraints: Path = CONSTRAINTS) -> subprocess.CompletedProcess[str]:
    """uv's answer for one version of Python: requirements on stdout, or on stderr why there are none."""
    # tests/conftest.py made the one authority that the variable names; a machine's own settings are not bare.
    environment = {k: v for k, v in os.environ.items() if k != "SSL_CERT_FILE" and not k.startswith("UV_")}
    command = (*RESOLVE, "--python-version", python, "--constraints", str(constraints))
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def pins(requirements: str) -> set[str]:
    """Lines `name==version`, names normalised."""
    found = re.findall(r"^([\w.-]+)==(\S+)", requirements, re.MULTILINE)
    return {f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}" for name, version in found}


@pytest.mark.parametrize("python", PYTHONS)
def test_all_that_is_installed_resolves_and_is_pinned(python: str) -> None:
    done = resolve(python)
    assert done.returncode == 0, done.stderr
    loose = {pin for pin in pins(done.stdout) - pins(CONSTRAINTS.read_text()) if not pin.startswith(CUDA)}
    assert not loose, "these depend on the day of the installation"


def test_a_triton_that_torch_does_not_want_is_a_conflict(tmp_path: Path) -> None:
    wrong = tmp_path / "constraints.txt"
    wrong.write_text(re.sub(r"^triton==.*", "triton==3.9.0", CONSTRAINTS.read_text(), flags=re.MULTILINE))
    done = resolve(PYTHONS[0], wrong)
    assert done.returncode == 1
    assert re.search(r"torch==\S+ depends on triton", done.stderr), done.stderr
