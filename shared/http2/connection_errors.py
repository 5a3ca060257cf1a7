"""The errors of an HTTP/2 connection, before either end maps them to its own."""

from __future__ import annotations

from enum import IntEnum
from typing import Self


class ErrorCode(IntEnum):
    """The error codes of RFC 9113, section 7."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


def code_name(code: int) -> str:
    """The name of an error code, such as `CANCEL`, or `0x2a` for one that the RFC does not define."""
    try:
        return ErrorCode(code).name
    except ValueError:
        return hex(code)


class Http2Error(Exception):
    """The base of this module's errors."""


class ProtocolViolation(Http2Error):
    """The peer broke a rule or exceeded a limit. GOAWAY is sent with the code, and the connection ends."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code


class StreamFailed(Http2Error):
    """The base of a stream's errors: it carries nothing more, though a message on it was not complete."""

    def copy(self) -> Self:
        """An equal error, to be raised. A stream never raises the one that it keeps: its traceback would
        refer to frames, and these to the stream, so that all of them would wait for a garbage collection."""
        made = type(self).__new__(type(self), *self.args)
        made.__dict__.update(self.__dict__)
        return made


class StreamReset(StreamFailed):
    """A RST_STREAM, from the peer or from this end."""

    def __init__(self, code: int, *, by_peer: bool) -> None:
        super().__init__(f"stream reset by {'peer' if by_peer else 'us'}: {code_name(code)}")
        self.code = code
        self.by_peer = by_peer


class StreamRefused(StreamFailed):
    """The peer did not process this stream: the request may be repeated elsewhere."""


class ConnectionLost(StreamFailed):
    """The connection under the stream is gone. What the peer did with the request is unknown."""
