"""The services as processes run on uvloop where it can be imported, and serve as well where it cannot.

The loop is the one that the line names with which a service says that it is ready; and libraries that are
mapped into the process are not to be argued with.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.services import ROOT, Service, engine, gateway, stop

pytestmark = pytest.mark.slow

WITHOUT = 'raise ImportError("not here")'


@pytest.fixture(params=["uvloop", "asyncio"])
def loop(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one that services started meanwhile are to have."""
    if request.param == "asyncio":
        (tmp_path / "uvloop.py").write_text(WITHOUT)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return str(request.param)


def assert_runs_on(loop: str, service: Service, ready: str) -> None:
    line = service.line(ready)
    assert line["loop"] == loop
    maps = Path(f"/proc/{service.process.pid}/maps").read_text()
    assert ("/uvloop/" in maps) == (loop == "uvloop")
    url = f"http://127.0.0.1:{line['port']}/readyz"
    assert httpx.get(url, trust_env=False).status_code == 200
    stop(service)


def test_the_engine_runs_on_the_chosen_loop(short_tmp: Path, loop: str) -> None:
    with engine(short_tmp) as process:
        assert_runs_on(loop, process, "engine.ready")


def test_the_gateway_runs_on_the_chosen_loop(tmp_path: Path, loop: str) -> None:
    with gateway(tmp_path, "http://127.0.0.1:1") as process:
        assert_runs_on(loop, process, "gateway.listening")
