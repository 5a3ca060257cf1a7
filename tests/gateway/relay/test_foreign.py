"""Somebody else's engine behind the gateway: another server (granian), another app, both protocols."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.app import Gateway
from gateway.config.whole import load
from gateway.relay.engine_errors import DETAILS_MAX, MESSAGE_LEN_MAX, TEXT_LEN_MAX, read_back
from gateway.relay.foreign import KEPT_LEN_MAX, KEPT_MAX, TAIL_LEN, ForeignScanner, look_into, usage_in
from shared.wire.errors import InvalidRequest, UpstreamFailed
from shared.wire.shapes import USED_TOKENS_MAX
from shared.wire.sse import parse_closing
from tests.bench.services import free_port
from tests.gateway.conftest import KEY, PATIENCE_S, settings, until
from tests.gateway.relay import foreign_app
from tests.gateway.relay.foreign_app import MODEL, USAGE, WORDS

GRANIAN = Path(sys.executable).with_name("granian")
TEXT = "".join(WORDS)


@contextmanager
def granian(protocol: str) -> Iterator[str]:
    """`protocol` as our configuration names it. The server speaks that one alone."""
    port = free_port()
    argv = [str(GRANIAN), "--interface", "asgi", "--http", protocol.removeprefix("http"), "--workers", "1"]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--no-ws", "--log-level", "warning"]
    process = subprocess.Popen([*argv, "foreign_app:app"], cwd=Path(foreign_app.__file__).parent)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def configured(url: str, protocol: str) -> dict[str, Any]:
    model = {"name": "theirs", "upstream_model": MODEL, "replicas": [url], "protocol": protocol}
    return settings(models=[model])


class Front:
    """A gateway before the foreign engine, and OpenAI's SDK in front of it."""

    def __init__(self, gateway: Gateway, url: str, log: io.StringIO) -> None:
        self.gateway = gateway
        self.engine_url = url
        self.log = log
        base = f"http://127.0.0.1:{gateway.port}/v1"
        self.sdk = openai.AsyncOpenAI(base_url=base, api_key=KEY, max_retries=0, timeout=PATIENCE_S)

    def chat(self, prompt: str, **fields: Any) -> Any:
        messages: Any = [{"role": "user", "content": prompt}]
        return self.sdk.chat.completions.create(model="theirs", messages=messages, **fields)

    async def line(self) -> dict[str, Any]:
        """The completed line of the only request."""
        await until(lambda: bool(self.lines("request.completed")))
        [line] = self.lines("request.completed")
        return line

    def lines(self, event: str) -> list[dict[str, Any]]:
        lines = [msgspec.json.decode(line) for line in self.log.getvalue().splitlines()]
        return [line for line in lines if line["event"] == event]


@pytest.fixture(scope="module", params=["http2", "http1"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def theirs(protocol: str) -> Iterator[str]:
    """The URL of a foreign engine, which keeps nothing of a request."""
    with granian(protocol) as url:
        yield url


@pytest.fixture
async def front(theirs: str, protocol: str, log: io.StringIO) -> AsyncIterator[Front]:
    async with Gateway(load(configured(theirs, protocol), {})) as gateway:
        await until(lambda: gateway.engines.of(gateway.config.models[0]).profile is not None)
        front = Front(gateway, theirs, log)
        async with front.sdk:
            yield front


async def test_a_foreign_unary_answer_is_charged_by_its_usage(front: Front) -> None:
    done = await front.chat("hello")
    assert done.choices[0].message.content == TEXT
    line = await front.line()
    assert (line["prompt_tokens"], line["completion_tokens"]) == (21, 4)
    assert line["settled_tokens"] == 25


@pytest.mark.parametrize("prompt", ["long 300000", "long 2000000", "long 300000 first", "long 2000000 first"])
async def test_a_long_unary_answer_is_charged_by_its_usage_too(front: Front, prompt: str) -> None:
    done = await front.chat(prompt)
    assert len(done.choices[0].message.content) == int(prompt.split()[1])
    line = await front.line()
    assert (line["prompt_tokens"], line["completion_tokens"], line["settled_tokens"]) == (21, 4, 25)


@pytest.mark.parametrize("prompt", ["hello", "crlf"])
async def test_a_foreign_stream_is_charged_by_its_usage(front: Front, prompt: str) -> None:
    stream = await front.chat(prompt, stream=True, stream_options={"include_usage": True})
    *chunks, last = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == TEXT
    assert last.usage.total_tokens == 25
    line = await front.line()
    assert line["end_reason"] == "ok"
    assert line["settled_tokens"] == 25


@pytest.mark.parametrize("prompt", ["hello", "crlf"])
async def test_usage_that_the_client_did_not_ask_for_is_charged_and_not_shown(
    front: Front, prompt: str
) -> None:
    stream = await front.chat(prompt, stream=True)
    chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].delta.content for chunk in chunks] == list(WORDS)
    line = await front.line()
    assert line["end_reason"] == "ok"
    assert line["settled_tokens"] == 25
    assert line["events"] == len(WORDS) + 1


