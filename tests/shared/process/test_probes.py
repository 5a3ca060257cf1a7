"""What each probe answers in each phase of a service, and the health check of the images, which asks one."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest
import trustme

from shared.process.lifecycle import Lifecycle, Phase
from shared.process.probe import main
from shared.process.probes import Health, Probe, answer_probe

WAYS = {
    "starting": (),
    "ready": (Phase.READY,),
    "draining": (Phase.READY, Phase.DRAINING),
    "stopped": (Phase.READY, Phase.DRAINING, Phase.STOPPED),
    "failed": (Phase.READY, Phase.FAILED),
    "failed at the start": (Phase.FAILED,),
}
ANSWERS = {  # livez, readyz, startupz
    "starting": (200, 503, 503),
    "ready": (200, 200, 200),
    "draining": (200, 503, 200),
    "stopped": (200, 503, 200),
    "failed": (500, 503, 503),
    "failed at the start": (500, 503, 503),
}


def health_after(*way: Phase, problems: tuple[str, ...] = ()) -> Health:
    lifecycle = Lifecycle()
    for phase in way:
        lifecycle.to(phase)
    return Health(lifecycle, lambda: list(problems))


@pytest.mark.parametrize("way", WAYS)
def test_the_answers_follow_the_phase(way: str) -> None:
    health = health_after(*WAYS[way])
    for path, expected in zip(("/livez", "/readyz", "/startupz"), ANSWERS[way], strict=True):
        status, body = answer_probe(path, health, tells_problems=True)
        probe = msgspec.json.decode(body, type=Probe)
        assert (status, probe.ok, probe.phase) == (expected, expected == 200, way.split()[0]), path


def test_a_service_with_a_problem_lives_and_takes_no_requests() -> None:
    health = health_after(Phase.READY, problems=("quota store",))
    assert answer_probe("/livez", health, tells_problems=False)[0] == 200
    assert answer_probe("/readyz", health, tells_problems=False) == (503, b'{"phase":"ready","ok":false}')
    assert answer_probe("/readyz", health, tells_problems=True) == (
        503,
        b'{"phase":"ready","ok":false,"problems":["quota store"]}',
    )


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" else 503)
        self.end_headers()
        self.wfile.write(b'{"phase":"draining"}')

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_yes(url: str) -> None:
    assert main([f"{url}/readyz"], {}) == 0
    assert main([], {"PENSTOCK_PROBE_URL": f"{url}/readyz", "RANK": "0"}) == 0


def test_a_no_is_told(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{url}/livez"], {}) == 1
    assert capsys.readouterr().err == f'{url}/livez: 503 {{"phase":"draining"}}\n'


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["http://127.0.0.1:1/readyz"], {}) == 1
    assert "Connection refused" in capsys.readouterr().err


def test_a_certificate_for_another_name_is_none_of_its_business() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("gateway.test").configure_cert(context)
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        assert main([f"https://127.0.0.1:{server.server_port}/readyz"], {}) == 0
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("url", ["", "https://example.com/readyz", "http://example.com/readyz"])
def test_only_this_machine_is_asked(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([url], {}) == 1
    assert "PENSTOCK_PROBE_URL: must be an http or https URL of this machine" in capsys.readouterr().err


def test_a_rank_that_serves_nothing() -> None:
    assert main([], {"RANK": "3"}) == 0
