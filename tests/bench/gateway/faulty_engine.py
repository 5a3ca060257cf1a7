"""A paced engine that fails on demand. `GET /fault/NAME` sets how it treats new requests, over HTTP/2 alone:

    none       answers
    silence    sends the headers, and then nothing; probes and PINGs are answered
    resets     resets every stream after three events
    errors     answers 500

On SIGTERM it finishes what runs and takes nothing new, as an engine that drains. Run as `python -m
tests.bench.gateway.faulty_engine`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Final, Literal, get_args

from engine.api.http.http2_server import Http2Server, ServerRequest, ServerResponder
from engine.api.http.sniff import SniffingProtocol
from shared.process.loops import loop_factory
from shared.wire.http import ClientGone
from tests.bench.gateway.paced_engine import Http1Connection, PacedEngine, Ticker

Treatment = Literal["none", "silence", "resets", "errors"]
RESET_AFTER: Final = 3
PATH: Final = "/fault/"
DRAIN_S: Final = 10.0
POLL_S: Final = 0.05


class FaultyEngine(PacedEngine):
    """The answers, as the fault has them."""

    def __init__(self, ticker: Ticker, model_dir: Path) -> None:
        super().__init__(ticker, model_dir)
        self.treatment: Treatment = "none"

    def got(self, path: str) -> bytes:
        name = path.removeprefix(PATH)
        if path.startswith(PATH):
            self.treatment = next(known for known in get_args(Treatment) if known == name)
        return super().got(path)

    async def handle(self, request: ServerRequest, responder: ServerResponder) -> None:
        if request.method == "GET":
            await super().handle(request, responder)
            return
        match self.treatment:
            case "none":
                await super().handle(request, responder)
            case "errors":
                await responder.send(500, self.json, b'{"error": {"message": "a fault", "code": "fault"}}')
            case "silence":
                await responder.start_stream(200, self.sse)
                await asyncio.Event().wait()
            case "resets":
                await super().handle(request, _Resetting(responder))


class _Resetting(ServerResponder):
    """A responder that resets its stream after a few writes."""

    def __init__(self, responder: ServerResponder) -> None:
        super().__init__(responder._connection, responder._stream, head_only=False)
        self._left = RESET_AFTER

    async def write(self, data: bytes) -> None:
        if self._left == 0:
            self.abort()
            raise ClientGone
        self._left -= 1
        await super().write(data)


async def serve(port: int, interval_s: float, model_dir: Path) -> None:
    engine = FaultyEngine(Ticker(interval_s), model_dir)
    stopped = asyncio.Event()

    async def handle(request: ServerRequest, responder: ServerResponder) -> None:
        with contextlib.suppress(ClientGone):
            await engine.handle(request, responder)

    http2 = Http2Server(handle)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    server = await loop.create_server(
        lambda: SniffingProtocol(http2.protocol, lambda: Http1Connection(engine)),
        "127.0.0.1",
        port,
        backlog=2048,
    )
    ticking = loop.create_task(engine.ticker.run())
    await stopped.wait()
    server.close()
    http2.retire()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            while http2.streams:  # noqa: ASYNC110 -- the server tells of connections alone
                await asyncio.sleep(POLL_S)
    await http2.close()
    ticking.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--interval-ms", type=float, default=100.0, help="time between two events")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the model whose tokenizer is served")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(options.port, options.interval_ms / 1000, options.tokenizer))


if __name__ == "__main__":
    main()
