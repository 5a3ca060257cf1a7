"""Secrets in files, which are renewed while they are in use."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from gateway.config.secret import FILE_LEN_MAX, TOKEN_LEN_MAX, RenewableSecret, read_secret
from shared.process import logs


async def test_a_file_is_read_for_each_use(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("before\n")
    secret = RenewableSecret(f"file:{path}", {})
    assert await secret.now() == "before"
    path.write_text("after\n")
    assert await secret.now() == "after"
    assert "after" not in repr(secret)


async def test_a_file_that_cannot_be_used_changes_nothing_and_is_logged_once(
    tmp_path: Path, log: io.StringIO
) -> None:
    path = tmp_path / "secret"
    path.write_text("before")

    def check(text: str) -> None:
        if text == "refused":
            raise ValueError("it is no such secret")

    secret = RenewableSecret(f"file:{path}", {}, check)
    path.unlink()
    assert [await secret.now() for _ in range(3)] == ["before"] * 3
    os.mkfifo(path)  # would be waited for, for ever
    assert await secret.now() == "before"
    path.unlink()
    for text in ("", "refused", "two words"):
        path.write_text(text)
        assert await secret.now() == "before"
    path.write_text("after")
    assert await secret.now() == "after"
    path.unlink()
    assert await secret.now() == "after"
    logs.close()
    lines = [line for line in map(json.loads, log.getvalue().splitlines()) if line["level"] == "error"]
    told = [(line["event"], line["path"], line["problem"].removeprefix(f"{path} ")) for line in lines]
    problems = [
        *("cannot be read: No such file or directory", "cannot be read: not a regular file", "is empty"),
        *("it is no such secret", "must hold one word of printable ASCII characters, 8192 at most"),
        "cannot be read: No such file or directory",
    ]
    assert told == [("secret.rejected", str(path), problem) for problem in problems]


def test_a_secret_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    assert read_secret("env:SECRET", {"SECRET": "x" * TOKEN_LEN_MAX}) is not None
    with pytest.raises(ValueError, match="must hold one word"):
        read_secret("env:SECRET", {"SECRET": "x" * (TOKEN_LEN_MAX + 1)})
    path.write_text("x" + " " * FILE_LEN_MAX)
    with pytest.raises(ValueError, match="cannot be read"):
        read_secret(f"file:{path}", {})


async def test_a_secret_of_a_variable_holds_as_long_as_the_process() -> None:
    env = {"SECRET": "before"}
    secret, none = RenewableSecret("env:SECRET", env), RenewableSecret(None, env)
    env["SECRET"] = "after"
    assert (await secret.now(), await none.now()) == ("before", None)


def test_a_secret_that_is_none_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        RenewableSecret(f"file:{tmp_path / 'missing'}", {})
