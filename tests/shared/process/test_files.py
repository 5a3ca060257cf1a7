"""Files that are written and read whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.process.files import read_bytes, read_text, write_all


def test_all_is_written_by_calls_that_write_a_part_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, path = os.write, tmp_path / "file"
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    monkeypatch.setattr("os.write", lambda fd, data: write(fd, data[:3]))
    write_all(file, b"0123456789")
    os.close(file)
    assert path.read_bytes() == b"0123456789"


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\r\ntwo\xc3\xa9")
    assert read_bytes(path, 10) == path.read_bytes()
    assert read_text(path, 10) == path.read_text("utf-8") == "one\ntwo\u00e9"
    with pytest.raises(OSError, match="larger than 9 bytes"):
        read_bytes(path, 9)


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        read_bytes(tmp_path / "fifo", 9)
