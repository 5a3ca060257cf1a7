"""Files that are written and read whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.files import write_all


def test_all_is_written_by_calls_that_write_a_part_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, path = os.write, tmp_path / "file"
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    monkeypatch.setattr("os.write", lambda fd, data: write(fd, data[:3]))
    write_all(file, b"0123456789")
    os.close(file)
    assert path.read_bytes() == b"0123456789"
