"""The services as their operators have them: processes, their logs, signals, metrics.

Waits are for conditions and bounded; nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from gateway.identity.keys import hash_key
from shared.wire.completed_line import EVENT
from tests.line_check import schema_problem, unnamed_time
from tests.waiting import PATIENCE_S as PATIENCE_S

ROOT = Path(__file__).parent.parent
MODEL_DIR = ROOT / "engine" / "demo" / "model"
MODEL = "model"
"""What an engine calls it: the last part of its directory."""
KEY = "dev-key"

Line = dict[str, Any]


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    pause_s = 0.01
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never came"
        time.sleep(pause_s)  # between two looks at another process; nothing depends on its length
        pause_s = min(1.2 * pause_s, 0.05)  # a look costs both processes some ms


class Service:
    """One process, and the lines that it logs."""

    def __init__(self, argv: list[str], **environment: str) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by `end`
        self._read_len = 0
        self._lines: list[Line] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", *argv],
            cwd=ROOT,
            env={**os.environ, **environment},
            stderr=self._log,
            process_group=0,  # as a shell starts a job
        )

    @property
    def lines(self) -> list[Line]:
        """All so far."""
        written = os.pread(self._log.fileno(), 1 << 30, self._read_len)
        whole = written[: written.rfind(b"\n") + 1]
        self._read_len += len(whole)
        new = [json.loads(line) for line in whole.splitlines() if line.startswith(b"{")]
        for line in new:
            if line["event"] == EVENT:
                assert (schema_problem(line) or unnamed_time(line)) is None, line
        self._lines += new
        return self._lines

    @property
    def text(self) -> str:
        """All that it and its children have written to standard error, lines of the log or not."""
        return os.pread(self._log.fileno(), 1 << 30, 0).decode()

    def logged(self, event: str) -> list[Line]:
        return [line for line in self.lines if line["event"] == event]

    def line(self, event: str) -> Line:
        """The first with this event, once it is there."""
        until(lambda: bool(self.logged(event)) or self.process.poll() is not None)
        assert self.logged(event), f"no {event} among {self.lines}"
        return self.logged(event)[0]

    @property
    def completed(self) -> list[Line]:
        """The lines of requests that came to their end."""
        return self.logged(EVENT)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()


@contextmanager
def service(argv: list[str], **environment: str) -> Iterator[Service]:
    started = Service(argv, **environment)
    try:
        yield started
    finally:
        started.end()


@contextmanager
def engine(directory: Path, *options: str, model: str = str(MODEL_DIR)) -> Iterator[Service]:
    """`directory`: for its sockets, so of a short name."""
    argv = ["engine", "serve", "--model", model, "--port", "0", "--threads", "1", *options]
    with service(argv, TMPDIR=str(directory)) as started:
        yield started


def engine_url(engine: Service) -> str:
    """Once it is ready."""
    return f"http://127.0.0.1:{engine.line('engine.ready')['port']}"


@contextmanager
def client(engine: Service) -> Iterator[httpx.Client]:
    """Of the engine itself, once it is ready."""
    with httpx.Client(base_url=engine_url(engine), timeout=PATIENCE_S) as http:
        yield http


CONFIG = """
[listen]
port = 0
[admin]
port = 0
[[models]]
name = "{model}"
replicas = ["{url}"]
[[tenants]]
id = "acme"
{tenant}
[[keys]]
id = "k1"
hash = "{hash}"
tenant = "acme"
"""


@contextmanager
def gateway(directory: Path, engine_url: str, tenant: str = "", **environment: str) -> Iterator[Service]:
    """`tenant`: more of its settings, as TOML."""
    file = directory / "gateway.toml"
    file.write_text(CONFIG.format(model=MODEL, url=engine_url, tenant=tenant, hash=hash_key(KEY)))
    with service(["gateway", "--config", str(file)], **environment) as started:
        yield started


def gateway_url(gateway: Service) -> str:
    """Once it listens and knows its engine's tokenizer."""
    gateway.line("tokenizer.loaded")
    return f"http://127.0.0.1:{gateway.line('gateway.listening')['port']}"


def admin_url(gateway: Service) -> str:
    return f"http://127.0.0.1:{gateway.line('gateway.listening')['admin_port']}"


def gauges(url: str | httpx.URL) -> dict[str, float]:
    """What `/metrics` says, without histograms: `queue_depth`, `kv_pages:owned`, ..."""
    page = f"{str(url).rstrip('/')}/metrics"
    text = httpx.get(page, timeout=PATIENCE_S, trust_env=False, verify=_TRUSTS_NOBODY).text
    return {
        ":".join((_short(sample.name), *sample.labels.values())): sample.value
        for family in text_string_to_metric_families("\n".join(_values(text)))
        for sample in family.samples
    }


_TRUSTS_NOBODY: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Of no use over plain HTTP, and httpx would make one for each call."""


def _values(text: str) -> Iterator[str]:
    """The lines of a page that `gauges` is about: most others are buckets, and each takes a parser long."""
    return (line for line in text.splitlines() if line[:1] != "#" and "bucket" not in line.partition("{")[0])


def _short(name: str) -> str:
    return name.removeprefix("penstock_engine_").removeprefix("penstock_gateway_").removesuffix("_total")


def engine_at_rest(url: str) -> bool:
    """It holds nothing for anybody."""
    now = gauges(url)
    held = ("running_sequences", "queue_depth", "open_sequences", "kv_pages:owned", "http2_streams")
    return not any(now[name] for name in held)


def gateway_at_rest(url: str) -> bool:
    """`url`: the admin listener's."""
    now = gauges(url)
    reserved, overdrawn, settled, released = (
        now.get(f"quota_tokens:{kind}", 0.0) for kind in ("reserved", "overdrawn", "settled", "released")
    )
    balanced = reserved + overdrawn == settled + released
    return balanced and not now["requests_in_flight"] and not now["http2_streams"]


def stop(service: Service) -> None:
    """As an orchestrator does; it must go by itself."""
    service.signal(signal.SIGTERM)
    assert service.wait() == 0
