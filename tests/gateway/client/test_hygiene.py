"""Requests that a proxy in front may read otherwise are refused, and the refusal names what is wrong."""

from __future__ import annotations

import asyncio
import re
from typing import Final

import msgspec
import pytest
from aiohttp.web_protocol import RequestHandler

from gateway.client import connection
from gateway.listen import listener
from tests.gateway.conftest import CHAT, KEY, PATIENCE_S, House, Open, until
from tests.gateway.fake_engine import unary

BODY = msgspec.json.encode(CHAT)
LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"
HOST = b"host: here\r\n"
REST = b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n" % (KEY.encode(), len(BODY))
LONG_BODY = BODY + b" " * (connection.HEAD_LEN_MAX + 1)
LONG_REST = REST.replace(b"%d" % len(BODY), b"%d" % len(LONG_BODY))
WIDE = b"".join(b"x-%d: %b\r\n" % (i, b"y" * 8000) for i in range(5))
assert len(WIDE) > connection.HEAD_LEN_MAX
ANOTHER_HOST: Final = "The request's target names another host than the header host."
NO_PATHS: Final = (b"/v1%2Fmodels", b"/v1/m%6Fdels", b"/v1/models#x", b"//v1/models", b"/v1/../v1/models")
"""What another server may take for /v1/models."""


def targeted(target: bytes, host: bytes = HOST) -> bytes:
    """The beginning of a head with this target."""
    return b"POST %b HTTP/1.1\r\n" % target + host


pytestmark = pytest.mark.hop("http2")


