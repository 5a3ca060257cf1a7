"""`penstock up` of this checkout on the demo model, as a stranger starts it, for suites of clients."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.suites.cache import SuiteFailed

ROOT: Final = Path(__file__).parents[2]
KEY: Final = "My API Key"
"""The key that the tests of OpenAI's SDK send."""
MODEL: Final = "demo"
ENDING_S: Final = 60.0
"""The time in which `penstock up` must stop once asked to, in seconds."""


@dataclass(frozen=True, slots=True)
class Served:
    """Where it is served, and with which key."""

    url: str
    key: str

    @property
    def root(self) -> str:
        """The base URL of clients of Anthropic's API, who add the version themselves."""
        return self.url.removesuffix("/v1")

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which clients of OpenAI's API find it."""
        return {**os.environ, "OPENAI_BASE_URL": self.url, "OPENAI_API_KEY": self.key, "NO_PROXY": "*"}


@contextmanager
def up(key: str = KEY, **environment: str) -> Iterator[Served]:
    """Served under its own name and under any other, with these variables. Raises SuiteFailed."""
    with tempfile.TemporaryDirectory() as logs:
        argv = [sys.executable, "-m", "shared.cli", "up", "--port", "0", "--api-key", key, "--alias", "*"]
        process = subprocess.Popen(
            [*argv, "--data-dir", logs],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield Served(_base_url(process), key)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=ENDING_S)


def _base_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if line.startswith("In another terminal"):
            break
    found = re.search(r"Base URL\s+(\S+)", printed)
    if found is None:
        raise SuiteFailed(f"penstock up did not start: {printed}")
    return found[1]
