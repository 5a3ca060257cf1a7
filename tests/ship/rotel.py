"""A real OTLP receiver: rotel takes the trace of one request from `penstock up`, both services' spans in it.

    pip install rotel                       # in any environment
    python -m tests.ship.rotel AGENT        # its program: .../site-packages/rotel/rotel-agent

It is run by hand and by tests/ship/run.sh, and is no part of the tests: rotel is a program of 30 MB. It
receives the spans by OTLP over HTTP and sends them on, to a decoder here, so what is looked at has been read
and written again by rotel.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from tests.bench.services import free_port
from tests.span_sink import Collector

PATIENCE_S: Final = 120.0
KEY: Final = "sk-rotel"
TRACE_ID: Final = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER: Final = "00f067aa0ba902b7"
HEADERS: Final = {"authorization": f"Bearer {KEY}", "traceparent": f"00-{TRACE_ID}-{CALLER}-01"}
BODY: Final = {"messages": [{"role": "user", "content": "What is a penstock?"}], "max_tokens": 24}


@contextmanager
def collector() -> Iterator[Collector]:
    """A decoder of OTLP behind rotel."""
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def process(argv: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended with its children, and killed where it does not end."""
    with log.open("wb") as out:
        started = subprocess.Popen(argv, stdout=out, stderr=out, env={**os.environ, **environment})
        try:
            yield started
        finally:
            started.terminate()
            try:
                started.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                started.kill()


def until(log: Path, pattern: str, started: subprocess.Popen[bytes]) -> re.Match[str]:
    """The first match in a log, once it is there."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and started.poll() is None:
        if (found := re.search(pattern, log.read_text(errors="replace"))) is not None:
            return found
        time.sleep(0.1)
    raise SystemExit(f"{pattern!r} is not in {log}:\n{log.read_text(errors='replace')[-2000:]}")


def traced(agent: str, directory: Path) -> tuple[list[tuple[str, Any]], str]:
    """The spans that came through rotel, with their services, and rotel's log."""
    with ExitStack() as stack:
        behind = stack.enter_context(collector())
        port, log = free_port(), directory / "rotel.log"
        argv = [agent, "start", "--otlp-http-endpoint", f"127.0.0.1:{port}"]
        argv += ["--otlp-grpc-endpoint", f"127.0.0.1:{free_port()}", "--debug-log", "traces"]
        argv += ["--exporter", "otlp", "--otlp-exporter-endpoint", behind.url.removesuffix("/v1/traces")]
        argv += ["--otlp-exporter-protocol", "http", "--otlp-exporter-compression", "none"]
        stack.enter_context(process(argv, log))
        up_log = directory / "up.log"
        up = [sys.executable, "-m", "shared.cli", "up", "--port", "0", "--api-key", KEY]
        up += ["--data-dir", str(directory)]
        endpoint = f"http://127.0.0.1:{port}/v1/traces"
        with process(up, up_log, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=endpoint) as started:
            url = until(up_log, r"http://127\.0\.0\.1:\d+/v1", started)[0]
            answer = httpx.get(f"{url}/models", headers=HEADERS | {"traceparent": ""}, timeout=PATIENCE_S)
            body = {**BODY, "model": answer.json()["data"][0]["id"]}
            httpx.post(
                f"{url}/chat/completions", json=body, headers=HEADERS, timeout=PATIENCE_S
            ).raise_for_status()
        deadline = time.monotonic() + PATIENCE_S
        while not complete(spans := spans_of(behind)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return spans, log.read_text(errors="replace")


def spans_of(behind: Collector) -> list[tuple[str, Any]]:
    """The decoded spans of the trace, each with the name of its service."""
    return [
        (attribute.value.string_value, span)
        for request in list(behind.requests)
        for resource in request.resource_spans
        for attribute in resource.resource.attributes
        if attribute.key == "service.name"
        for scope in resource.scope_spans
        for span in scope.spans
        if span.trace_id.hex() == TRACE_ID
    ]


def complete(spans: list[tuple[str, Any]]) -> bool:
    """True if both services' requests are there."""
    return {"penstock-gateway", "penstock-engine"} <= {service for service, span in spans if span.kind == 2}


def check(spans: list[tuple[str, Any]]) -> None:
    """Hold the tree against what it must be: caller > gateway > engine, and stages below each."""
    assert complete(spans), f"only {spans}"
    [gateway] = [span for service, span in spans if service == "penstock-gateway" and span.kind == 2]
    [engine] = [span for service, span in spans if service == "penstock-engine" and span.kind == 2]
    assert gateway.parent_span_id.hex() == CALLER
    assert engine.parent_span_id == gateway.span_id
    assert gateway.name == engine.name, f"{gateway.name} and {engine.name}"
    for name, parent in (("penstock-gateway", gateway), ("penstock-engine", engine)):
        stages = [span for service, span in spans if service == name and span.kind != 2]
        assert stages, f"{name} has no stages"
        assert all(span.parent_span_id == parent.span_id for span in stages)
    names = {span.name for service, span in spans if service == "penstock-engine"}
    assert {"prefill", "decode"} <= names, names


def main(agent: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        spans, log = traced(agent, Path(directory))
    check(spans)
    assert "ResourceSpans" in log or "penstock-engine" in log or "traces" in log.lower(), log[-2000:]
    for service, span in sorted(spans, key=lambda one: (one[1].start_time_unix_nano, one[1].kind != 2)):
        took_ms = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
        sys.stdout.write(f"{service:<18}{'' if span.kind == 2 else '  '}{span.name:<24}{took_ms:>10.3f} ms\n")
    sys.stdout.write(f"{len(spans)} spans of both services came through rotel, parents right\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
