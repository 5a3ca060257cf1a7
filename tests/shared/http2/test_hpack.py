"""Our header blocks, read by other people's decoder, and other people's, read by ours."""

from __future__ import annotations

import pytest
from hpack import Decoder, Encoder
from hpack.exceptions import HPACKError
from hypothesis import given
from hypothesis import strategies as st

from shared.http2 import headers
from shared.http2.connection_errors import ErrorCode, ProtocolViolation
from shared.http2.headers import BadHeader, BlockDecoder, LiteralEncoder, _stateless, header_list
from shared.http2.limits import SENT_HEADER_LIST_LEN_MAX
from tests.shared.http2.pair import REQUEST, RESPONSE

Head = list[tuple[bytes, bytes]]

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
def test_every_header_list_survives_encoding_and_decoding(heads: list[Head]) -> None:
    encoder, decoder = LiteralEncoder(), Decoder()
    decoder.max_header_list_size = 2**20
    for head in heads:
        assert [tuple(field) for field in decoder.decode(encoder.encode(head), raw=True)] == head
    assert decoder.header_table_size == 0


@pytest.mark.parametrize("table_len", [0, 100, 2**16])
def test_whatever_table_the_peer_allows(table_len: int) -> None:
    encoder, decoder = LiteralEncoder(), Decoder()
    encoder.header_table_size = decoder.max_allowed_table_size = table_len
    assert decoder.decode(encoder.encode(RESPONSE), raw=True) == RESPONSE


@given(st.lists(st.lists(fields | known, max_size=8), min_size=1, max_size=4))
def test_encoded_blocks_decode_without_a_table(heads: list[Head]) -> None:
    encoder = LiteralEncoder()
    encoder.encode([])  # which says that there is no table
    assert [_stateless(encoder.encode(head)) for head in heads] == heads


@given(
    st.lists(
        st.tuples(st.lists(fields | known, max_size=8), st.booleans(), st.booleans()), min_size=1, max_size=5
    )
)
def test_blocks_with_and_without_a_table_may_come_in_any_order(blocks: list[tuple[Head, bool, bool]]) -> None:
    table, literal, decoder = Encoder(), LiteralEncoder(), BlockDecoder()
    literal.encode([])
    for head, with_table, huffman in blocks:
        block = table.encode(head, huffman=huffman) if with_table else literal.encode(head)
        assert decoder.decode(block) == head


pieces = st.sampled_from(
    [
        *(b"\x82", b"\x88", b"\xbd", b"\xbe", b"\x80"),  # indexed; the last two by the table, and by nothing
        *(b"\x00", b"\x10", b"\x04", b"\x0f\x10", b"\x0f\x80\x01", b"\x40", b"\x20", b"\x3f\xe1\x1f"),
        *(b"\x00", b"\x01v", b"\x7f\x00", b"\x7f\x80\x01", b"\x81\x1f", b"v" * 127, b"v" * 255),  # strings
    ]
)


@given(st.lists(pieces | st.binary(max_size=4), max_size=10).map(b"".join))
def test_random_blocks_decode_as_the_hpack_package_decodes_them(block: bytes) -> None:
    try:
        expected = [tuple(field) for field in Decoder().decode(block, raw=True)]
    except HPACKError:
        expected = None
    assert _stateless(block) in (None, expected)
    if expected is not None:
        assert BlockDecoder().decode(block) == expected
        return
    with pytest.raises(ProtocolViolation) as caught:
        BlockDecoder().decode(block)
    assert caught.value.code == ErrorCode.COMPRESSION_ERROR


def test_a_list_that_grows_beyond_its_limit_is_refused() -> None:
    """By one byte each: a field of the static table."""
    decoder = BlockDecoder()
    assert len(decoder.decode(b"\x90" * 1_000)) == 1_000
    with pytest.raises(ProtocolViolation) as caught:
        decoder.decode(b"\x90" * 2_000)
    assert caught.value.code == ErrorCode.ENHANCE_YOUR_CALM


def test_headers_that_a_peer_might_not_take_are_not_sent() -> None:
    assert header_list(REQUEST, [(b"x", b"v" * (SENT_HEADER_LIST_LEN_MAX // 2))])
    with pytest.raises(BadHeader):
        header_list(REQUEST, [(b"x", b"v" * SENT_HEADER_LIST_LEN_MAX)])


def test_names_are_kept_in_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "NAMES_MAX", len(headers._names) + 1)
    for number in range(3):
        name = b"x-a-name-of-this-test-%d" % number
        assert BlockDecoder().decode(LiteralEncoder().encode([(name, b"v")])) == [(name, b"v")]
    assert len(headers._names) == headers.NAMES_MAX
