"""The head of an HTTP/1.1 request to an engine. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import httpx
from msgspec import Struct

from gateway.relay.http2_client import Origin

TARGETS_MAX: Final = 1024


class Target(Struct, frozen=True):
    origin: Origin
    start: bytes
    """The request line and the Host header."""
    has_body: bool
    """True if the answer may have a body."""


@lru_cache(maxsize=TARGETS_MAX)
def target_of(method: str, url: str) -> Target:
    """Parse a method and a URL. Raises UnsupportedProtocol."""
    parsed = httpx.URL(url)
    scheme = parsed.scheme
    if scheme not in ("http", "https"):
        raise httpx.UnsupportedProtocol(f"{scheme!r} is neither http nor https")
    start = b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method.encode("ascii"), parsed.raw_path, parsed.netloc)
    origin = scheme, parsed.host, parsed.port or (443 if scheme == "https" else 80)
    return Target(origin, start, method != "HEAD")


def request_head(start: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The head of a request. Raises LocalProtocolError for a header that would be read as something else.
    The value is not shown: it may be a secret."""
    lines = [b"%b: %b\r\n" % pair for pair in headers]
    for (name, _), line in zip(headers, lines, strict=True):
        if line.count(b"\n") > 1 or line.count(b"\r") > 1 or b"\0" in line:
            raise httpx.LocalProtocolError(f"header {name!r} cannot be sent")
    return b"%b%b\r\n" % (start, b"".join(lines))
