"""The protocol's state: `h2`, set up as this hop needs it."""

from __future__ import annotations

import logging
from typing import cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings

from shared.http2 import frames, limits
from shared.http2.headers import LiteralEncoder

logging.getLogger("hpack").setLevel(logging.INFO)  # at DEBUG it logs every header's value, secrets too


class ProtocolState(H2Connection):
    """A connection of `h2` with four changes.

    - It counts open streams, for every stream that is opened, by walking over all that it knows: 0.3 us each,
      twice a request. Here closed streams are forgotten when they close, and the count is a length. (This
      overrides two private names; were they renamed, test_state.py would fail.)
    - It would end the connection of a peer that opens one stream too many. Its own limit is twice
      `streams_max`, so that the surplus can be refused stream by stream.
    - It encodes header lists with a table that is of no use here (headers.py).
    - Its settings must be in place before the first frame, not changed by a second one.
    """

    def __init__(
        self, *, client: bool, stream_window_len: int, connection_window_len: int, streams_max: int
    ) -> None:
        super().__init__(
            H2Configuration(
                client_side=client,
                header_encoding=None,
                validate_outbound_headers=False,  # `headers.header_list` has done both
                normalize_outbound_headers=False,
                normalize_inbound_headers=False,  # `headers.Headers` joins cookies
            )
        )
        self.encoder = LiteralEncoder()  # type: ignore[assignment]  # it has what h2 asks for
        announced: dict[int, int] = {
            SettingCodes.ENABLE_PUSH: 0,
            SettingCodes.INITIAL_WINDOW_SIZE: stream_window_len,
            SettingCodes.MAX_FRAME_SIZE: limits.FRAME_LEN_MAX,
            SettingCodes.MAX_CONCURRENT_STREAMS: streams_max,
            SettingCodes.MAX_HEADER_LIST_SIZE: limits.HEADER_LIST_LEN_MAX,
            frames.TAKES_REPORTS: 1,
        }
        kept = cast(
            "dict[SettingCodes, int]", {**announced, SettingCodes.MAX_CONCURRENT_STREAMS: 2 * streams_max}
        )
        self.local_settings = Settings(client=client, initial_values=kept)
        self.decoder.max_header_list_size = limits.HEADER_LIST_LEN_MAX
        self.initiate_connection()
        self.clear_outbound_data_buffer()
        if not client:
            self.receive_data(frames.PREFACE)  # the splitter checks the real one
        if surplus := connection_window_len - limits.INITIAL_WINDOW_LEN:
            self.increment_flow_control_window(surplus)
        preface = frames.PREFACE if client else b""
        settings = frames.settings({int(code): value for code, value in announced.items()})
        self.greeting = preface + settings + self.data_to_send()

    def forget(self, stream_id: int) -> None:
        """Forget a closed stream. Frames that still come for it are judged by how it was closed."""
        stream = self.streams.pop(stream_id, None)
        if stream is not None:
            assert stream.closed, stream_id
            self._closed_streams[stream_id] = stream.closed_by

    def _open_streams(self, remainder: int) -> int:
        """The number of open streams. Push is off: all streams are the client's, and those have odd ids."""
        return len(self.streams) if remainder else 0
