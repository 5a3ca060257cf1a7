"""How soon a client's leaving reaches the engine, through the gateway and over HTTP/2.

    python -m tests.bench.cancel [--trials 200]

Real processes on the demo model, as they come: the engine computes on every core there is, which client and
gateway share with it. One client at a time, which leaves at one of four moments:

    before headers  as soon as the request was sent, before the engine's head can be back
    silent          while its prompt is prefilled: the engine's head came, no token did
    streaming       after its first events
    unary           while its answer is computed

`told` is from the client's close to the time in the engine's completed line, which its handler writes when
the core has said what the request has cost; `KV free` to the end of the first scrape of the engine's metrics
that shows no page owned and nothing open. So it is an upper bound: by a scrape, which takes the API process
some milliseconds and is told as well, and by the time for the line to be read here, since nothing is asked of
the engine before. (Asked at once, it is busy with the question while the reset waits to be read.)

A core that is told during a step acts on it, and answers, after the step. So both may take as long as a step
more, of which p99 is told; the engine's histogram gives it to within a bucket.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.bench.figures import Figure, Target, at_most, figure, quantile, write
from tests.services import (
    KEY,
    MODEL,
    PATIENCE_S,
    Line,
    Service,
    engine,
    engine_url,
    gateway,
    gateway_url,
    until,
)

TOLD_MS, KV_FREE_MS = 10.0, 50.0
"""And a step."""
QUANTILES = (0.5, 0.95, 0.99)
PAGES = 'penstock_engine_kv_pages{state="owned"} '
OPEN = "penstock_engine_open_sequences "
STEPS = "penstock_engine_step_seconds_bucket{le="
READ_LEN = 2000
"""About ten events."""
HEADERS_MS_MAX = 4.0
"""Within it a client leaves that does not wait for the engine's head."""
PROMPT_WORDS = 1500
THREADS = str(len(os.sched_getaffinity(0)))
OPTIONS = ("--max-step-tokens", "64", "--max-num-seqs", "8", "--no-prefix-cache", "--threads", THREADS)
"""A prompt takes many steps, so that there is time to leave in."""

LINE_S_MAX = 0.02
"""Within it after the gateway's line the engine's is here, if it had heard of the request."""
LOOK_S = 0.0005
"""Between two looks at a log."""

Body = dict[str, Any]


class Metrics:
    """The engine's, as cheap to read as they can be: the reader shares its cores."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_S)
        self.scrapes_ms: list[float] = []

    def sum(self, *names: str) -> float:
        return sum(float(line.rpartition(" ")[2]) for line in self._lines(*names))

    def step_ms(self, q: float) -> float:
        """A quantile of the engine's steps, as its histogram has it: straight lines between bounds."""
        ends = [line.removeprefix(STEPS).strip('"').split('"} ') for line in self._lines(STEPS)]
        rank = q * float(ends[-1][1])
        low_s = below = 0.0
        for bound, count in ((float(bound), float(count)) for bound, count in ends):
            if count >= rank:
                return (low_s + (bound - low_s) * (rank - below) / (count - below)) * 1e3
            low_s, below = bound, count
        raise AssertionError("the last bound is infinite")

    def _lines(self, *starts: str) -> list[str]:
        began_s = time.perf_counter()
        self._connection.request("GET", "/metrics")
        text = self._connection.getresponse().read().decode()
        self.scrapes_ms.append((time.perf_counter() - began_s) * 1e3)
        return [line for line in text.splitlines() if line.startswith(starts)]


class Completed:
    """A service's completed lines, by request id; each line of its log is read once."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._read = 0
        self._lines: dict[str, Line] = {}

    def get(self, request_id: str) -> Line | None:
        lines = self._service.lines
        new, self._read = lines[self._read :], len(lines)
        self._lines |= {line["request_id"]: line for line in new if line["event"] == "request.completed"}
        return self._lines.get(request_id)


class Bench:
    def __init__(self, served: Service, front: Service) -> None:
        self._served = Completed(served)
        self._front = Completed(front)
        self._port = int(gateway_url(front).rpartition(":")[2])
        self._draw = random.Random(20)
        self._count = 0
        self.metrics = Metrics(engine_url(served))

    # -- the moments --------------------------------------------------------------------------

    def before_headers(self, _: socket.socket) -> None:
        time.sleep(self._draw.random() * HEADERS_MS_MAX / 1e3)

    def computing(self, caller: socket.socket) -> None:
        """The engine works for it, and nothing came back."""
        while not self.metrics.sum(PAGES):
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
        """Milliseconds until the engine's handler had told it, and until all was free. None when the client
        left before the engine had heard of it."""
        self._count += 1
        request_id = f"trial-{self._count}"
        with socket.create_connection(("127.0.0.1", self._port)) as caller:
            caller.settimeout(PATIENCE_S)
            caller.sendall(_request(body, request_id))
            moment(caller)
            left_s = time.time()  # before it leaves: whoever hears of it may take the core from us
        self._await_line(request_id)
        while self.metrics.sum(PAGES, OPEN):
            pass
        free_s = time.time()
        until(lambda: self._front.get(request_id) is not None)
        if moment != self.before_headers:
            until(lambda: self._served.get(request_id) is not None)
        if (line := self._served.get(request_id)) is None:
            return None
        assert line["end_reason"] == "client_cancel", line
        told_s = datetime.fromisoformat(line["ts"]).timestamp()
        return (told_s - left_s) * 1e3, (free_s - left_s) * 1e3

    def _await_line(self, request_id: str) -> None:
        """The engine's, unless it has not heard of the request."""
        until_s = math.inf
        while self._served.get(request_id) is None and time.monotonic() < until_s:
            if until_s == math.inf and self._front.get(request_id) is not None:
                until_s = time.monotonic() + LINE_S_MAX
            time.sleep(LOOK_S)


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
    done: dict[str, list[tuple[float, float]]] = {}
    for kind, (body, moment) in kinds.items():
        results = done[kind] = []
        while len(results) < trials:
            if (result := bench.trial(body, moment)) is not None:
                results.append(result)
    scrape_ms, step_ms = quantile(bench.metrics.scrapes_ms, 0.5), bench.metrics.step_ms(0.99)
    figures = []
    for kind, results in done.items():
        told, free = zip(*results, strict=True)
        figures += _figures(f"{kind}: told", told, at_most(round(TOLD_MS + step_ms)))
        figures += _figures(f"{kind}: KV free", free, at_most(round(KV_FREE_MS + step_ms)))
    figures.append(figure("cancel: the engine's step, p99", step_ms, "ms"))
    figures.append(figure("cancel: scrape of the engine's metrics, p50", scrape_ms, "ms"))
    return figures


def _figures(what: str, values: Sequence[float], target: Target) -> list[Figure]:
    """The target is that of p99."""
    targets = {0.99: target}
    return [
        figure(f"cancel {what}, p{q * 100:g}", quantile(values, q), "ms", targets.get(q)) for q in QUANTILES
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=200, metavar="N", help="of each kind (default: 200)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="c") as name:
        directory = Path(name)
        with (
            engine(directory, *OPTIONS) as served,
            gateway(directory, engine_url(served)) as front,
        ):
            write(measure(Bench(served, front), args.trials))
    return 0


if __name__ == "__main__":
    sys.exit(main())
