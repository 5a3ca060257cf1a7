"""A request's body: the bounds that its headers and its bytes are held to, whatever server reads it.

Rules:

1. The headers are checked before a byte is read: the body must not be compressed, nor declared to be larger
   than it may be. A client that asks (`Expect: 100-continue`) is told to go on only after that.
2. The bytes are counted as they come, as they may be more than was declared, and a chunked body declares
   nothing. No more than one read beyond the bound is ever held.
3. All of it must arrive within a time, however steadily it drips.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

from shared.wire.errors import ApiError, BodyTimeout, BodyTooLarge, InvalidRequest

JSON: Final = "application/json"
LENGTH_DIGITS_MAX: Final = 18
"""Digits of a `Content-Length`. Longer ones are larger than any body, or padded with zeros."""
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
"""The interim answer of HTTP/1.1 to a client that waits for it."""


class Continuable(Protocol):
    """aiohttp's writer of a request's answer, as far as an interim answer needs it."""

    output_size: int
    """The bytes of the answer so far: aiohttp takes one with any for begun, and answers no error any more."""

    async def write(self, chunk: bytes) -> None: ...


async def send_continue(writer: Continuable) -> None:
    """Tell a client to send its body. The answer proper has not begun by that."""
    await writer.write(CONTINUE)
    writer.output_size = 0


def check_head(headers: Mapping[str, str], len_max: int) -> None:
    """Check the headers of a body before a byte is read (rule 1). `headers` are looked up without regard to
    case, and `len_max` is in bytes. Raises InvalidRequest and BodyTooLarge."""
    if headers.get("content-encoding", "identity") != "identity":
        raise InvalidRequest("Compressed request bodies are not accepted.")
    declared = headers.get("content-length", "0").lstrip("0")
    if len(declared) > LENGTH_DIGITS_MAX or int(declared or "0") > len_max:
        raise too_large(len_max)


def check_page(headers: Mapping[str, str]) -> None:
    """Refuse a body that a browser sends for a page of any site without asking first: one that is not said to
    be JSON. Programs send no `Origin`, and may say what they like. Raises InvalidRequest."""
    if "origin" in headers and not headers.get("content-type", "").lower().startswith(JSON):
        raise InvalidRequest(
            f"What a web page sends must have the content-type {JSON}.", param="content-type"
        )


def awaits_continue(headers: Mapping[str, str]) -> bool:
    """True if the client waits for an interim answer before it sends the body."""
    return headers.get("expect", "").lower() == "100-continue"


def too_large(len_max: int) -> BodyTooLarge:
    """The error of a body of more than `len_max` bytes."""
    return BodyTooLarge(f"The request body is larger than {len_max} bytes.")


def too_late_message(within_s: float) -> str:
    """The message for a client whose body did not arrive within so many seconds."""
    return f"The request body did not arrive within {within_s:g} s."


def misframed(error: BaseException) -> ApiError:
    """The error of a body whose bytes are not framed as its headers say; `error` is how the server put it."""
    detail = type(error).__name__
    return InvalidRequest("The request body is not framed as its headers say.", detail=detail)


async def read_body(
    headers: Mapping[str, str],
    read: Callable[[], Awaitable[bytes | None]],
    go_on: Callable[[], Awaitable[None]],
    *,
    len_max: int,
    deadline_s: float,
    hold: Callable[[int], None],
) -> bytes:
    """Read a whole body.

    `read` returns what has come, at least one byte, and nothing or None at the end. `go_on` tells a client
    that awaits it to send the body. `hold` is called with the number of bytes that are held, and raises when
    they are too many. Raises BodyTooLarge, BodyTimeout after `deadline_s` seconds, InvalidRequest, and what
    `read` and `hold` raise.
    """
    check_head(headers, len_max)
    received = bytearray()
    try:
        async with asyncio.timeout(deadline_s):
            if awaits_continue(headers):
                await go_on()
            while chunk := await read():
                received += chunk
                if len(received) > len_max:
                    raise too_large(len_max)
                hold(len(received))
    except TimeoutError:
        raise BodyTimeout(too_late_message(deadline_s)) from None
    return bytes(received)
