"""Header lists, between HTTP/2's rules and what the two ends use.

Ours are checked before they reach HPACK: a header that is found wrong half way through an encoded list leaves
the compression state of the connection different at its two ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from shared.http2.errors import Http2Error
from shared.http2.limits import SENT_HEADER_LIST_LEN_MAX
from shared.http2.stream import HeaderList

CONNECTION_SPECIFIC: Final = frozenset(
    [b"connection", b"host", b"http2-settings", b"keep-alive", b"proxy-connection", b"te",
     b"transfer-encoding", b"upgrade"]
)  # fmt: skip
"""RFC 9113, 8.2.2: meant for one HTTP/1.1 connection; `host` travels as `:authority`."""

_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_VALUE: Final = re.compile(rb"[^\0\r\n]*")


class BadHeader(Http2Error):
    """A header of ours that HTTP/2 cannot carry. The value is not shown: it may be a secret."""


def fields(pairs: Iterable[tuple[bytes, bytes]]) -> HeaderList:
    """Lower-cased, stripped, without what belongs to HTTP/1.1 alone. Raises BadHeader."""
    result: HeaderList = []
    for raw_name, raw_value in pairs:
        name, value = raw_name.lower(), raw_value.strip(b" \t")
        if name in CONNECTION_SPECIFIC:
            continue
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise BadHeader(f"header {raw_name!r} cannot be sent")
        result.append((name, value))
    return result


def bounded(head: HeaderList) -> HeaderList:
    """As it is, unless it is so large that the peer might end the connection for it. Raises BadHeader."""
    if sum(len(name) + len(value) + 32 for name, value in head) > SENT_HEADER_LIST_LEN_MAX:
        raise BadHeader(f"the headers are larger than {SENT_HEADER_LIST_LEN_MAX} bytes")
    return head


class Headers(Mapping[str, str]):
    """What the peer sent, by name without regard to case. Repeated fields are joined (RFC 9110, 5.3)."""

    __slots__ = ("_values",)

    def __init__(self, head: HeaderList) -> None:
        values: dict[str, str] = {}
        for raw_name, raw_value in head:
            name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
            if name in values:
                separator = "; " if name == "cookie" else ", "
                value = f"{values[name]}{separator}{value}"
            values[name] = value
        if ":authority" in values:
            values.setdefault("host", values[":authority"])
        self._values = {name: value for name, value in values.items() if not name.startswith(":")}

    def __getitem__(self, name: str) -> str:
        return self._values[name.lower()]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
