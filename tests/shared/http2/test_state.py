from __future__ import annotations

from h2.connection import H2Connection

from shared.http2.connection import Connection
from shared.http2.connection_config import ConnectionConfig
from tests.shared.http2.pair import RESPONSE, Pair

PLAIN = ConnectionConfig(fast=False)


def counted(connection: Connection) -> tuple[int, int]:
    return connection.h2.open_outbound_streams, connection.h2.open_inbound_streams


def test_open_streams_are_counted_as_h2_counts_them() -> None:
    assert "_open_streams" in vars(H2Connection), "what we override is gone"
    pair = Pair(PLAIN, PLAIN)
    streams = [pair.exchange(end=True) for _ in range(5)]
    assert counted(pair.client.connection) == (5, 0)
    assert counted(pair.server.connection) == (0, 5)
    streams[0][0].reset()
    streams[1][1].reset()
    streams[2][1].finish()
    pair.settle()
    for connection in (pair.client.connection, pair.server.connection):
        assert sum(counted(connection)) == len(connection.streams) == 2
        assert sum(H2Connection._open_streams(connection.h2, remainder) for remainder in (0, 1)) == 2


def test_what_comes_late_for_a_closed_stream_is_judged_by_how_it_closed() -> None:
    pair = Pair(PLAIN, PLAIN)
    ours, theirs = pair.request(end=True)
    pair.server.connection.respond(theirs, RESPONSE, end=True)
    pair.settle()
    assert pair.client.connection.h2._stream_is_closed_by_end(ours.id)
    ours, theirs = pair.exchange(end=True)
    ours.reset()
    pair.settle()
    assert pair.server.connection.h2._stream_is_closed_by_reset(theirs.id)
