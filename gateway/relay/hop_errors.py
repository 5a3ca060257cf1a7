"""What becomes of a request that no engine answers, whatever the protocol. `gateway.relay.upstream` makes the
callers' errors of these, and of those of HTTP/2's streams."""

from __future__ import annotations


class HopError(Exception):
    """A request was not answered."""


class Unsendable(HopError):
    """The URL or a header cannot be sent."""


class NoConnection(HopError):
    """There is no connection. Nothing was sent."""


class NoConnectionInTime(HopError):
    """There was no connection, or no room on one, in time. Nothing was sent."""


class Draining(NoConnection):
    """The server accepts connections, and no requests: it sent GOAWAY right after its SETTINGS."""


class NotHttp2(NoConnection):
    """The server's first bytes were not those of HTTP/2, or it closed the connection without sending any."""


class Lost(HopError):
    """The connection broke off."""


class LostTwice(Lost):
    """A request was lost on a kept connection, and on a new one."""


class Malformed(HopError):
    """The server sent what is no answer of the protocol."""
