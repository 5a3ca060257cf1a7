"""Heads of requests, beyond what aiohttp's parser does: those that a proxy in front may read otherwise are
refused.

A proxy's path rules, its routing by host and its framing must see the request that is served here. So there
is one spelling of a path, a host is a host, and a body has one of two framings. A target in absolute form
(`http://host/path`, RFC 9112 section 3.2.2) names the host of the header, and its path is spelled as any.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from itertools import chain
from typing import Final

from aiohttp import web
from aiohttp.http import HttpVersion10, HttpVersion11

from gateway.client.connection import HEAD_LEN_MAX, answer_in_http11
from shared.wire.errors import InvalidRequest

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
    """The host that a request is sent to, without the port. Its head is sound (`check`)."""
    host = request.headers.get("host", "")
    return host.partition("]")[0][1:] if host.startswith("[") else host.partition(":")[0]


def is_address(host: str) -> bool:
    """True if it is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check(request: web.BaseRequest) -> None:
    """Check a request's head. Raises InvalidRequest."""
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
