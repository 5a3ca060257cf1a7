"""The protocol's state: `h2`, set up as this hop needs it."""

from __future__ import annotations

import logging
from typing import cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings

from shared.http2 import frames, limits

logging.getLogger("hpack").setLevel(logging.INFO)  # at DEBUG it logs every header's value, secrets too


class ProtocolState(H2Connection):
    """A connection of `h2` that sees no stream (`connection.FastPath`). Its settings are in place before the
    first frame, not changed by a second one."""

    def __init__(
        self, *, client: bool, stream_window_len: int, connection_window_len: int, streams_max: int
    ) -> None:
        super().__init__(H2Configuration(client_side=client))
        announced: dict[int, int] = {
            SettingCodes.ENABLE_PUSH: 0,
            SettingCodes.INITIAL_WINDOW_SIZE: stream_window_len,
            SettingCodes.MAX_FRAME_SIZE: limits.FRAME_LEN_MAX,
            SettingCodes.MAX_CONCURRENT_STREAMS: streams_max,
            SettingCodes.MAX_HEADER_LIST_SIZE: limits.HEADER_LIST_LEN_MAX,
            frames.TAKES_REPORTS: 1,
        }
        self.local_settings = Settings(
            client=client, initial_values=cast("dict[SettingCodes, int]", announced)
        )
        self.initiate_connection()
        self.clear_outbound_data_buffer()
        if not client:
            self.receive_data(frames.PREFACE)  # the splitter checks the real one
        if surplus := connection_window_len - limits.INITIAL_WINDOW_LEN:
            self.increment_flow_control_window(surplus)
        preface = frames.PREFACE if client else b""
        settings = frames.settings({int(code): value for code, value in announced.items()})
        self.greeting = preface + settings + self.data_to_send()
