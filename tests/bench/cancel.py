"""How soon a client's leaving reaches the engine, through the gateway and over HTTP/2.

    python -m tests.bench.cancel [--trials 50]

Real processes on the demo model, one client at a time, which leaves at one of four moments:

    before headers  as soon as the request was sent, before the engine's head can be back
    silent          while its prompt is prefilled: the engine's head came, no token did
    streaming       after its first events
    unary           while its answer is computed

`knows` is from the client's close to the engine's completed line, which its handler writes when it has
told the core; `KV free` to the first scrape of the engine's metrics that shows no page owned and nothing
open: an upper bound, by a scrape's own time, which is told as well.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from shared.bench.figures import Figure, at_most, figure, quantile, write
from tests.services import (
    KEY,
    MODEL,
    PATIENCE_S,
    Line,
    Service,
    client,
    engine,
    engine_url,
    gateway,
    gateway_url,
    until,
)

KNOWS_MS = at_most(10)
KV_FREE_MS = at_most(50)
PAGES = 'penstock_engine_kv_pages{state="owned"} '
OPEN = "penstock_engine_open_sequences "
READ_LEN = 2000
"""About ten events."""
HEADERS_MS_MAX = 4.0
"""Within it a client leaves that does not wait for the engine's head."""
PROMPT_WORDS = 1500
OPTIONS = ("--max-step-tokens", "64", "--max-num-seqs", "8", "--no-prefix-cache")
"""A prompt takes many steps, so that there is time to leave in."""

Body = dict[str, Any]


class Bench:
    def __init__(self, served: Service, front: Service, metrics: httpx.Client) -> None:
        self._served = served
        self._front = front
        self._metrics = metrics
        self._port = int(gateway_url(front).rpartition(":")[2])
        self._draw = random.Random(20)
        self._count = 0
        self.scrapes_ms: list[float] = []

    # -- the moments --------------------------------------------------------------------------

    def before_headers(self, _: socket.socket) -> None:
        time.sleep(self._draw.random() * HEADERS_MS_MAX / 1e3)

    def computing(self, caller: socket.socket) -> None:
        """The engine works for it, and nothing came back."""
        while not self._told(PAGES):
            pass  # the next scrape is the wait
        caller.setblocking(False)
        try:
            raise AssertionError(f"it has answered: {caller.recv(100)!r}")
        except BlockingIOError:
            pass

    def streaming(self, caller: socket.socket) -> None:
        read = 0
        while read < READ_LEN:
            read += len(caller.recv(1 << 16))

    # -- a trial ------------------------------------------------------------------------------

    def trial(self, body: Body, moment: Callable[[socket.socket], None]) -> tuple[float, float] | None:
        """Milliseconds until the engine's handler knew and until all was free. None when the client left
        before the engine had heard of it."""
        self._count += 1
        request_id = f"trial-{self._count}"
        with socket.create_connection(("127.0.0.1", self._port)) as caller:
            caller.settimeout(PATIENCE_S)
            caller.sendall(_request(body, request_id))
            moment(caller)
            left_s = time.time()
        while self._told(PAGES, OPEN):
            pass
        free_s = time.time()
        until(lambda: _line(self._front, request_id) is not None)
        if moment != self.before_headers:
            until(lambda: _line(self._served, request_id) is not None)
        if (line := _line(self._served, request_id)) is None:
            return None
        assert line["end_reason"] == "client_gone", line
        knew_s = datetime.fromisoformat(line["ts"]).timestamp()
        return (knew_s - left_s) * 1e3, (free_s - left_s) * 1e3

    def _told(self, *gauges: str) -> float:
        """Their sum, as the engine tells."""
        began_s = time.perf_counter()
        text = self._metrics.get("/metrics").text
        self.scrapes_ms.append((time.perf_counter() - began_s) * 1e3)
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(gauges))


def _line(service: Service, request_id: str) -> Line | None:
    return next((line for line in service.completed if line["request_id"] == request_id), None)


def _request(body: Body, request_id: str) -> bytes:
    content = json.dumps({"model": MODEL, "ignore_eos": True, **body}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        f"x-request-id: {request_id}\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def _says(text: str) -> list[Body]:
    return [{"role": "user", "content": text}]


def measure(bench: Bench, trials: int) -> list[Figure]:
    short, long = _says("Go on."), _says("word " * PROMPT_WORDS)
    kinds: dict[str, tuple[Body, Callable[[socket.socket], None]]] = {
        "silent": ({"messages": long, "stream": True, "max_tokens": 100}, bench.computing),
        "streaming": ({"messages": short, "stream": True, "max_tokens": 1900}, bench.streaming),
        "unary": ({"messages": short, "max_tokens": 1900}, bench.computing),
        # the last, because such a request may reach the core when its trial is over
        "before headers": ({"messages": long, "stream": True, "max_tokens": 100}, bench.before_headers),
    }
    figures = []
    for kind, (body, moment) in kinds.items():
        done: list[tuple[float, float]] = []
        while len(done) < trials:
            if (result := bench.trial(body, moment)) is not None:
                done.append(result)
        for index, what, target in ((0, "knows", KNOWS_MS), (1, "KV free", KV_FREE_MS)):
            values = [result[index] for result in done]
            figures.append(figure(f"cancel {kind}: {what}, p50", quantile(values, 0.5), "ms"))
            figures.append(figure(f"cancel {kind}: {what}, p99", quantile(values, 0.99), "ms", target))
    figures.append(figure("scrape of the engine's metrics, p50", quantile(bench.scrapes_ms, 0.5), "ms"))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=50, metavar="N", help="of each kind (default: 50)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="c") as name:
        directory = Path(name)
        with (
            engine(directory, *OPTIONS) as served,
            gateway(directory, engine_url(served)) as front,
            client(served) as metrics,
        ):
            write(measure(Bench(served, front, metrics), args.trials))
    return 0


if __name__ == "__main__":
    sys.exit(main())
