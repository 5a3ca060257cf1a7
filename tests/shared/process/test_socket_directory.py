from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

import pytest

from shared.process.socket_directory import SocketDirectory, remove_abandoned

PREFIX = "penstock-core-"


@pytest.fixture(autouse=True)
def temporary(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(short_tmp))
    return short_tmp


def abandoned(directory: Path, name: str = "left", mode: int = 0o700) -> Path:
    """What a service leaves that was killed: its sockets, which nobody holds."""
    path = directory / f"{PREFIX}{name}"
    path.mkdir()
    for name in ("in", "out"):
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path / name))
    path.chmod(mode)
    return path


def test_it_is_private_and_goes_with_its_service(temporary: Path) -> None:
    directory = SocketDirectory.make(PREFIX)
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert directory.endpoint("in") == f"ipc://{directory.path}/in"
    directory.remove()
    assert list(temporary.iterdir()) == []


def test_the_next_start_removes_what_a_killed_service_left(temporary: Path) -> None:
    left, fresh = abandoned(temporary), temporary / f"{PREFIX}fresh"
    fresh.mkdir(mode=0o700)  # killed before it had made its sockets
    directory = SocketDirectory.make(PREFIX)
    assert list(temporary.iterdir()) == [directory.path]
    assert not left.exists()


def test_one_that_is_in_use_stays(temporary: Path) -> None:
    used = SocketDirectory.make(PREFIX)
    SocketDirectory.make(PREFIX).remove()
    assert used.path.exists()


def test_nothing_goes_that_is_not_certainly_ours(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    abandoned(temporary, mode=0o755)
    kept = abandoned(temporary, "kept")
    (kept / "notes").write_text("by hand")
    (temporary / "penstock-up-x").mkdir(mode=0o700)
    (temporary / f"{PREFIX}file").write_text("")
    elsewhere = temporary / "elsewhere"
    abandoned(temporary, "there").rename(elsewhere)
    (temporary / f"{PREFIX}link").symlink_to(elsewhere)
    remove_abandoned(temporary, PREFIX)
    assert len(list(temporary.iterdir())) == 6
    assert (kept / "notes").exists()
    assert sorted(os.listdir(elsewhere)) == ["in", "out"]

    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    theirs = abandoned(temporary, "theirs")
    remove_abandoned(temporary, PREFIX)
    assert theirs.exists()


def test_one_that_another_start_removes_before_it_is_locked_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    taken: list[Path] = []

    def after_another_start(descriptor: int, how: int) -> None:
        if not taken:
            taken.extend(temporary.iterdir())
            taken[0].rmdir()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", after_another_start)
    directory = SocketDirectory.make(PREFIX)
    assert directory.path.exists()
    assert directory.path != taken[0]
    directory.remove()


def test_a_temporary_directory_that_is_too_deep_for_sockets_is_named(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = temporary / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(OSError, match=f"set TMPDIR to a shorter directory: '{deep}'"):
        SocketDirectory.make(PREFIX)
    assert list(deep.iterdir()) == []


def test_a_directory_that_other_processes_cannot_be_told_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / os.fsdecode(b"m\xe9")
    odd.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(odd))
    with pytest.raises(OSError, match=r"not UTF-8, .*set TMPDIR to another directory"):
        SocketDirectory.make(PREFIX)
    assert list(odd.iterdir()) == []
