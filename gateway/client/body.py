"""A request's body: read within its bounds of size and time, and reserved with its tenant as it arrives; then
parsed and validated, by the checks that both services share and the gateway's own policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.client.deadlines import Watch
from gateway.client.interface import Body, Sink
from shared.apis.holding import Census, Holding
from shared.apis.request import Request
from shared.apis.validation import Parsed, parse, parse_slices
from shared.fairness.fair_threads import Slices
from shared.wire.errors import BodyTimeout, InvalidRequest
from shared.wire.http import ClientGone
from shared.wire.request_body import (
    awaits_continue,
    check_head,
    misframed,
    too_large,
    too_late_message,
)


async def read_body(
    headers: Mapping[str, str],
    body: Body,
    client: Sink,
    watch: Watch,
    holding: Holding,
    len_max: int,
    within_s: float,
) -> bytes:
    """Read all of a request's body, by the rules of `shared.wire.request_body`: at most `len_max` bytes,
    within `within_s` seconds, which the watch keeps. The last bytes are not held: the caller holds the whole
    body with what is made of it. `headers` are looked up by small letters.

    Raises:
        BodyTooLarge: at once when the headers say so, else as soon as the bound is passed.
        BodyTimeout: by the watch.
        InvalidRequest: compressed, or not framed as the headers say.
        Overloaded: the tenant's part of the memory is full.
        ClientGone: the connection broke.
    """
    check_head(headers, len_max)
    if is_coming := not body.is_eof():  # most came with their headers
        watch.expect(within_s, BodyTimeout, too_late_message(within_s))
    chunks: list[bytes] = []
    room = len_max
    try:
        if awaits_continue(headers):
            await client.go_on()
        while chunk := await body.readany():
            chunks.append(chunk)
            room -= len(chunk)
            if room < 0:
                raise too_large(len_max)
            if body.at_eof():
                break  # the caller holds the last bytes with what is made of them
            holding.hold(len_max - room)
    except ConnectionError:
        raise ClientGone from None
    except (HttpProcessingError, ClientPayloadError, web.RequestPayloadError) as error:
        if client.is_gone:
            raise ClientGone from None
        raise misframed(error) from None
    if is_coming:
        watch.relax()
    return b"".join(chunks)


T = TypeVar("T", bound=Request)


def validate(
    body: bytes, type_: type[T], unknown_fields: Literal["ignore", "refuse"], census: Census
) -> Parsed[T]:
    """Parse a body. Raises InvalidJson or InvalidRequest, which name the field."""
    return _admitted(parse(body, type_, census), unknown_fields)


def validate_slices(
    body: bytes, type_: type[T], unknown_fields: Literal["ignore", "refuse"]
) -> Slices[Parsed[T]]:
    """Parse a body of any length, pass by pass. Its census was taken and checked already."""
    return _admitted((yield from parse_slices(body, type_)), unknown_fields)


def _admitted(parsed: Parsed[T], unknown_fields: Literal["ignore", "refuse"]) -> Parsed[T]:
    if getattr(parsed.request, "penstock", None) is not None:
        raise InvalidRequest("penstock is set by the gateway alone.", param="penstock")
    if parsed.ignored and unknown_fields == "refuse":
        raise InvalidRequest(
            f"Unknown fields: {parsed.ignored_header or 'with names not fit to be shown'}.",
            param=parsed.ignored_header.partition(",")[0] or None,
        )
    return parsed
