"""What suites fetch, kept in a folder outside the checkout: `$PENSTOCK_SUITES`, else
`~/.cache/penstock-suites`."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path


class SuiteFailed(Exception):
    """The suite cannot be fetched or run. The message says why."""


def cache_folder() -> Path:
    folder = Path(os.environ.get("PENSTOCK_SUITES") or Path.home() / ".cache/penstock-suites")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def wheel(cache: Path, name: str, version: str, sha256: str) -> Path:
    """A package's wheel from the index that pip is set up with. Raises SuiteFailed."""
    return _fetched(cache, name, version, sha256, "--only-binary=:all:", "-*.whl")


def sdist(cache: Path, name: str, version: str, sha256: str) -> Path:
    """A package's sources, which hold its tests, unpacked. Raises SuiteFailed."""
    archive = _fetched(cache, name, version, sha256, "--no-binary=:all:", ".tar.gz")
    folder = cache / archive.name.removesuffix(".tar.gz")
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=cache) as unpacked, tarfile.open(archive) as files:
            files.extractall(unpacked, filter="data")
            Path(unpacked, folder.name).rename(folder)
    return folder


def environment(cache: Path, name: str, *packages: str) -> Path:
    """The Python of a virtual environment of its own with these packages in it. Raises SuiteFailed."""
    folder = cache / f"{name}-{hashlib.sha256(' '.join(packages).encode()).hexdigest()[:12]}"
    python, whole = folder / "bin/python", folder / "whole"
    if not whole.exists():
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            subprocess.run([str(python), "-m", "pip", "install", "-qq", *packages], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SuiteFailed(f"{' '.join(packages)} cannot be installed: {error}") from error
        whole.touch()
    return python


def _fetched(cache: Path, name: str, version: str, sha256: str, kind: str, ending: str) -> Path:
    """A package's file, of the kind that an option of pip's asks for."""
    pattern = f"{name.replace('-', '_')}-{version}{ending}"
    if not any(cache.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", f"{name}=={version}"]
        try:
            subprocess.run([*command, kind, "--dest", str(cache)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SuiteFailed(f"{name} {version} cannot be fetched: {error}") from error
    [path] = cache.glob(pattern)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise SuiteFailed(f"{path} is not the file that the results are of: its SHA-256 is {found}")
    return path
