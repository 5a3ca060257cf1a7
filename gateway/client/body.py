"""A request's body, bounded in size and time, and reserved with its tenant as it arrives."""

from __future__ import annotations

from typing import Final

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.client.deadlines import Watch
from shared.errors import BodyTimeout, BodyTooLarge, InvalidRequest
from shared.holding import Holding
from shared.http import ClientGone

LENGTH_DIGITS_MAX: Final = 18
"""Digits of a `Content-Length`. Longer ones are larger than any body, or padded with zeros."""


async def read_body(
    request: web.BaseRequest, watch: Watch, holding: Holding, len_max: int, within_s: float
) -> bytes:
    """All of it, within `within_s` however slowly it drips.

    Raises:
        BodyTooLarge: at once when the headers say so, else as soon as the bound is passed.
        BodyTimeout: by the watch.
        InvalidRequest: compressed, or not framed as the headers say.
        Overloaded: the tenant's part of the memory is full.
    """
    if request.headers.get("content-encoding", "identity") != "identity":
        raise InvalidRequest("Compressed request bodies are not accepted.")
    too_large = f"The request body is larger than {len_max} bytes."
    declared = request.headers.get("content-length", "0").lstrip("0")
    if len(declared) > LENGTH_DIGITS_MAX or int(declared or "0") > len_max:
        raise BodyTooLarge(too_large)
    content = request.content
    if is_coming := not content.is_eof():  # most came with their headers
        watch.expect(within_s, BodyTimeout, f"The request body did not arrive within {within_s:g} s.")
    chunks: list[bytes] = []
    room = len_max
    try:
        if request.headers.get("expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        while chunk := await content.readany():
            chunks.append(chunk)
            room -= len(chunk)
            if room < 0:
                raise BodyTooLarge(too_large)
            if content.at_eof():
                break  # what came last is held with what is made of it
            holding.hold(len_max - room)
    except ConnectionError:
        raise ClientGone from None
    except (HttpProcessingError, ClientPayloadError, web.RequestPayloadError) as error:
        if request.transport is None or request.transport.is_closing():
            raise ClientGone from None
        detail = type(error).__name__
        raise InvalidRequest("The request body is not framed as its headers say.", detail=detail) from None
    if is_coming:
        watch.relax()
    return b"".join(chunks)
