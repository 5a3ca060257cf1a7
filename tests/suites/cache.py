"""What suites fetch, kept in a folder outside the checkout: `$PENSTOCK_SUITES`, else
`~/.cache/penstock-suites`."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path


class SuiteFailed(Exception):
    """The suite cannot be fetched or run. The message says why."""


def cache_folder() -> Path:
    folder = Path(os.environ.get("PENSTOCK_SUITES") or Path.home() / ".cache/penstock-suites")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def wheel(cache: Path, name: str, version: str, sha256: str) -> Path:
    """A package's wheel from the index that pip is set up with. Raises SuiteFailed."""
    stem = f"{name.replace('-', '_')}-{version}-"
    if not any(cache.glob(f"{stem}*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"{name}=={version}"]
        try:
            subprocess.run([*command, "--only-binary=:all:", "--dest", str(cache)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SuiteFailed(f"{name} {version} cannot be fetched: {error}") from error
    [path] = cache.glob(f"{stem}*.whl")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise SuiteFailed(f"{path} is not the file that the results are of: its SHA-256 is {found}")
    return path
