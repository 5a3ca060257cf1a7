"""What is made once in a run is made by one process, and read by the others."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.once import once


@pytest.mark.parametrize("is_shared", [False, True])
def test_one_makes_it_and_the_others_read_it(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_shared: bool,
) -> None:
    """Of a process beside others it lies where all of them look."""
    base = tmp_path / "run" / "gw0"
    base.mkdir(parents=True)
    monkeypatch.setattr(tmp_path_factory, "_basetemp", base)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    if is_shared:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    made: list[int] = []

    def make() -> str:
        made.append(os.getpid())
        return f"made {len(made)}"

    with ThreadPoolExecutor(4) as threads:
        said = list(threads.map(lambda _: once(tmp_path_factory, "it", make), range(4)))
    assert said == ["made 1"] * 4
    assert ((base.parent if is_shared else base) / "it.once").read_text() == "made 1"


def test_after_one_that_raises_the_next_makes_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    def fail() -> str:
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        once(tmp_path_factory, "what one could not make", fail)
    assert once(tmp_path_factory, "what one could not make", lambda: "made") == "made"