async def test_a_client_of_the_old_version_is_sent_no_chunks(front: Front) -> None:
    body = json.dumps({"model": "theirs", "messages": [{"role": "user", "content": "hello"}], "stream": True})
    head = f"POST /v1/chat/completions HTTP/1.0\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(body)}"
    reader, writer = await asyncio.open_connection("127.0.0.1", front.gateway.port)
    writer.write(f"{head}\r\ncontent-type: application/json\r\n\r\n{body}".encode())
    async with asyncio.timeout(PATIENCE_S):
        _, _, answer = (await reader.read(-1)).partition(b"\r\n\r\n")
    writer.close()
    *events, done, end = answer.split(b"\n\n")
    assert all(event.startswith(b"data: {") for event in events)
    assert (len(events), done, end) == (len(WORDS), b"data: [DONE]", b"")


async def test_a_foreign_stream_without_usage_is_charged_its_reservation(front: Front) -> None:
    stream = await front.chat("mute", stream=True, max_tokens=50)
    assert len([chunk async for chunk in stream]) == len(WORDS)
    line = await front.line()
    assert line["end_reason"] == "ok"
    assert not line["prompt_exact"]
    assert line["settled_tokens"] == line["reserved_tokens"] == line["prompt_tokens"] + 50


@pytest.mark.parametrize("streaming", [False, True])
async def test_usage_out_of_all_bounds_is_charged_as_none(front: Front, streaming: bool) -> None:
    answer = await front.chat("absurd", max_tokens=50, stream=streaming)
    if streaming:
        assert len([chunk async for chunk in answer]) == len(WORDS)
    line = await front.line()
    assert line["end_reason"] == "ok"
    assert line["settled_tokens"] == line["reserved_tokens"] == line["prompt_tokens"] + 50


async def test_a_disconnect_cancels_the_request_at_a_foreign_engine(front: Front, protocol: str) -> None:
    before = await left(front.engine_url, protocol)
    stream = await front.chat("endless", stream=True)
    await anext(stream)
    await stream.close()
    line = await front.line()
    assert line["end_reason"] == "client_cancel"
    assert line["settled_tokens"] == line["reserved_tokens"], "nobody tells what it computed"
    async with asyncio.timeout(PATIENCE_S):
        while await left(front.engine_url, protocol) != before + 1:
            pass


async def left(url: str, protocol: str) -> int:
    """How many streams the app saw its client leave."""
    version = "--http2-prior-knowledge" if protocol == "http2" else "--http1.1"
    argv = ["curl", "-s", version, f"{url}/left"]
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    told, _ = await process.communicate()
    return int(told)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("prompt", "error", "reason"),
    [("bad", openai.BadRequestError, "refused"), ("busy", openai.InternalServerError, "refused")],
)
async def test_a_foreign_engines_errors_are_mapped_to_openais_envelope(
    front: Front, streaming: bool, prompt: str, error: type[openai.APIStatusError], reason: str
) -> None:
    status, message = foreign_app.REFUSALS[prompt]
    with pytest.raises(error, match=message) as caught:
        await front.chat(prompt, stream=streaming)
    assert caught.value.status_code == status
    line = await front.line()
    assert line["end_reason"] == reason
    assert line["settled_tokens"] == 0