async def answered(house: House, request: bytes, port: int = 0) -> tuple[int, bytes]:
    """The status and the body of the gateway's answer to these bytes, after any 100. `port` is another one
    than the public one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port or house.gateway.port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            writer.write(request)
            while (status := int((head := await reader.readuntil(b"\r\n\r\n")).split()[1])) == 100:
                pass
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            return status, await reader.readexactly(int(lengths[0].partition(b":")[2]))
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("request_head", "param", "message"),
    [
        (LINE + HOST + WIDE, None, "The request's headers are too large."),
        (LINE.replace(b"1.1", b"2.0") + HOST, None, "The request's version must be HTTP/1.0 or HTTP/1.1."),
        (b"CONNECT here:80 HTTP/1.1\r\n" + HOST, None, "This is no proxy: there is no CONNECT."),
        (LINE + HOST + b"Authorization: Bearer other-key\r\n", "authorization", "more than once"),
        (LINE + b"host: a/x?y\r\n", "host", "The header host names no host."),
        (targeted(b"ftp://here/v1/chat/completions"), None, "must be a path"),
        (targeted(b"http://u:p@here/v1/chat/completions"), None, "must name no user"),
        (targeted(b"http://%68ere/v1/chat/completions"), None, "The request's target names no host."),
        (targeted(b"http://there/v1/chat/completions"), "host", ANOTHER_HOST),
        (targeted(b"http://here:80/v1/chat/completions"), "host", ANOTHER_HOST),
        (targeted(b"http://here/v1/chat/completions", b"host:\r\n"), "host", ANOTHER_HOST),
    ],
    ids=[
        *("headers too large", "version", "tunnel", "header twice", "host"),
        *("scheme of the target", "user of the target", "no host in the target", "another host"),
        *("another port", "empty host"),
    ],
)
async def test_a_head_that_a_proxy_may_read_otherwise_is_refused_by_name(
    house: House, request_head: bytes, param: str | None, message: str
) -> None:
    status, body = await answered(house, request_head + REST + BODY)
    error = msgspec.json.decode(body)["error"]
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]
    assert not house.engine.seen


PATHS: Final = [
    (b"/v1/models", 200),
    (b"/v1/models?a=b", 200),
    (b"http://here/v1/models", 200),
    (b"HTTPS://HERE/v1/models?a=b", 200),
    *((before + path, 404) for before in (b"", b"http://here") for path in NO_PATHS),
    (b"http://here", 404),
]
"""Targets, and the statuses of their answers."""


@pytest.mark.parametrize(("target", "status"), PATHS)
async def test_a_path_has_one_spelling_in_each_form_of_a_target(
    house: House, target: bytes, status: int
) -> None:
    head = b"GET %b HTTP/1.1\r\n" % target + HOST + b"authorization: Bearer %b\r\n\r\n" % KEY.encode()
    assert (await answered(house, head))[0] == status
    assert (await house.line())["endpoint"] == ("/v1/models" if status == 200 else "unknown")


async def test_without_the_header_host_a_target_may_name_any(house: House) -> None:
    """Nothing is there that it could differ from."""
    own = b"authorization: Bearer %b\r\n\r\n" % KEY.encode()
    assert (await answered(house, b"GET http://here/v1/models HTTP/1.0\r\n" + own))[0] == 200
    assert (await answered(house, b"GET http://u@here/v1/models HTTP/1.0\r\n" + own))[0] == 400


async def test_operators_paths_have_one_spelling_in_each_form_of_a_target(open_house: Open) -> None:
    house = await open_house(admin={"port": 0, "names": ["here"]})
    for target, status in (
        (b"http://here/readyz", 200),
        (b"http://here/%72eadyz", 404),
        (b"http://there/readyz", 400),
        (b"http://u@here/readyz", 400),
    ):
        head = b"GET %b HTTP/1.1\r\n" % target + HOST + b"\r\n"
        assert (await answered(house, head, house.gateway.admin_port))[0] == status


async def test_a_head_that_is_far_too_long_is_refused_before_it_is_parsed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    parse = RequestHandler.data_received

    def record(self: RequestHandler, data: bytes) -> None:
        parsed.append(len(data))
        parse(self, data)

    monkeypatch.setattr(RequestHandler, "data_received", record)
    status, _ = await answered(house, LINE + HOST + 6 * WIDE)
    assert status == 400
    assert sum(parsed) <= connection.HEAD_PARSED_MAX


async def test_a_transfer_encoding_other_than_chunked_is_refused_by_name(house: House) -> None:
    framing = b"authorization: Bearer %b\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n" % KEY.encode()
    status, body = await answered(house, LINE + HOST + framing)
    error = msgspec.json.decode(body)["error"]
    assert (status, error["param"]) == (400, "transfer-encoding")
    assert error["message"] == "The only transfer-encoding is chunked."


@pytest.mark.parametrize(
    "sent",
    [
        LINE.replace(b" HTTP", b"  HTTP") + HOST + REST + BODY,
        LINE
        + HOST
        + b"authorization: Bearer %b\r\ntransfer-encoding: chunked\r\n\r\n" % KEY.encode()
        + b"0" * 1000
        + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    ],
    ids=["two spaces in the line", "a chunk size with a thousand zeros"],
)
async def test_what_is_odd_and_has_one_meaning_is_served(house: House, sent: bytes) -> None:
    """RFC 9112 lets a line be read by its words (section 3), and a size have any number of digits (7.1)."""
    house.engine.script = unary()
    assert (await answered(house, sent))[0] == 200
    assert (await house.line())["status"] == 200


async def test_a_body_that_waits_for_100_continue_is_asked_for_and_served(house: House) -> None:
    house.engine.script = unary()
    reader, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            writer.write(LINE + HOST + b"expect: 100-continue\r\n" + REST)
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(BODY)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    finally:
        writer.close()
    assert (await house.line())["status"] == 200


async def test_a_body_with_a_broken_chunk_is_refused_and_holds_nothing(house: House) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            writer.write(LINE + HOST + b"authorization: Bearer %b\r\n" % KEY.encode())
            writer.write(b"expect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")  # the gateway has begun to read the body
            writer.write(b"2\r\n{}\r\nno length\r\n")
            answer = await reader.read()
    finally:
        writer.close()
    line = await house.line()
    assert (line["stage"], line["end_reason"]) == ("body", "refused")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.") == 1, "one answer to one request"
    assert b"not framed as its headers say" in answer
    assert '"level":"error"' not in house.log.getvalue()
    await house.at_rest()


async def answers(house: House, sent: bytes) -> list[int]:
    """The statuses of all answers to these bytes, until the gateway closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            writer.write(sent)
            return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", await reader.read())]
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("requests", "statuses"),
    [
        (LINE + HOST + REST + BODY, [200]),
        (b"GET /v1/models HTTP/1.1\r\n" + HOST + b"authorization: Bearer %b\r\n\r\n" % KEY.encode(), [200]),
        (2 * (LINE + HOST + REST + BODY), [200, 200]),
        (2 * (LINE + HOST + LONG_REST + LONG_BODY), [200, 200]),
        (b"", []),
    ],
    ids=["a chat", "a request without a body", "two chats", "two long chats", "nothing"],
)
async def test_requests_before_garbage_in_one_packet_are_answered_and_the_connection_is_closed(
    house: House, requests: bytes, statuses: list[int]
) -> None:
    house.engine.script = unary()
    assert await answers(house, requests + b"\0garbage\r\n\r\n") == [*statuses, 400]
    assert '"level":"error"' not in house.log.getvalue()
    await house.at_rest()


