"""The interface through which a connection tells its owner what happened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from shared.http2.stream import Stream


class Owner(Protocol):
    """The owner of a connection: an endpoint, or a test.

    Its methods are called from within `Connection.receive` and the streams' methods. They must neither await
    nor call back.
    """

    def output_ready(self) -> None:
        """The output was empty and is not any more."""

    def stream_opened(self, stream: Stream) -> None:
        """A request's header list came, at a server."""

    def stream_closed(self, stream: Stream) -> None:
        """Both sides have ended the stream, or `stream.error` says why it ended early."""

    def load_told(self, payload: bytes) -> None:
        """The server has told its load, at a client."""

    def peer_changed(self) -> None:
        """SETTINGS, GOAWAY or the connection's end has changed how many streams may be opened."""