async def test_an_engine_without_http2_is_502_and_the_log_names_the_setting(log: io.StringIO) -> None:
    """When its profile is asked for, at startup, and in the line of a request that came all the same."""
    with granian("http1") as url:
        async with Gateway(load(configured(url, "http2"), {})) as gateway:
            front = Front(gateway, url, log)
            hint = 'set protocol = "http1"'
            await until(lambda: any(hint in line["detail"] for line in front.lines("tokenizer.unavailable")))
            with pytest.raises(openai.InternalServerError):
                await front.chat("hello")
            line = await front.line()
            assert line["end_reason"] == "upstream_unreachable"
            assert hint in line["error_detail"]
            await front.sdk.close()


# -- the stream by itself -------------------------------------------------------------------------


def whole(scanner: ForeignScanner, data: bytes, size: int) -> bytes:
    """What the scanner lets through of `data`, which comes in chunks of this size."""
    forwarded = b"".join(scanner.feed(data[at : at + size]) for at in range(0, len(data), size))
    return forwarded + scanner.finish()


EVENTS = b'data: {"usage": null}\r\n\r\ndata: ' + json.dumps({"usage": USAGE}).encode() + b"\r\n\r\n"
DONE = b"data: [DONE]\r\n\r\n"


ALONE = b'data: {"choices": [], "usage": ' + json.dumps(USAGE).encode() + b"}\n\n"
EVENT = b'data: {"choices": [{"delta": {"content": "x"}}], "usage": null}\n\n'
EMPTY = b'data: {"choices":[],"usage":null}\n\n'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 1000])
def test_the_event_with_usage_alone_can_be_hidden(size: int) -> None:
    data = EVENT + EMPTY + EVENT + ALONE + b"data: [DONE]\n\n"
    scanner = ForeignScanner(hides_usage=True)
    assert whole(scanner, data, size) == EVENT + EMPTY + EVENT + b"data: [DONE]\n\n"
    assert scanner.usage is not None
    assert scanner.usage.completion_tokens == USAGE["completion_tokens"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_usage_and_line_ends_however_the_bytes_come(size: int) -> None:
    data = EVENTS + DONE
    scanner = ForeignScanner()
    assert whole(scanner, data, size) == data.replace(b"\r\n", b"\n")
    assert scanner.usage is not None
    assert scanner.usage.completion_tokens == USAGE["completion_tokens"]


@pytest.mark.parametrize(
    "behind", [b"", b": ping\n\n" * (2 * KEPT_MAX)], ids=["at the end", "before comments"]
)
@pytest.mark.parametrize("size", [len(EVENT), 10 * KEPT_LEN_MAX, 100_000])
def test_the_usage_of_a_long_stream_is_found_in_little_that_is_kept(behind: bytes, size: int) -> None:
    data = EVENT * 1000 + ALONE + behind + b"data: [DONE]\n\n"
    scanner = ForeignScanner()
    for at in range(0, len(data), size):
        scanner.feed(data[at : at + size])
        assert sum(map(len, scanner._kept)) <= TAIL_LEN + KEPT_MAX * KEPT_LEN_MAX
    assert scanner.usage is not None
    assert scanner.usage.completion_tokens == USAGE["completion_tokens"]


USED = ALONE.replace(b"data: ", b"data:")
LARGE = EVENT.replace(b'"x"', b'"' + b"x" * 2 * TAIL_LEN + b'"')
HUGE = EVENT.replace(b'"x"', b'"' + b"x" * 100_000 + b'"')


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 7, 1000, 1_000_000])
@pytest.mark.parametrize(
    "data",
    [
        EVENT + ALONE + b"data:[DONE]\n\n",
        EVENT + ALONE + b"data: [DONE]\n\n\n",
        EVENT + ALONE + b"data: [DONE]\n\n: bye\n\n",
        EVENT + ALONE + b"data: [DONE]\n",
        EVENT + ALONE + b"data: [DONE]",
        b"event: message\n" + EVENT + b"event: message\n" + ALONE + b"data: [DONE]\n\n",
        EVENT[:-1] + b"id: 1\n\n" + ALONE[:-1] + b"id: 2\n\n" + b"data: [DONE]\nid: 3\n\n",
        EVENT + b"\n" + ALONE + b"\n" + b"data: [DONE]\n\n",
        USED.replace(b"}}", b'}, "x": "' + b"y" * 20_000 + b'"}', 1) + b"data: [DONE]\n\n",
        ALONE + LARGE + b"data: [DONE]\n\n",
        HUGE.replace(b"null", json.dumps(USAGE).encode()) + b"data: [DONE]\n\n",
    ],
    ids=[
        *("no space", "a line more", "a comment behind", "no empty line", "no line end", "with types"),
        *("with ids", "lines between", "a large one", "a large one behind", "at the end of a huge one"),
    ],
)
def test_usage_and_end_are_found_however_a_server_writes_them(data: bytes, size: int) -> None:
    scanner = ForeignScanner()
    forwarded = whole(scanner, data, size if len(data) < 100_000 else 7 * size)
    assert forwarded == (data if data.endswith(b"\n\n") else data.rstrip(b"\n") + b"\n\n")
    assert scanner.saw_done
    assert scanner.usage is not None
    assert scanner.usage.completion_tokens == USAGE["completion_tokens"]


