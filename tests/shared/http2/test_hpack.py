"""Our header blocks, read by other people's decoder."""

from __future__ import annotations

import pytest
from hpack import Decoder
from hypothesis import given
from hypothesis import strategies as st

from shared.http2.hpack import LiteralEncoder
from tests.shared.http2.pair import REQUEST, RESPONSE

lengths = st.sampled_from([0, 1, 14, 15, 126, 127, 128, 254, 255, 256, 5000])
fields = st.builds(
    lambda name, name_len, value, value_len: (
        (name * name_len)[:name_len] or b"n",
        (value * value_len)[:value_len],
    ),
    st.binary(min_size=1, max_size=20),
    lengths,
    st.binary(min_size=1, max_size=20),
    lengths,
)
known = st.sampled_from(
    [*REQUEST, *RESPONSE, (b"content-length", b"12"), (b"accept-encoding", b"gzip, deflate")]
)


@given(st.lists(st.lists(fields | known, max_size=8), min_size=1, max_size=4))
def test_every_list_is_read_as_it_was(heads):
    encoder, decoder = LiteralEncoder(), Decoder()
    decoder.max_header_list_size = 2**20
    for head in heads:
        assert [tuple(field) for field in decoder.decode(encoder.encode(head), raw=True)] == head
    assert decoder.header_table_size == 0


@pytest.mark.parametrize("table_len", [0, 100, 2**16])
def test_whatever_table_the_peer_allows(table_len):
    encoder, decoder = LiteralEncoder(), Decoder()
    encoder.header_table_size = decoder.max_allowed_table_size = table_len
    assert decoder.decode(encoder.encode(RESPONSE), raw=True) == RESPONSE
