"""What becomes of a request, for each way in which an engine of another make may answer: one table.

A cell is an answer, and what it has to lead to: the status, code and words that the caller gets, what is
charged, and the outcome of each attempt for the replica that was asked. One server stands in for two
replicas, and answers with the cell's bytes.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from unittest import mock

import aiohttp
import msgspec
import pytest
from msgspec import Struct

from gateway.app import Gateway
from gateway.config.whole import load
from gateway.discovery import foreign_loads
from gateway.relay import http1
from gateway.relay.foreign import NAME_LEN_MAX, USAGE_LEN_MAX, UsageFinder
from gateway.relay.stream import HEAD_LEN_MAX
from gateway.request import pipeline
from gateway.routing.health import ROW_MAX, HealthPhase, Outcome, ReplicaHealth
from gateway.routing.replicas import Placement
from tests.gateway.conftest import KEY, OTHER_KEY, settings, until
from tests.gateway.fake_engine import FakeEngine, Script, Seen

MODEL: Final = "theirs"
USED: Final = 10
"""The tokens that the answers say they took."""
USAGE: Final = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": USED}
JSON: Final = "application/json"
SSE: Final = "text/event-stream"
HTML: Final = "<html><head><title>nginx</title></head><body>nginx</body></html>"


class Reply(Struct, frozen=True):
    status: int = 200
    body: bytes = b""
    type: str | None = JSON
    headers: Mapping[str, str] = {}
    pieces: int = 0
    """Bytes of each chunk of the body. 0: it has a length."""


class Made(Struct, frozen=True):
    """What a cell has to lead to."""

    status: int
    code: str = ""
    outcomes: tuple[Outcome, ...] = (Outcome.NEUTRAL,)
    """One for each attempt."""
    charged: int | None = 0
    """None: what was reserved."""
    words: str | None = None
    """The message. None: one of ours."""
    after: str | None = None
    """The `Retry-After`."""


def mistake(status: int = 400, code: str = "invalid_value", words: str | None = None) -> Made:
    return Made(status, code, words=words)


def twice(
    outcome: Outcome, status: int = 502, code: str = "upstream_failed", charged: int | None = 0
) -> Made:
    return Made(status, code, (outcome, outcome), charged)


FAILED: Final = twice(Outcome.FAILED)
DEFERRED: Final = twice(Outcome.NEUTRAL)
REFUSED: Final = Made(502, "upstream_failed", (Outcome.REFUSED,))
FULL: Final = twice(Outcome.NEUTRAL, 503, "queue_full")
NOT_READY: Final = twice(Outcome.UNREACHABLE, 503, "not_ready")
LOST: Final = twice(Outcome.LOST, charged=None)
WORKED: Final = Made(200, outcomes=(Outcome.WORKED,), charged=USED)
UNTOLD: Final = Made(200, outcomes=(Outcome.WORKED,), charged=None)


class Cell(Struct, frozen=True):
    name: str
    reply: Reply
    made: Made
    streams: bool = False

    @property
    def request_id(self) -> str:
        return re.sub(r"[^\w.-]", "-", self.name)


class StandIn:
    """A server of another make, over HTTP/1.1: it answers every request with the same bytes."""

    def __init__(self) -> None:
        self.reply = Reply()
        self.asked: list[bytes] = []
        """The heads of the requests, other than for the list of models."""
        self.ends_kept = False
        """True if it ends a connection at its second request, unanswered."""
        self.kills = False
        """True if it ends each connection at a request, unanswered."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = 0
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length or b"0"))
                if head.startswith(b"GET"):
                    listed = json.dumps({"data": [{"id": MODEL}]}).encode()
                    writer.write(answer_bytes(Reply(body=listed)))
                    continue
                self.asked.append(head)
                asked += 1
                if self.kills or (self.ends_kept and asked == 2):
                    return
                writer.write(answer_bytes(self.reply))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def answer_bytes(reply: Reply) -> bytes:
    lines = [f"HTTP/1.1 {reply.status} X", *(f"{name}: {value}" for name, value in reply.headers.items())]
    if reply.type is not None:
        lines.append(f"content-type: {reply.type}")
    body = reply.body
    if reply.pieces:
        lines.append("transfer-encoding: chunked")
        pieces = [body[at : at + reply.pieces] for at in range(0, len(body), reply.pieces)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    elif reply.status not in (204, 304):
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


class Front:
    """A gateway before two replicas, and a caller."""

    def __init__(self, gateway: Gateway, client: aiohttp.ClientSession, log: io.StringIO) -> None:
        self.gateway, self._client, self._log = gateway, client, log
        self.outcomes: list[Outcome] = []
        release = gateway.replicas.release

        def noted(placement: Placement, outcome: Outcome) -> None:
            self.outcomes.append(outcome)
            release(placement, outcome)

        gateway.replicas.release = noted  # type: ignore[method-assign]

    async def ask(self, name: str, *, streams: bool = False, key: str = KEY) -> tuple[int, Any, bytes]:
        """The status, headers and body of the answer."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": name}], "max_tokens": 20}
        headers = {"authorization": f"Bearer {key}", "x-request-id": name}
        url = f"http://127.0.0.1:{self.gateway.port}/v1/chat/completions"
        async with self._client.post(url, json={**body, "stream": streams}, headers=headers) as answer:
            found = answer.status, answer.headers, await answer.read()
        while len(self.gateway.live):  # noqa: ASYNC110 -- it sets no event
            await asyncio.sleep(0)
        return found

    def forget(self) -> None:
        """Begin with replicas of which nothing is known."""
        self.outcomes.clear()
        for replica in self.gateway.replicas.members():
            replica.health = ReplicaHealth(1)

    async def charges(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """What was charged, and what was reserved, by request."""
        wanted = set(names)
        found: dict[str, tuple[int, int]] = {}

        def are_there() -> bool:
            for text in self._log.getvalue().splitlines():
                line = msgspec.json.decode(text)
                if line["event"] == "request.completed":
                    found[line["request_id"]] = line["settled_tokens"], line["reserved_tokens"]
            return wanted <= found.keys()

        await until(are_there)
        return found

    @property
    def ejected(self) -> list[bool]:
        members = self.gateway.replicas.members()
        return [replica.health.phase is not HealthPhase.WELL for replica in members]


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn()


@asynccontextmanager
async def gateway_before(urls: Sequence[str], protocol: str, log: io.StringIO) -> AsyncIterator[Front]:
    model = {"name": MODEL, "replicas": urls, "protocol": protocol, "engine": "openai"}
    config = load(settings(models=[model]), {})
    with mock.patch.object(foreign_loads, "INTERVAL_S", 3600.0):
        async with Gateway(config) as gateway, aiohttp.ClientSession() as client:
            yield Front(gateway, client, log)


@pytest.fixture
async def front(stand_in: StandIn, log: io.StringIO) -> AsyncIterator[Front]:
    servers = [await asyncio.start_server(stand_in.serve, "127.0.0.1", 0) for _ in range(2)]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    async with gateway_before(urls, "http1", log) as front:
        yield front
    for server in servers:
        server.close()


async def check(front: Front, stand_in: StandIn, cells: Sequence[Cell]) -> None:
    """Every cell leads to what it has to."""
    wrong: dict[str, object] = {}
    for cell in cells:
        front.forget()
        stand_in.reply = cell.reply
        status, headers, body = await front.ask(cell.request_id, streams=cell.streams)
        made, code, message = cell.made, "", ""
        if status != 200:
            error = json.loads(body)["error"]
            code, message = error["code"], error["message"]
        got = status, code, tuple(front.outcomes), headers.get("retry-after")
        if got != (made.status, made.code, made.outcomes, made.after):
            wrong[cell.name] = got, message
        elif made.words != message if made.words else "nginx" in message or (not message and status != 200):
            wrong[cell.name] = message
        elif status == 200 and not cell.streams and body != cell.reply.body:
            wrong[cell.name] = body[:100]
    charges = await front.charges(cell.request_id for cell in cells)
    for cell in cells:
        settled, reserved = charges[cell.request_id]
        if settled != (reserved if cell.made.charged is None else cell.made.charged):
            wrong[f"{cell.name}: charged"] = settled
    assert not wrong


# -- error statuses -------------------------------------------------------------------------------

BODIES: Final[dict[str, tuple[Any, str, str | None]]] = {
    "openai": (
        {"error": {"message": "bad thing", "type": "t", "param": "p", "code": None}},
        JSON,
        "bad thing",
    ),
    "number": ({"error": {"message": "bad thing", "code": 0}}, JSON, "bad thing"),
    "digits": ({"error": {"message": "bad thing", "code": "0"}}, JSON, "bad thing"),
    "vllm": ({"object": "error", "message": "bad thing", "param": None, "code": 0}, JSON, "bad thing"),
    "tgi": ({"error": "Input validation error", "error_type": "validation"}, JSON, "Input validation error"),
    "list": (
        {"detail": [{"loc": ["body", "n"], "msg": "Field required", "input": "x"}, {"msg": "No"}]},
        JSON,
        "n: Field required; No",
    ),
    "detail": ({"detail": "n is too large"}, JSON, "n is too large"),
    "google": ([{"error": {"code": 0, "message": "not valid", "status": "X"}}], JSON, "not valid"),
    "param": ({"error": {"message": "bad", "param": ["a"], "code": None}}, f"{JSON}; charset=utf-8", "bad"),
    "object": ({"error": {"message": {"text": "bad"}, "code": None}}, JSON, "bad"),
    "text": (b"Bad Request:\n prompt too long", "text/plain", "Bad Request: prompt too long"),
    "html": (HTML.encode(), "text/html", None),
    "html as json": (HTML.encode(), JSON, None),
    "empty": (b"", JSON, None),
    "long": ({"detail": [{"loc": ["body"], "msg": "nginx", "input": "x" * 70_000}]}, JSON, None),
    "deep": (b"[" * 50_000, JSON, None),
    "nested": (b'{"message":' * 900 + b'"nginx"' + b"}" * 900, JSON, None),
    "code alone": ({"error": {"code": "their_own"}}, JSON, None),
    "strange": ({"error": {"message": 5, "code": [1], "type": {}}, "status": 1.5}, JSON, None),
    "code": (
        {"error": {"message": "filtered", "code": "content_filter", "innererror": {"code": "ResponsibleAI"}}},
        JSON,
        "filtered",
    ),
    "moderated": (
        {"error": {"code": 0, "message": "flagged", "metadata": {"reasons": ["x"], "flagged_input": "y"}}},
        JSON,
        "flagged",
    ),
    "model": (
        {"error": {"message": "The model `x` does not exist", "code": 0}},
        JSON,
        "The model `x` does not exist",
    ),
}
"""Bodies, their types and their words. In place of the number 0 stands the status."""
SOME: Final = ("openai", "html", "empty")
KINDS: Final[dict[Made, tuple[int, ...]]] = {
    mistake(): (400, 422),
    mistake(413, "request_too_large"): (413,),
    mistake(400, "content_filter"): (451,),
    FAILED: (401, 402, 403, 407, 424, 500, 501, 502, 504, 520),
    DEFERRED: (408, 409, 421, 425, 499),
    REFUSED: (404, 405, 406, 410, 411, 412, 414, 415, 417, 418, 423, 426, 428, 431),
    FULL: (429, 503, 529),
}
MADE: Final = {status: made for made, statuses in KINDS.items() for status in statuses}


def made_of(status: int, body: str) -> Made:
    made, words = MADE[status], BODIES[body][2]
    if body == "model" and status in (404, 410):
        return mistake(404, "model_not_found", words)
    if body in ("code", "moderated") and status == 403:
        return mistake(400, "content_filter", words)
    if made.status < 500:
        code = "content_filter" if body in ("code", "moderated") else made.code
        code = "their_own" if body == "code alone" else code
        return mistake(made.status, code, words)
    if status == 503 and words is None:
        return NOT_READY
    return msgspec.structs.replace(made, words=words) if status in (503, 529) else made


def error_reply(status: int, body: str) -> Reply:
    value, type_, _ = BODIES[body]
    if isinstance(value, bytes):
        return Reply(status, value, type_)
    text = (
        json.dumps(value)
        .replace('"code": 0', f'"code": {status}')
        .replace('"code": "0"', f'"code": "{status}"')
    )
    return Reply(status, text.encode(), type_)


def error_reply_of(status: int, code: str) -> Reply:
    return Reply(status, json.dumps({"error": {"message": "m", "code": code}}).encode())


ERRORS: Final = [
    Cell(f"{status}-{body}-{streams}", error_reply(status, body), made_of(status, body), streams)
    for streams in (False, True)
    for status in MADE
    for body in (BODIES if not streams and status in (400, 403, 404, 413, 422, 429, 451, 500, 503) else SOME)
]


OUR_CODES: Final = [
    Cell(f"{status}-{code}", error_reply_of(status, code), made)
    for status, code, made in (
        (400, "context_length_exceeded", mistake(400, "context_length_exceeded", "m")),
        (500, "context_length_exceeded", mistake(400, "context_length_exceeded", "m")),
        (404, "model_not_found", mistake(404, "model_not_found", "m")),
        (404, "not_found", REFUSED),
        (404, "unknown_url", REFUSED),
        (405, "method_not_allowed", REFUSED),
        (408, "request_body_timeout", DEFERRED),
        (500, "internal_error", FAILED),
        (500, "engine_failed", twice(Outcome.FAILED, 500, "engine_failed")),
        (400, "invalid_api_key", FAILED),
        (400, "insufficient_quota", FULL),
        (500, "queue_full", msgspec.structs.replace(FULL, words="m")),
        (500, "not_ready", msgspec.structs.replace(NOT_READY, words="m")),
    )
]
"""Codes that Penstock's engines say, and those that are its gateways' alone: others say them as well."""


async def test_a_code_of_ours_counts_where_it_is_about_the_request(front: Front, stand_in: StandIn) -> None:
    await check(front, stand_in, OUR_CODES)


async def test_an_error_is_told_by_its_status_and_in_its_words(front: Front, stand_in: StandIn) -> None:
    await check(front, stand_in, ERRORS)
    assert all(b"\r\naccept-encoding: identity\r\n" in head for head in stand_in.asked)
    told = [line for line in front._log.getvalue().splitlines() if '"replica.refuses"' in line]
    assert 1 <= len(told) <= 2, "each replica once, whatever it refuses"
    assert "engine answered 40" in told[0]


# -- what is no answer, and what is one ------------------------------------------------------------

CHOICES: Final = [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]
ANSWER: Final = {"id": "x", "model": MODEL, "choices": CHOICES, "usage": USAGE}
WHOLE: Final = json.dumps(ANSWER).encode()
CHUNK: Final = b'data: {"choices": [{"index": 0, "delta": {"content": "hi"}}], "usage": null}\n\n'
COUNTED: Final = b'data: {"choices": [], "usage": %b}\n\n' % json.dumps(USAGE).encode()
DONE: Final = b"data: [DONE]\n\n"
EVENTS: Final = CHUNK + COUNTED + DONE
TOO_LONG: Final = mistake(words="too long")
ERROR: Final = b'{"error": {"message": "too long", "code": 400}}'
DEEP: Final = b"[" * 5000 + b"]" * 5000
GZIPPED: Final = {"content-encoding": "gzip"}


def used(**fields: object) -> bytes:
    return json.dumps({**ANSWER, "usage": {**USAGE, **fields}}).encode()


UNARY: Final[dict[str, tuple[Reply, Made]]] = {
    "plain": (Reply(body=WHOLE), WORKED),
    "in pieces": (Reply(body=WHOLE, pieces=1), WORKED),
    "indented": (Reply(body=json.dumps(ANSWER, indent=2).replace('":', '" :').encode()), WORKED),
    "with a charset": (Reply(body=WHOLE, type="Application/JSON ; charset=UTF-8"), WORKED),
    "without a type": (Reply(body=WHOLE, type=None), WORKED),
    "in no coding": (Reply(body=WHOLE, headers={"content-encoding": "Identity"}), WORKED),
    "with a byte order mark": (Reply(body=b"\xef\xbb\xbf" + WHOLE), WORKED),
    "with many levels": (Reply(body=WHOLE[:-1] + b', "x": ' + DEEP + b"}"), WORKED),
    "with NaN": (Reply(body=WHOLE[:-1] + b', "x": NaN}'), WORKED),
    "that tells no usage": (Reply(body=json.dumps({**ANSWER, "usage": None}).encode()), UNTOLD),
    "with floats": (Reply(body=used(prompt_tokens=7.0, completion_tokens=3.0)), WORKED),
    "with a part": (Reply(body=used(prompt_tokens=7.5)), UNTOLD),
    "with null for zero": (Reply(body=used(prompt_tokens=USED, completion_tokens=None)), WORKED),
    "with null for details": (Reply(body=used(prompt_tokens_details={"cached_tokens": None})), WORKED),
    "with words for usage": (Reply(body=used(prompt_tokens="7")), UNTOLD),
    "gzip": (Reply(body=gzip.compress(WHOLE), headers=GZIPPED), FAILED),
    "two codings": (Reply(body=WHOLE, headers={"content-encoding": "identity, br"}), FAILED),
    "a mistake in gzip": (Reply(400, gzip.compress(ERROR), headers=GZIPPED), mistake()),
    "html": (Reply(body=HTML.encode(), type="text/html"), FAILED),
    "html as json": (Reply(body=HTML.encode()), FAILED),
    "text": (Reply(body=WHOLE, type="text/plain"), FAILED),
    "events": (Reply(body=EVENTS, type=SSE), FAILED),
    "nothing": (Reply(), FAILED),
    "nothing without a type": (Reply(type=None), FAILED),
    "no object": (Reply(body=b"[]"), FAILED),
    "no field": (Reply(body=b"{}"), FAILED),
    "no choices": (Reply(body=b'{"id": "x", "choices": null}'), FAILED),
    "a detail": (Reply(body=b'{"detail": "too long"}'), FAILED),
    "an error of a code": (Reply(body=ERROR), TOO_LONG),
    "an error in pieces": (Reply(body=ERROR, pieces=1), TOO_LONG),
    "an error of a status": (Reply(body=b'{"error": "too long", "status": 400}'), TOO_LONG),
    "an error of a type": (
        Reply(body=b'{"error": {"message": "too long", "type": "invalid_request_error"}}'),
        TOO_LONG,
    ),
    "an error of no code": (Reply(body=b'{"error": {"message": "too long"}}'), FAILED),
    "an error beside no choices": (Reply(body=ERROR[:-1] + b', "choices": null}'), TOO_LONG),
    "an error of a quota": (Reply(body=b'{"error": {"message": "nginx", "code": 429}}'), FULL),
    "an error in a list": (Reply(body=b"[" + ERROR + b"]"), TOO_LONG),
    "a cut": (Reply(body=WHOLE, headers={"content-length": "1"}, pieces=7), LOST),
}
STREAMS: Final[dict[str, tuple[Reply, Made]]] = {
    "plain": (Reply(body=EVENTS, type=SSE), WORKED),
    "a type in capitals": (Reply(body=EVENTS, type="Text/Event-Stream; Charset=UTF-8"), WORKED),
    "no type": (Reply(body=EVENTS, type=None), WORKED),
    "octets": (Reply(body=EVENTS, type="application/octet-stream"), FAILED),
    "lines": (Reply(body=WHOLE + b"\n", type="application/x-ndjson"), FAILED),
    "html": (Reply(body=HTML.encode(), type="text/html"), FAILED),
    "a whole answer": (Reply(body=WHOLE), FAILED),
    "nothing as json": (Reply(), FAILED),
    "gzip": (Reply(body=gzip.compress(EVENTS), type=SSE, headers=GZIPPED), FAILED),
    "json in gzip": (Reply(body=gzip.compress(ERROR), headers=GZIPPED), FAILED),
    "an error as json": (Reply(body=ERROR), TOO_LONG),
    "a detail as json": (Reply(body=b'{"detail": "too long"}'), FAILED),
    "nothing": (Reply(type=SSE), LOST),
    "comments alone": (Reply(body=b": ping\n\n" * 3, type=SSE), LOST),
}
NO_ANSWERS: Final = (*(101, 201, 202, 203, 204, 206, 226), *(300, 301, 302, 303, 304, 307, 308))


def none_of(status: int) -> Iterable[tuple[str, Reply]]:
    where = {"location": "https://nginx/login"}
    yield "html", Reply(status, HTML.encode(), "text/html", where)
    yield "the answer", Reply(status, WHOLE, headers=where)
    yield "the events", Reply(status, EVENTS, SSE)


FOUND: Final = [
    *(Cell(f"unary-{name}", *cell) for name, cell in UNARY.items()),
    *(Cell(f"stream-{name}", *cell, streams=True) for name, cell in STREAMS.items()),
    *(
        Cell(f"{status}-{name}-{streams}", reply, FAILED, streams)
        for status in NO_ANSWERS
        for name, reply in none_of(status)
        for streams in (False, True)
    ),
]


async def test_an_answer_is_a_200_of_the_type_that_was_asked_for(front: Front, stand_in: StandIn) -> None:
    await check(front, stand_in, FOUND)


async def test_it_is_all_the_same_over_http2(
    stand_in: StandIn, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "REPORT_S", 0.0)  # the stand-in's server announces reports, and sends none

    def script(_: Seen) -> Script:
        reply = stand_in.reply
        pieces = reply.pieces or len(reply.body) or 1
        steps = [reply.body[at : at + pieces] for at in range(0, len(reply.body), pieces)]
        return Script(steps, reply.status, reply.type or "", dict(reply.headers))

    cells = [
        cell
        for cell in (*ERRORS[::7], *FOUND[::2])
        if cell.reply.type is not None
        and cell.reply.status not in (101, 204, 304)
        and "content-length" not in cell.reply.headers
    ]
    async with FakeEngine() as one, FakeEngine() as other:
        one.script = other.script = script
        async with gateway_before([one.url, other.url], "http2", log) as front:
            await check(front, stand_in, cells)


# -- a stream's first event -------------------------------------------------------------------------

FIRST: Final[dict[str, tuple[bytes, Made]]] = {
    "error": (b"data: " + ERROR + b"\n\n", TOO_LONG),
    "no space": (b"data:" + ERROR + b"\n\n", TOO_LONG),
    "lines with CR": (b"data: " + ERROR + b"\r\n\r\n", TOO_LONG),
    "behind comments": (b": ping\n\n: ping\n\n" + b"data: " + ERROR + b"\n\n", TOO_LONG),
    "behind a comment within": (b": ping\ndata: " + ERROR + b"\n\n", TOO_LONG),
    "behind a time": (b"retry: 10\n\nid: 1\ndata: " + ERROR + b"\n\n", TOO_LONG),
    "behind a byte order mark": (b"\xef\xbb\xbfdata: " + ERROR + b"\n\n", TOO_LONG),
    "with a name": (b"event: error\ndata: " + ERROR + b"\n\n", TOO_LONG),
    "with a name in capitals, of another kind": (b"event: Error\n" + CHUNK, WORKED),
    "with a name, in words": (b"event:error\ndata: too long\n\n", FAILED),
    "a field": (b'error: {"code": 400, "message": "too long"}\n\n', TOO_LONG),
    "keys in another order": (b'data: {"id": "x", ' + ERROR[1:] + b"\n\n", TOO_LONG),
    "beside choices": (b'data: {"choices": [], ' + ERROR[1:] + b"\n\n", TOO_LONG),
    "on several lines": (b'data: {"error":\ndata: {"message": "too long", "code": 400}}\n\n', TOO_LONG),
    "vLLM's": (b'data: {"object": "error", "message": "too long", "code": 400}\n\n', TOO_LONG),
    "without an envelope": (b'data: {"message": "too long", "code": 400}\n\n', TOO_LONG),
    "with digits": (b'data: {"error": {"message": "too long", "code": "400"}}\n\n', TOO_LONG),
    "text": (b'data: {"error": "too long", "code": 400}\n\n', TOO_LONG),
    "a detail": (b'data: {"detail": "too long"}\n\n', FAILED),
    "a quota": (b'data: {"error": {"message": "nginx", "code": 429}}\n\n', FULL),
    "overloaded": (b'data: {"error": {"message": "m", "type": "overloaded_error"}}\n\n', FULL),
    "its own": (b'data: {"error": {"message": "m", "code": "server_error"}}\n\n', FAILED),
    "no error": (b'data: {"error": null, ' + CHUNK[7:], WORKED),
    "an empty one": (b'data: {"error": {}, ' + CHUNK[7:], WORKED),
    "comments": (b": ping\n\n: error\n\n" + CHUNK, WORKED),
    "a name": (b"event: message\nid: 1\n" + CHUNK, WORKED),
    "many levels": (CHUNK.replace(b"null", DEEP), WORKED),
    "a word": (CHUNK.replace(b"hi", b'\\"error\\": 1'), WORKED),
}


@pytest.mark.parametrize("pieces", [1, 100_000])
async def test_the_first_event_is_read_as_one(front: Front, stand_in: StandIn, pieces: int) -> None:
    cells = []
    for name, (event, made) in FIRST.items():
        body = event + (COUNTED if made is WORKED else b"") + DONE
        reply = Reply(body=body, type=SSE, pieces=pieces)
        cells.append(Cell(f"{name}-{pieces}", reply, made, streams=True))
    await check(front, stand_in, cells)


# -- usage -------------------------------------------------------------------------------------------

PAD: Final = b'"pad": "%b"' % (b"y" * (HEAD_LEN_MAX + 50_000))
TOLD: Final = b'"usage": ' + json.dumps(USAGE).encode()
LIED: Final = rb'"text": "\"usage\": {\"prompt_tokens\": 1}"'
BEGIN: Final = b'"choices": ' + json.dumps(CHOICES).encode()
PLACES: Final = {
    "first": (TOLD, BEGIN, PAD),
    "last": (BEGIN, PAD, TOLD),
    "between": (BEGIN, PAD, TOLD, PAD),
    "before what it says": (BEGIN, PAD, TOLD, LIED, PAD),
    "zero first": (b'"usage": {"prompt_tokens": 0}', BEGIN, PAD, TOLD, PAD),
    "null behind": (BEGIN, PAD, TOLD, PAD, b'"usage": null'),
    "with a space": (BEGIN, PAD, TOLD.replace(b":", b" : "), PAD),
}
NOWHERE: Final = {"none": (BEGIN, PAD, LIED), "cut off": (BEGIN, PAD, b'"usage": {"prompt_tokens"')}
TELLING: Final = {
    "behind choices": CHUNK.replace(b'"usage": null', TOLD),
    "before choices": b"data: {" + TOLD + b', "choices": []}\n\n',
    "without choices": b"data: {" + TOLD + b"}\n\n",
    "null for choices": b'data: {"choices": null, ' + TOLD + b"}\n\n",
    "with floats": COUNTED.replace(b"7", b"7.0").replace(b"3", b"3.0"),
    "with a space": COUNTED.replace(b'"usage":', b'"usage" : '),
    "zero before": CHUNK.replace(b"null", b'{"prompt_tokens": 0, "completion_tokens": 0}') + COUNTED,
    "growing": CHUNK.replace(b"null", b'{"prompt_tokens": 7, "completion_tokens": 1}') + COUNTED,
    "null behind": COUNTED + CHUNK,
}
USAGES: Final = [
    *(
        Cell(f"{name}-{pieces}", Reply(body=b"{%b}" % b", ".join(fields), pieces=pieces), made)
        for places, made in ((PLACES, WORKED), (NOWHERE, UNTOLD))
        for name, fields in places.items()
        for pieces in (0, 4001)
    ),
    *(
        Cell(f"stream-{name}", Reply(body=CHUNK + event + DONE, type=SSE, pieces=50), WORKED, streams=True)
        for name, event in TELLING.items()
    ),
]


async def test_usage_is_found_wherever_it_stands(front: Front, stand_in: StandIn) -> None:
    await check(front, stand_in, USAGES)


@pytest.mark.parametrize("size", [1, 2, 7, 4096, 100_000])
@pytest.mark.parametrize("parts", PLACES.values(), ids=PLACES)
def test_usage_is_found_however_the_bytes_come_and_little_is_kept(parts: Sequence[bytes], size: int) -> None:
    data = b", ".join(part[-5000 if size < 100 else 0 :] for part in parts)
    finder = UsageFinder()
    for at in range(0, len(data), size):
        finder.feed(data[at : at + size])
        assert len(finder._held) <= USAGE_LEN_MAX + 2 * NAME_LEN_MAX
    assert finder.usage is not None
    assert finder.usage.prompt_tokens + finder.usage.completion_tokens == USED


# -- Retry-After -------------------------------------------------------------------------------------

SENT: Final = {"date": "Fri, 31 Dec 2027 23:00:00 GMT"}
AFTER: Final[dict[str, tuple[dict[str, str], str | None]]] = {
    "17": ({}, "17"),
    "Fri, 31 Dec 2027 23:00:30 GMT": (SENT, "30"),
    "Friday, 31-Dec-27 23:00:30 GMT": (SENT, "30"),
    "Fri, 31 Dec 2027 22:00:00 GMT": (SENT, "1"),
    "Fri, 31 Dec 2032 23:00:00 GMT": (SENT, None),
    "Sun, 02 Jan 2028 23:00:00 GMT": (SENT, None),
    "Mon, 1 Jan 1900 00:00:00 GMT": ({}, "1"),
    "soon": (SENT, None),
    "-1": ({}, None),
    "٣": ({}, None),
}
WAITS: Final = [
    Cell(
        f"{status}-{at}",
        Reply(status, BODY, headers={**headers, "retry-after": told}),
        msgspec.structs.replace(made, after=after),
    )
    for status, made in ((429, FULL), (503, msgspec.structs.replace(FULL, words="m")))
    for at, (told, (headers, after)) in enumerate(AFTER.items())
    for BODY in [b'{"error": {"message": "m"}}']
]


async def test_when_to_come_again_is_passed_on(front: Front, stand_in: StandIn) -> None:
    await check(front, stand_in, WAITS)


# -- who is hurt --------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [False, True])
async def test_mistakes_of_one_tenant_leave_the_replicas_to_another(
    front: Front, stand_in: StandIn, streams: bool
) -> None:
    """Whatever they are answered with, also by a proxy, also where nobody else was sent there before."""
    front.forget()
    for status in (400, 404, 413, 422, 431, 451):
        for body in ("list", "html", "empty"):
            stand_in.reply = error_reply(status, body)
            for _ in range(ROW_MAX):
                assert (await front.ask("mistake", streams=streams))[0] >= 400
    assert front.ejected == [False, False]
    stand_in.reply = Reply(body=WHOLE)
    assert (await front.ask("victim", key=OTHER_KEY))[0] == 200


async def test_what_no_tenant_is_answered_ejects(front: Front, stand_in: StandIn) -> None:
    for reply in (Reply(301), Reply(body=HTML.encode(), type="text/html"), Reply(404)):
        front.forget()
        stand_in.reply = reply
        for at in range(4 * ROW_MAX):
            await front.ask(f"{at}", key=(KEY, OTHER_KEY)[at % 2])
        assert any(front.ejected)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections count as used just now, and as ended at once."""
    monkeypatch.setattr(http1, "UNUSED_S_MIN", 3600.0)
    monkeypatch.setattr(http1, "CROSSED_S", 3600.0)


@pytest.mark.usefixtures("at_once")
async def test_a_server_that_ends_its_connections_unannounced_answers_all_the_same(
    front: Front, stand_in: StandIn
) -> None:
    front.forget()
    stand_in.reply, stand_in.ends_kept = Reply(body=WHOLE), True
    for _ in range(10):
        assert (await front.ask("kept"))[0] == 200
    assert front.outcomes == [Outcome.WORKED] * 10


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("warm", [0, 1, 2])
async def test_a_request_that_kills_two_is_sent_to_no_third(
    front: Front, stand_in: StandIn, warm: int
) -> None:
    """However many of the replicas have a connection that was just used."""
    front.forget()
    stand_in.reply = Reply(body=WHOLE)
    for name in "abcdef"[: 3 * warm]:
        assert (await front.ask(name))[0] == 200
    front.outcomes.clear()
    stand_in.asked.clear()
    stand_in.kills = True
    assert (await front.ask("killer"))[0] == 502
    assert len(stand_in.asked) == 2
    assert set(front.outcomes) == {Outcome.LOST}
