"""The head of an HTTP/1.1 request to an engine. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from msgspec import Struct

from gateway.relay.hop_errors import Unsendable
from gateway.relay.http2_client import Origin, parsed_url

TARGETS_MAX: Final = 1024


class Target(Struct, frozen=True):
    origin: Origin
    start: bytes
    """The request line and the Host header."""
    has_body: bool
    """True if the answer may have a body."""


@lru_cache(maxsize=TARGETS_MAX)
def target_of(method: str, url: str) -> Target:
    """Parse a method and a URL. Raises Unsendable."""
    parsed, origin = parsed_url(url)
    start = f"{method} {parsed.raw_path_qs} HTTP/1.1\r\nhost: {parsed.host_port_subcomponent}\r\n"
    return Target(origin, start.encode("ascii"), method != "HEAD")


def request_head(start: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The head of a request. Raises Unsendable for a header that would be read as something else.
    The value is not shown: it may be a secret."""
    lines = [b"%b: %b\r\n" % pair for pair in headers]
    for (name, _), line in zip(headers, lines, strict=True):
        if line.count(b"\n") > 1 or line.count(b"\r") > 1 or b"\0" in line:
            raise Unsendable(f"header {name!r} cannot be sent")
    return b"%b%b\r\n" % (start, b"".join(lines))
