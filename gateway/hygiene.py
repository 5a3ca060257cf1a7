"""Checks on a request's head beyond those of aiohttp's parser: requests that a proxy in front may read
otherwise are refused.

A proxy's path rules, its routing by host and its framing must see the request that is served here. So there
is one spelling of a path, a host is a host, and a body has one of two framings.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import chain
from typing import Final

from aiohttp import web
from aiohttp.http import HttpVersion10, HttpVersion11

from shared.errors import InvalidRequest

HEAD_LEN_MAX: Final = 32 * 1024
"""Bytes of a request's line and headers together. The bounds of each add up to half a megabyte, which no
client needs, and which any client could send without a key."""
_HOST: Final = re.compile(r"[A-Za-z0-9._~-]*(:[0-9]{0,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{0,5})?")
HOSTS_MAX: Final = 64
"""The number of values of `host` whose check is cached: there are few of them."""
_SINGLE: Final = ("authorization", "host", "content-encoding")
"""Headers that must not be repeated, because proxies and servers differ in which of them counts."""


@lru_cache(maxsize=HOSTS_MAX)
def _is_host(host: str) -> bool:
    return _HOST.fullmatch(host) is not None


def path_of(request: web.BaseRequest) -> str:
    """The path as it was sent, without the query. An escaped letter makes it another path."""
    raw = request.raw_path
    return raw.partition("?")[0] if raw.startswith("/") else request.path


def check(request: web.BaseRequest) -> None:
    """Check a request's head. Raises InvalidRequest."""
    headers = request.headers
    if sum(map(len, chain.from_iterable(request.raw_headers))) > HEAD_LEN_MAX:
        raise InvalidRequest("The request's headers are too large.")
    if request._version not in (HttpVersion10, HttpVersion11):  # `version` would keep what it returns
        request._version = HttpVersion11  # the answer's: aiohttp would repeat the one that it was sent
        raise InvalidRequest("The request's version must be HTTP/1.0 or HTTP/1.1.")
    if request.method == "CONNECT":  # aiohttp reads no body of it, so its body would be the next request
        raise InvalidRequest("This is no proxy: there is no CONNECT.")
    for name in _SINGLE:
        if len(headers.getall(name, ())) > 1:
            raise InvalidRequest(f"The header {name} is given more than once.", param=name)
    if not _is_host(headers.get("host", "")):
        raise InvalidRequest("The header host names no host.", param="host")
    if (coding := headers.get("transfer-encoding")) is not None and coding.lower() != "chunked":
        raise InvalidRequest("The only transfer-encoding is chunked.", param="transfer-encoding")
