"""The load generator `penstock bench serve`, before a server that this file writes."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from shared.cli import serving_load
from shared.cli.serving_load import Lengths, Load, LoadClient, Sent, ServingReport, send_all

Events = Callable[[dict[str, Any]], list[bytes]]


def load(**settings: Any) -> Load:
    usual: dict[str, Any] = {
        "endpoint": "/chat/completions",
        "model": "m",
        "prompts": 8,
        "rate": math.inf,
        "burstiness": 1.0,
        "concurrency_max": None,
        "input_len": 100,
        "output_len": 4,
        "prefix_len": 0,
        "range_ratio": 0.0,
        "seed": 0,
        "ignores_eos": False,
        "temperature": None,
        "request_s": 10.0,
    }
    return Load(**usual | settings)


def chunk(text: str = "", **fields: Any) -> bytes:
    return b"data: %s\n\n" % json.dumps({"choices": [{"delta": {"content": text}}], **fields}).encode()


def usage(prompt: int, completion: int) -> bytes:
    told = {"prompt_tokens": prompt, "completion_tokens": completion}
    return b"data: %s\n\n" % json.dumps({"choices": [], "usage": told}).encode()


def answer(body: dict[str, Any]) -> list[bytes]:
    """Counts 2 tokens a word and 7 for the frame, and answers with as many tokens as it may."""
    prompt = body.get("prompt") or body["messages"][0]["content"]
    most = body["max_tokens"]
    counted = usage(7 + 2 * len(prompt.split()), most)
    return [chunk(), *[chunk("a")] * most, counted, b"data: [DONE]\n\n"]


class Served:
    """A server: `events` makes the stream of an answer of the request's body."""

    def __init__(self, events: Events = answer, status: int = 200) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._events, self._status = events, status

    def caller(self, load: Load) -> LoadClient:
        transport = httpx.MockTransport(self._answer)
        return LoadClient(httpx.AsyncClient(transport=transport, base_url="http://s/v1"), load)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(json.loads(request.content))

        async def stream() -> AsyncIterator[bytes]:
            for event in self._events(self.bodies[-1]):
                yield event

        return httpx.Response(self._status, content=stream())


@pytest.mark.parametrize("endpoint", ["/chat/completions", "/completions"])
async def test_prompts_have_the_length_that_was_asked_for_as_the_server_counts(endpoint: str) -> None:
    served, asked = Served(), load(endpoint=endpoint, prefix_len=20)
    caller = served.caller(asked)
    lengths = await serving_load._lengths(caller, 0)
    assert lengths == Lengths(2.0, 7.0)
    sent = await send_all(caller, asked, lengths)
    assert {one.error for one in sent} == {None}
    assert all(abs(one.prompt_tokens - 120) <= 2 for one in sent)
    texts = [body.get("prompt") or body["messages"][0]["content"] for body in served.bodies[2:]]
    assert len(set(texts)) == len({text.split()[-1] + text for text in texts}) == 8
    assert len({" ".join(text.split()[:10]) for text in texts}) == 1


async def test_a_report_has_what_was_counted() -> None:
    asked = load(concurrency_max=2)
    sent = await send_all(Served().caller(asked), asked, Lengths(2.0, 7.0))
    report = ServingReport.of(sent, ("ttft", "tpot", "itl"), (99.0,))
    assert (report.completed, report.failed, report.total_output_tokens) == (8, 0, 32)
    assert report.max_concurrent_requests <= 2
    printed = dict(line.rsplit(maxsplit=1) for line in report.text(asked).splitlines() if ": " in line)
    assert printed["Successful requests:"] == "8"
    assert printed["Total generated tokens:"] == "32"
    assert float(printed["P99 TTFT (ms):"]) >= float(printed["Median TTFT (ms):"])
    assert {"mean_ttft_ms", "median_itl_ms", "p99_tpot_ms"} <= json.loads(report.record()).keys()


def test_times_are_of_tokens() -> None:
    sent = Sent(1.0, 10, 5, [1.5, 1.6, 1.8], 2.0)
    report = ServingReport.of([sent], ("ttft", "tpot", "itl", "e2el"), (50.0,))
    means = {name: spread.mean for name, spread in report.latency_ms.items()}
    assert means == pytest.approx({"ttft": 500, "tpot": 125, "itl": 150, "e2el": 1000})


@pytest.mark.parametrize(
    ("events", "status", "error"),
    [
        (lambda _: [b'{"error":{"message":"no"}}'], 429, "HTTP 429"),
        (lambda _: [chunk("a"), b'data: {"error":{"message":"full"}}\n\n'], 200, "full"),
        (lambda _: [chunk("a")], 200, "[DONE]"),
        (lambda _: [chunk(), b"data: [DONE]\n\n"], 200, "no text"),
        (lambda _: [b"data: <html>\n\n"], 200, "no chunk"),
        (lambda _: [b"x" * (serving_load.EVENT_LEN_MAX + 1)], 200, "more than"),
    ],
)
async def test_a_request_that_fails_is_told_and_not_counted(events: Events, status: int, error: str) -> None:
    asked = load(prompts=2)
    sent = await send_all(Served(events, status).caller(asked), asked, Lengths(1.0, 0.0))
    report = ServingReport.of(sent, ("ttft",), (99.0,))
    assert (report.completed, report.failed) == (0, 2)
    assert error in next(iter(report.errors))
    assert "nan" in report.text(asked)


async def test_events_are_read_however_they_are_written() -> None:
    def spelt(body: dict[str, Any]) -> list[bytes]:
        whole = b"".join(answer(body)).replace(b"\n", b"\r\n").replace(b"data: ", b"data:")
        return [b": ping\r\n\r\n", *(whole[at : at + 7] for at in range(0, len(whole), 7))]

    asked = load(prompts=1)
    (sent,) = await send_all(Served(spelt).caller(asked), asked, Lengths(2.0, 7.0))
    assert (sent.error, sent.output_tokens, len(sent.token_times)) == (None, 4, 4)