async def test_much_garbage_in_one_packet_is_refused_once(house: House) -> None:
    assert await answers(house, (connection.AHEAD_MAX + 1) * b"\0garbage\r\n\r\n") == [400]


async def test_a_chunk_that_is_broken_in_the_packet_of_its_head_is_the_requests_one_answer(
    house: House,
) -> None:
    framing = b"authorization: Bearer %b\r\ntransfer-encoding: chunked\r\n\r\n" % KEY.encode()
    assert await answers(house, LINE + HOST + framing + b"no length\r\n") == [400]
    assert not house.engine.seen


async def test_a_broken_body_that_nobody_reads_closes_the_connection_without_an_alarm(house: House) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            writer.write(
                b"GET /v1/models HTTP/1.1\r\n" + HOST + b"authorization: Bearer %b\r\n" % KEY.encode()
            )
            writer.write(b"transfer-encoding: chunked\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")  # the answer is there, and the rest of the body awaited
            writer.write(b"no length\r\n")
            assert b"HTTP/1." not in await reader.read()
    finally:
        writer.close()
    await house.line()
    assert '"level":"error"' not in house.log.getvalue()


async def test_a_client_that_leaves_within_its_body_is_logged_as_such_and_holds_nothing(house: House) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port)
    async with asyncio.timeout(PATIENCE_S):
        writer.write(LINE + HOST + b"expect: 100-continue\r\n" + REST)
        await reader.readuntil(b"\r\n\r\n")
    writer.write(BODY[:5])
    writer.close()
    line = await house.line()
    assert (line["stage"], line["end_reason"]) == ("body", "client_cancel")
    await house.at_rest()


HALF = LINE + HOST + b"x-a: "


async def test_connections_with_half_a_head_are_bounded(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the bound the one that has it for longest is closed. Whole requests are answered meanwhile."""
    monkeypatch.setattr(listener, "HOLDING_MAX", 3)
    held = []
    for _ in range(6):
        reader, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port)
        await asyncio.sleep(0)
        for piece in (HALF, b"a" * 8000):
            writer.write(piece)
            async with house.get("/v1/models") as answer:
                assert answer.status == 200
        held.append((reader, writer))
    async with asyncio.timeout(PATIENCE_S):
        for reader, _ in held[:3]:
            assert await reader.read() == b""
    for _, writer in held[3:]:
        writer.write(b"\r\n" + REST + BODY)
    house.engine.script = unary()
    async with asyncio.timeout(PATIENCE_S):
        for reader, _ in held[3:]:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    for _, writer in held:
        writer.close()
    await until(lambda: "gateway.heads_full" in house.log.getvalue())


@pytest.mark.parametrize(("count", "is_closed"), [(8, False), (100, True)])
async def test_requests_that_are_sent_ahead_are_bounded(house: House, count: int, is_closed: bool) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port)
    request = b"GET /livez HTTP/1.1\r\n" + HOST + b"\r\n"
    try:
        async with asyncio.timeout(PATIENCE_S):
            writer.write(request)
            await reader.readuntil(b"}")
            writer.write(request * count)
            if is_closed:
                assert (await reader.read()).count(b"HTTP/1.1 200") <= connection.AHEAD_MAX
            else:
                for _ in range(count):
                    await reader.readuntil(b"}")
    finally:
        writer.close()
    async with house.get("/v1/models") as answer:
        assert answer.status == 200
