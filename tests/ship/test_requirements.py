"""The images' requirements: pinned as constraints.txt says, by hash, and all that the services ask for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from helm.make.requirements import FILES, Pins, pins

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CUDA = ("cuda-", "nvidia-")
"""Packages whose versions torch itself fixes."""


def of_constraints() -> dict[str, str]:
    lines = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in lines}


def required(name: str) -> Pins:
    return pins(FILES[name].read_text())


@pytest.mark.parametrize("name", FILES)
def test_every_version_is_that_of_the_constraints_and_has_a_hash(name: str) -> None:
    constraints = of_constraints()
    for package, (pin, *hashes) in required(name).items():
        version = pin.partition("==")[2].removesuffix("+cpu")
        if not package.startswith(CUDA):
            assert constraints[package] == version, f"run `python -m helm.make.requirements`: {package}"
        assert hashes
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes)
    lines = [line for line in FILES[name].read_text().splitlines() if line[0] not in "# "]
    assert len(lines) == len(required(name)), "a line is no pinned requirement"


@pytest.mark.parametrize(
    ("name", "extra"), [("gateway", "gateway"), ("cpu", "engine"), ("cuda", "engine"), ("build", None)]
)
def test_everything_that_is_asked_for_is_there(name: str, extra: str | None) -> None:
    extras = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"], *extras[extra], *extras["otel"]] if extra else ["hatchling"]
    names = {re.split(r"[\[<>=;]", one)[0].lower().replace("_", "-") for one in asked}
    assert names <= required(name).keys()


def test_no_image_has_what_it_does_not_need() -> None:
    for name in ("gateway", "build"):
        assert not required(name).keys() & {"torch", "triton", "numpy", "pyzmq", "safetensors"}
    assert not [package for package in required("cpu") if package.startswith((*CUDA, "triton"))]
    assert required("cpu")["torch"][0].endswith("+cpu")
    assert [package for package in required("cuda") if package.startswith(CUDA)]
    without = {package for package in required("cuda") if not package.startswith((*CUDA, "triton"))}
    assert without == required("cpu").keys()