@pytest.mark.parametrize("size", [1, 7, 1000, 1_000_000])
def test_a_usage_of_any_spelling_can_be_hidden(size: int) -> None:
    data = b"event: x\n" + EVENT + b"event: x\n" + USED + b"data:[DONE]\n\n"
    assert whole(ForeignScanner(hides_usage=True), data, size) == b"event: x\n" + EVENT + b"data:[DONE]\n\n"


@pytest.mark.parametrize(
    "behind", [b"", b'data: {"error": {}}\n\n', EVENT, b"data: [DONE] or not\n\n"], ids=len
)
def test_what_comes_behind_the_end_or_in_its_place_is_no_end(behind: bytes) -> None:
    scanner = ForeignScanner()
    whole(scanner, EVENT + ALONE + (b"data: [DONE]\n\n" if behind else b"") + behind, 1000)
    assert not scanner.saw_done
    assert scanner.usage is None


@pytest.mark.parametrize("text", ['"usage": {"prompt_tokens": 9, "completion_tokens": 9}', "\\"])
def test_what_an_answer_says_is_not_taken_for_its_usage(text: str) -> None:
    quoted = json.dumps({"choices": [{"delta": {"content": text}}]}).encode()
    assert usage_in(b"data: " + quoted + b"\n\n") is None
    found = usage_in(b"data: " + json.dumps({"usage": USAGE, "content": text}).encode())
    assert found is not None
    assert found.completion_tokens == USAGE["completion_tokens"]


@pytest.mark.parametrize(
    "data", [b'"usage": {"prompt_tokens": 1', b'"usage": {' + b'"a":{' * 3000, b'"usage":']
)
def test_a_part_of_a_usage_is_none(data: bytes) -> None:
    assert usage_in(data) is None


@pytest.mark.parametrize(
    "data", [b"", EVENTS, b"\r", b"x" * 2 * TAIL_LEN + b"\n\n" + DONE, b'data: {"usage": 1}\n\n' + DONE]
)
def test_no_usage_is_made_up(data: bytes) -> None:
    scanner = ForeignScanner()
    assert whole(scanner, data, 1000) == data.replace(b"\r\n", b"\n").removesuffix(b"\r")
    assert scanner.usage is None


PIECES = (
    *(EVENT, EMPTY, ALONE, EVENT.replace(b"null", b"[1]"), EVENT.replace(b"}]", b"}, 1]"), DONE, EVENTS),
    *(
        b"data: [DONE]\n\n",
        b"data: 1\n\n",
        b"data: 12345678\n\n",
        b": ping\n\n",
        b"\n\n",
        b"\n",
        b"\r",
        b"dat",
    ),
    *(b"event: x\ndata: longer than the last event\n\n", b"data: without an end, and long enough\n"),
    *(
        b"data: with a carriage\rreturn in it\n\n",
        b": penstock {}\n\n",
        b"data: " + b"x" * KEPT_LEN_MAX + b"\n\n",
    ),
)


