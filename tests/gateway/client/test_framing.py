"""Requests that two servers may cut apart in different places: none is taken for two, or for another's.

Each holds a second request, the *smuggled* one, within what one way of reading takes for a body. It is sent
to the gateway itself, and through Debian's nginx, whose one connection to the gateway serves a victim too.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec
import pytest

from tests.bench.services import free_port
from tests.gateway.conftest import KEY, OTHER_KEY, PATIENCE_S, House, Open, until
from tests.gateway.fake_engine import unary

AUTH: Final = f"authorization: Bearer {KEY}\r\n".encode()
HEAD: Final = b"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\n" + AUTH
SMUGGLED: Final = b"GET /v1/models HTTP/1.1\r\nhost: gateway\r\nx-request-id: smuggled\r\n" + AUTH + b"\r\n"
LENGTH: Final = b"content-length: %d\r\n" % len(SMUGGLED)
CHUNKED: Final = b"transfer-encoding: chunked\r\n"
ENDED: Final = b"\r\n0\r\n\r\n" + SMUGGLED
"""The end of a chunked body, for a reader that goes by a length none."""
ONE_CHUNK: Final = b"%x\r\n" % len(SMUGGLED) + SMUGGLED + b"\r\n0\r\n\r\n"


def lengths(value: bytes) -> bytes:
    """A request whose length is written like this; a reader that ignores it finds the smuggled one."""
    return HEAD + b"content-length: " + value + b"\r\n\r\n" + SMUGGLED


def coded(*lines: bytes) -> bytes:
    """A request with these framing headers; a reader that does not take it for chunked has a length."""
    return HEAD + LENGTH + b"".join(line + b"\r\n" for line in lines) + ENDED


def chunks(body: bytes) -> bytes:
    return HEAD + CHUNKED + b"\r\n" + body + SMUGGLED


VECTORS: Final[dict[str, bytes]] = {
    "length and chunked": coded(b"transfer-encoding: chunked"),
    "chunked and length": HEAD + CHUNKED + LENGTH + ENDED,
    "chunked with one chunk, and a length of 4": HEAD + CHUNKED + b"content-length: 4\r\n\r\n" + ONE_CHUNK,
    "two lengths": HEAD + b"content-length: 0\r\n" + LENGTH + b"\r\n" + SMUGGLED,
    "two lengths, the other way": HEAD + LENGTH + b"content-length: 0\r\n\r\n" + SMUGGLED,
    "a list of lengths": lengths(b"0, %d" % len(SMUGGLED)),
    "a length with a sign": lengths(b"+%d" % len(SMUGGLED)),
    "a negative length": lengths(b"-1"),
    "a hexadecimal length": lengths(b"0x%x" % len(SMUGGLED)),
    "a length with an underscore": lengths(b"1_%d" % len(SMUGGLED)),
    "a length with a space inside": lengths(b"%d 0" % len(SMUGGLED)),
    "a length of other digits": lengths("\N{ARABIC-INDIC DIGIT THREE}".encode()),
    "an empty length": lengths(b""),
    "a length of 5,000 digits": lengths(b"9" * 5000),
    "a length in a header with a space": HEAD + b"content-length : %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED,
    "a length in a header with a NUL": HEAD + b"content-length\0: 5\r\n\r\n" + SMUGGLED,
    "a length in a folded line": HEAD + b"content-length:\r\n %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED,
    "a coding with a space before the colon": coded(b"transfer-encoding : chunked"),
    "a coding in a folded line": coded(b"transfer-encoding:", b" chunked"),
    "a coding with a vertical tab": coded(b"transfer-encoding: \x0bchunked"),
    "a coding with a NUL": coded(b"transfer-encoding: chunked\0"),
    "another coding": coded(b"transfer-encoding: xchunked"),
    "chunked and identity": coded(b"transfer-encoding: chunked, identity"),
    "chunked, then identity": coded(b"transfer-encoding: chunked", b"transfer-encoding: identity"),
    "chunked twice": coded(b"transfer-encoding: chunked", b"transfer-encoding: chunked"),
    "gzip and chunked": coded(b"transfer-encoding: gzip, chunked"),
    "a quoted coding": coded(b'transfer-encoding: "chunked"'),
    "a line end that is a line feed": coded(b"x: y\ntransfer-encoding: chunked"),
    "a carriage return inside a value": coded(b"x: y\rtransfer-encoding: chunked"),
    "a negative chunk size": chunks(b"-1\r\n"),
    "a chunk size with 0x": chunks(b"0x1\r\na\r\n0\r\n\r\n"),
    "a chunk size beyond 64 bits": chunks(b"fffffffffffffffff\r\n"),
    "a chunk size with a space before": chunks(b" 1\r\na\r\n0\r\n\r\n"),
    "a chunk size with an underscore": chunks(b"1_0\r\n" + b"a" * 16 + b"\r\n0\r\n\r\n"),
    "a chunk size that a line feed ends": chunks(b"1\na\r\n0\r\n\r\n"),
    "a chunk extension with a line feed": chunks(b"1;a\nb\r\na\r\n0\r\n\r\n"),
    "a chunk that is longer than its size": chunks(b"1\r\nabc\r\n0\r\n\r\n"),
    "a chunk that is followed by nothing": chunks(b"1\r\na0\r\n\r\n"),
    "a trailer with a length": chunks(b"0\r\n" + LENGTH + b"\r\n"),
    "chunked in HTTP/1.0": (HEAD.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n0\r\n\r\n" + SMUGGLED),
    "another version": HEAD.replace(b"1.1", b"2.0") + LENGTH + b"\r\n" + SMUGGLED,
    "no version": b"GET /v1/models\r\n" + SMUGGLED,
    "two spaces in the line": HEAD.replace(b"POST ", b"POST  ") + LENGTH + b"\r\n" + SMUGGLED,
    "a body with GET": b"GET /v1/models HTTP/1.1\r\nhost: gateway\r\n" + AUTH + LENGTH + b"\r\n" + SMUGGLED,
    "two hosts": HEAD + b"host: other\r\n" + LENGTH + b"\r\n" + SMUGGLED,
    "a host that is a path": HEAD.replace(b"host: gateway", b"host: a/x?y") + LENGTH + b"\r\n" + SMUGGLED,
    "another host in the line": HEAD.replace(b" /v1", b" http://other/v1") + LENGTH + b"\r\n" + SMUGGLED,
    "an upgrade to h2c": HEAD
    + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAA\r\n"
    + LENGTH
    + b"\r\n"
    + SMUGGLED,
    "an upgrade to websocket": b"GET /v1/models HTTP/1.1\r\nhost: gateway\r\nconnection: upgrade\r\n"
    b"upgrade: websocket\r\n" + AUTH + LENGTH + b"\r\n" + SMUGGLED,
    "a tunnel": b"CONNECT gateway:80 HTTP/1.1\r\nhost: gateway\r\n" + AUTH + LENGTH + b"\r\n" + SMUGGLED,
    "an expectation": HEAD + b"expect: 100-continue\r\n" + LENGTH + b"\r\n" + SMUGGLED,
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SMUGGLED,
}
"""By name: bytes whose reading servers are known to differ about. The smuggled request is a body, or follows
what is malformed."""
assert len(VECTORS) >= 25
AT_ONCE: Final = 6
VICTIMS: Final = 4
"""The victim's requests after each so many."""
STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3}) ")

