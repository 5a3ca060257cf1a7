"""The address and the key with which the commands ask a gateway's admin listener."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.cli import admin, running
from shared.cli.running import Running

HERE = Running("http://127.0.0.1:1/v1", "sk", "demo", 1, admin_url="http://127.0.0.1:5", admin_key="own")
Asked = list[tuple[str, str | None]]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The addresses that were asked, with the key of each. No `penstock up` runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(admin.KEY_VARIABLE, raising=False)
    monkeypatch.delenv(admin.URL_VARIABLE, raising=False)
    seen: Asked = []

    def get(url: str, headers: dict[str, str], **_: Any) -> httpx.Response:
        seen.append((url, headers.get("authorization")))
        return httpx.Response(200, content=b"1")

    monkeypatch.setattr(httpx, "get", get)
    return seen


def ask(*arguments: str) -> None:
    parser = argparse.ArgumentParser()
    admin.add_option(parser)
    assert admin.ask(parser.parse_args(arguments).admin_url, "/x", int, {}) == 1


def test_without_a_word_the_port_of_a_gateway_is_asked(asked: Asked) -> None:
    ask()
    assert asked == [("http://127.0.0.1:9090/admin/v1/x", None)]


def test_the_penstock_up_that_runs_is_asked_with_its_own_key(asked: Asked) -> None:
    running.write_running(HERE)
    ask()
    assert asked == [("http://127.0.0.1:5/admin/v1/x", "Bearer own")]


def test_its_key_goes_to_no_other_address(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    running.write_running(HERE)
    ask("--admin-url", "http://elsewhere")
    monkeypatch.setenv(admin.URL_VARIABLE, "http://another")
    ask()
    assert asked == [("http://elsewhere/admin/v1/x", None), ("http://another/admin/v1/x", None)]


def test_a_key_of_the_environment_goes_before_that_of_penstock_up(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.write_running(HERE)
    monkeypatch.setenv(admin.KEY_VARIABLE, "mine")
    ask()
    assert asked == [("http://127.0.0.1:5/admin/v1/x", "Bearer mine")]
