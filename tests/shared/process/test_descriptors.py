"""The descriptors that a process takes, keeps for its operators, and gives to clients."""

from __future__ import annotations

import re
import resource
import subprocess
import sys

import pytest

from shared.process import descriptors

CHILD = """
import os, resource
from shared.process import descriptors

resource.setrlimit(resource.RLIMIT_NOFILE, (32, 64))
descriptors.raise_limit()
held = []
def fill():
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return max(held) + 1
most = fill()
with descriptors.reserve():
    operators = os.open(os.devnull, os.O_RDONLY)
os.close(operators)
print(most, operators, fill(), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_all_but_a_few_are_taken_and_these_come_back_to_operators_alone() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    most = 64 - descriptors.RESERVED
    assert done.stdout.split(" ", 3) == [f"{most}", f"{most}", f"{most}", f"({most}, 64)\n"]


@pytest.mark.parametrize("connections", [1, 4_096, 16_384])
def test_what_is_asked_for_where_they_are_few_is_enough(
    monkeypatch: pytest.MonkeyPatch, connections: int
) -> None:
    [needed] = set(re.findall(r"\d+", descriptors.few(connections)))
    hard = int(needed) - descriptors.RESERVED
    monkeypatch.setattr(resource, "getrlimit", lambda _: (hard, hard))
    assert descriptors.fitting(connections) == connections


@pytest.mark.parametrize(
    ("limit", "asked", "fits"),
    [(20_736, 16_384, 16_384), (1_008, 16_384, 604), (1_008, 100, 100), (16, 100, 9), (1, 5, 1)],
)
def test_clients_have_what_engines_and_files_leave(
    monkeypatch: pytest.MonkeyPatch, limit: int, asked: int, fits: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert descriptors.fitting(asked) == fits