NGINX: Final = """
daemon off;
master_process off;
pid {directory}/pid;
error_log {directory}/error.log;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {directory}/body;
  proxy_temp_path {directory}/proxy;
  fastcgi_temp_path {directory}/fastcgi;
  uwsgi_temp_path {directory}/uwsgi;
  scgi_temp_path {directory}/scgi;
  upstream gateway {{ server 127.0.0.1:{gateway}; keepalive 1; }}
  server {{
    listen 127.0.0.1:{port};
    keepalive_timeout 0;
    client_header_timeout 1s;
    client_body_timeout 1s;
    underscores_in_headers on;
    ignore_invalid_headers off;
    location / {{
      proxy_pass http://gateway;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_request_buffering off;
      proxy_buffering off;
    }}
  }}
}}
"""
"""As permissive as it gets: headers that nginx would drop are passed on, and bodies as they come. All
requests share one connection to the gateway."""
pytestmark = pytest.mark.hop("http2")


@contextlib.asynccontextmanager
async def nginx(gateway_port: int) -> AsyncIterator[int]:
    """The port of an nginx in front of a gateway: `apt-get install nginx-light`."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="penstock-nginx-") as directory:
        file = Path(directory) / "nginx.conf"
        file.write_text(NGINX.format(directory=directory, gateway=gateway_port, port=port))
        command = "/usr/sbin/nginx", "-e", f"{directory}/error.log", "-c", str(file)
        process = await asyncio.create_subprocess_exec(*command)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not await _listens(port):
                    assert process.returncode is None, (Path(directory) / "error.log").read_text()
            yield port
        finally:
            process.kill()
            await process.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def answered(port: int, data: bytes) -> bytes:
    """All that comes back for these bytes, until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            async with asyncio.timeout(PATIENCE_S):
                return await reader.read()
        return b""
    finally:
        writer.close()


@pytest.fixture
async def house(open_house: Open) -> House:
    house = await open_house(timeouts={"idle_s": 0.2, "body_s": 0.3})
    assert isinstance(house, House)
    return house


async def test_a_request_of_doubtful_framing_is_read_in_one_way(house: House) -> None:
    await _each_is_one_request(house, house.gateway.port)


async def test_a_request_of_doubtful_framing_harms_nobody_behind_nginx(house: House) -> None:
    async with nginx(house.gateway.port) as port:
        await _each_is_one_request(house, port)


async def _each_is_one_request(house: House, port: int) -> None:
    house.engine.script = unary()
    names, wrong = list(VECTORS), dict[str, object]()
    for at in range(0, len(names), AT_ONCE):
        some = names[at : at + AT_ONCE]
        answers = await asyncio.gather(*(answered(port, VECTORS[name]) for name in some))
        for name, answer in zip(some, answers, strict=True):
            if len([status for status in STATUS.findall(answer) if status != b"100"]) > 1:
                wrong[name] = answer
        for number in range(VICTIMS):
            if (got := await _victim(house, port, f"victim-{at}-{number}")) is not None:
                wrong[f"the victim beside {', '.join(some)}"] = got
    assert wrong == {}
    ids = [line["request_id"] for line in house._lines()]
    assert "smuggled" not in ids, "no reading has found the second request"
    assert sum(name.startswith("victim-") for name in ids) == -(-len(VECTORS) // AT_ONCE) * VICTIMS
    assert not {line["status"] for line in house._lines()} & {500, 502, 503}
    await house.at_rest()


async def _victim(house: House, port: int, request_id: str) -> object:
    """What another tenant's request got that it should not have; None where it was answered as alone."""
    headers = {"authorization": f"Bearer {OTHER_KEY}", "x-request-id": request_id}
    body = msgspec.json.encode({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]})
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    async with asyncio.timeout(PATIENCE_S), house.client.post(url, data=body, headers=headers) as answer:
        got = answer.status, answer.headers.get("x-request-id"), await answer.read()
    await until(lambda: any(line["request_id"] == request_id for line in house._lines()))
    return None if got[:2] == (200, request_id) and b"hello" in got[2] else got
