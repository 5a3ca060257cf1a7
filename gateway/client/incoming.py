"""A request as its client sends it: the checks of its head, beyond what aiohttp's parser does, and its body.

Rules:

1. A head that a proxy in front may read otherwise is refused. A proxy's path rules, its routing by host and
   its framing must see the request that is served here. So there is one spelling of a path, a host is a host,
   and a body has one of two framings. A target in absolute form (`http://host/path`, RFC 9112 section 3.2.2)
   names the host of the header, and its path is spelled as any.
2. A body is read within its bounds of size and time, and reserved with its tenant as it arrives; then it is
   parsed and validated, by the checks that both services share and the gateway's own policy.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from typing import Final, Literal, TypeVar

from aiohttp import ClientPayloadError, web
from aiohttp.http import HttpVersion10, HttpVersion11
from aiohttp.http_exceptions import HttpProcessingError

from gateway.client.connection import HEAD_LEN_MAX, answer_in_http11
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

T = TypeVar("T", bound=Request)

# -- its head -------------------------------------------------------------------------------------

_HOST: Final = re.compile(r"[A-Za-z0-9._~-]*(:[0-9]{0,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{0,5})?")
_ABSOLUTE: Final = re.compile(r"(?P<scheme>[^/?#]*)://(?P<authority>[^/?#]*)")
"""The beginning of a target in absolute form, up to its path."""
HOSTS_MAX: Final = 64
"""The number of values of `host` whose check is cached: there are few of them."""
_SINGLE: Final = ("authorization", "x-api-key", "host", "content-encoding")
"""Headers that must not be repeated, because proxies and servers differ in which of them counts."""


@lru_cache(maxsize=HOSTS_MAX)
def _is_host(host: str) -> bool:
    return _HOST.fullmatch(host) is not None


def path_of(request: web.BaseRequest) -> str:
    """The path as it was sent, without the query. An escaped letter makes it another path."""
    raw = request.raw_path
    if not raw.startswith("/") and (found := _ABSOLUTE.match(raw)) is not None:
        raw = raw[found.end() :]
    return raw.partition("?")[0]


def host_of(request: web.BaseRequest) -> str:
    """The host that a request is sent to, without the port. Its head is sound (`check_request`)."""
    host = request.headers.get("host", "")
    return host.partition("]")[0][1:] if host.startswith("[") else host.partition(":")[0]


def is_address(host: str) -> bool:
    """True if it is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_request(request: web.BaseRequest) -> None:
    """Check a request's head, beyond what aiohttp's parser does. Raises InvalidRequest."""
    headers = request.headers
    if sum(map(len, chain.from_iterable(request.raw_headers))) > HEAD_LEN_MAX:
        raise InvalidRequest("The request's headers are too large.")
    if request.version not in (HttpVersion10, HttpVersion11):
        answer_in_http11(request)
        raise InvalidRequest("The request's version must be HTTP/1.0 or HTTP/1.1.")
    if request.method == "CONNECT":  # aiohttp reads no body of it, so its body would be the next request
        raise InvalidRequest("This is no proxy: there is no CONNECT.")
    for name in _SINGLE:
        if len(headers.getall(name, ())) > 1:
            raise InvalidRequest(f"The header {name} is given more than once.", param=name)
    if not _is_host(headers.get("host", "")):
        raise InvalidRequest("The header host names no host.", param="host")
    if not request.raw_path.startswith("/"):
        _check_absolute(request.raw_path, headers.get("host"))
    if (coding := headers.get("transfer-encoding")) is not None and coding.lower() != "chunked":
        raise InvalidRequest("The only transfer-encoding is chunked.", param="transfer-encoding")


def _check_absolute(target: str, host: str | None) -> None:
    """Check a target that is no path. `host` is the header. Raises InvalidRequest."""
    if (found := _ABSOLUTE.match(target)) is None:
        return  # the asterisk of OPTIONS, which names nothing
    authority = found["authority"]
    if found["scheme"].lower() not in ("http", "https"):
        raise InvalidRequest("The request's target must be a path, or a URL with http or https.")
    if "@" in authority:
        raise InvalidRequest("The request's target must name no user.")
    if not _is_host(authority):
        raise InvalidRequest("The request's target names no host.")
    if host is not None and authority.lower() != host.lower():
        raise InvalidRequest("The request's target names another host than the header host.", param="host")


# -- its body -------------------------------------------------------------------------------------


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


def validate(
    body: bytes, type_: type[T], unknown_fields: Literal["ignore", "refuse"], census: Census
) -> Parsed[T]:
    """Parse a body. Raises InvalidJson or InvalidRequest, which name the field."""
    return _admitted(parse(body, type_, census), unknown_fields)


def validate_slices(
    body: bytes, type_: type[T], unknown_fields: Literal["ignore", "refuse"]
) -> Slices[Parsed[T]]:
    """The same, pass by pass, for a body of any length whose census was taken and checked already."""
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