@given(st.lists(st.sampled_from(PIECES), max_size=2 * KEPT_MAX + 8), st.booleans())
def test_a_chunk_is_taken_only_where_the_same_bytes_would_be_passed_on(
    pieces: list[bytes], hides_usage: bool
) -> None:
    one, other = ForeignScanner(hides_usage=hides_usage), ForeignScanner(hides_usage=hides_usage)
    for piece in pieces:
        expected = one.feed(piece)
        taken = other.takes(piece)
        assert (piece if taken else other.feed(piece)) == expected
        assert (other.saw_done, other.at_boundary, other.usage) == (one.saw_done, one.at_boundary, one.usage)
        assert sum(map(len, other._kept)) <= TAIL_LEN + KEPT_MAX * KEPT_LEN_MAX
    assert other.finish() == one.finish()


@pytest.mark.parametrize("hides_usage", [False, True])
@pytest.mark.parametrize("event", [EVENT, EMPTY, ALONE, EVENT.replace(b"null", b"[1]")])
def test_an_event_is_taken_as_it_came_unless_it_may_have_to_be_hidden(
    event: bytes, hides_usage: bool
) -> None:
    taken = ForeignScanner(hides_usage=hides_usage).takes(event)
    assert taken is not (hides_usage and b"[]" in event)


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": -1}, {"prompt_tokens": "many"}])
def test_malformed_usage_is_ignored(usage: Any) -> None:
    assert look_into(json.dumps({"usage": usage}).encode())[1] is None


TOO_DEEP = b"[" * 100_000
BROKEN = [
    b'{"error":{"message":"\xff"},"usage":{"prompt_tokens":"\xff"}}',
    b'{"error":' + TOO_DEEP,
    b'{"a":' + TOO_DEEP,
]


@pytest.mark.parametrize("body", BROKEN, ids=["no UTF-8", "a deep error", "a deep unknown field"])
def test_an_answer_that_is_no_json_is_read_by_its_status(body: bytes) -> None:
    assert isinstance(read_back(500, body), UpstreamFailed)
    assert isinstance(read_back(400, body), InvalidRequest)
    assert look_into(body) == (False, None)
    assert parse_closing(body) is None


def test_the_words_of_an_error_are_bounded() -> None:
    long = read_back(400, msgspec.json.encode({"error": {"message": "x" * (MESSAGE_LEN_MAX + 1)}}))
    assert long.message.count("x") == MESSAGE_LEN_MAX
    text = b"no" * (TEXT_LEN_MAX // 2)
    assert text.decode() in read_back(400, text, "text/plain").message
    assert "nono" not in read_back(400, text + b"!", "text/plain").message
    mistakes = [f"mistake {number}" for number in range(DETAILS_MAX + 1)]
    told = read_back(422, msgspec.json.encode({"detail": mistakes})).message
    assert [mistake in told for mistake in mistakes] == [True] * DETAILS_MAX + [False]


@pytest.mark.parametrize("tokens", [-1, USED_TOKENS_MAX + 1, 2**64, 10**30])
@pytest.mark.parametrize("field", ["prompt_tokens", "completion_tokens", "cached_tokens"])
def test_usage_that_no_request_can_have_is_none_and_is_hidden_all_the_same(field: str, tokens: int) -> None:
    numbers = {"prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 1, field: tokens}
    usage = {**numbers, "prompt_tokens_details": {"cached_tokens": numbers.pop("cached_tokens")}}
    event = json.dumps({"choices": [], "usage": usage}).encode()
    assert look_into(event)[1] is None
    scanner = ForeignScanner(hides_usage=True)
    done = b"data: [DONE]\n\n"
    assert whole(scanner, EVENT + b"data: " + event + b"\n\n" + done, 1000) == EVENT + done
    assert scanner.usage is None


def test_the_most_that_a_request_can_use_is_believed() -> None:
    usage = {"prompt_tokens": USED_TOKENS_MAX, "completion_tokens": USED_TOKENS_MAX}
    _, closing = look_into(json.dumps({"usage": usage}).encode())
    assert closing is not None
    assert (closing.prompt_tokens, closing.completion_tokens) == (USED_TOKENS_MAX, USED_TOKENS_MAX)
