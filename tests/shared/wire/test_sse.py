from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.wire import sse
from shared.wire.causes import CODE_LEN_MAX, COUNT_MAX
from shared.wire.errors import EngineFailed
from shared.wire.shapes import USED_TOKENS_MAX
from shared.wire.sse import CLOSING_LEN_MAX, DONE, EVENT_LEN_MAX, Closing, TailScanner

CLOSING = Closing(
    end_reason="stop",
    prompt_tokens=12,
    completion_tokens=3,
    cached_tokens=8,
    queue_ms=0.1,
    prefill_ms=12.25,
    decode_ms=80.5,
    preempted_ms=0.0,
    preemptions=0,
)
COMMENT = sse.closing_comment(CLOSING)


def forward(scanner: TailScanner, chunk: bytes) -> bytes:
    """The bytes that a relay forwards of a chunk."""
    return chunk if scanner.takes(chunk) else scanner.feed(chunk)


def scan(chunks: list[bytes]) -> tuple[bytes, TailScanner]:
    scanner = TailScanner()
    forwarded = b"".join(forward(scanner, chunk) for chunk in chunks)
    return forwarded + scanner.finish(), scanner


pieces = st.sampled_from(
    [
        sse.event(b'{"a":1}'),
        sse.event('{"text":"\\n\\n: penstock {} жж"}'.encode()),
        DONE,
        COMMENT,
        b": penstock {}\n\n",
        b": penstock not json\n\n",
        b": penstock {}",
        b": keep-alive\n\n",
        b": ",
        b"\n",
        b"\n\n\n",
        b"data: half",
        b": penstock " + b"x" * CLOSING_LEN_MAX,
    ]
)
streams = st.lists(pieces | st.binary(max_size=6), max_size=8).map(b"".join)


def expected(stream: bytes) -> tuple[bytes, Closing | None]:
    """By definition: cut the comment off the whole stream, and an event that does not end."""
    if stream.endswith(COMMENT):
        rest = stream.removesuffix(COMMENT)
        if not rest or rest.endswith(b"\n\n"):
            return rest, CLOSING
    whole = b"\n\n" + stream
    return whole[2 : whole.rfind(b"\n\n") + 2], None


@given(streams, st.data())
@example(DONE + COMMENT, None)
def test_any_chunking_of_any_stream_forwards_the_same(stream: bytes, data: st.DataObject | None) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=12))) if data else [3, 15]
    chunks = [stream[a:b] for a, b in itertools.pairwise([0, *cuts, len(stream)])]
    forwarded, scanner = scan(chunks)
    assert (forwarded, scanner.closing) == expected(stream)
    assert scanner.saw_done == (b"\n\n" + forwarded).endswith(b"\n\n" + DONE)
    assert scanner.at_boundary


def test_every_single_cut_and_every_byte_alone() -> None:
    stream = sse.event(b'{"x":": penstock {"}') + DONE + COMMENT
    want = stream.removesuffix(COMMENT)
    for cut in range(len(stream) + 1):
        forwarded, scanner = scan([stream[:cut], stream[cut:]])
        assert (forwarded, scanner.closing, scanner.saw_done) == (want, CLOSING, True)
    forwarded, scanner = scan([stream[i : i + 1] for i in range(len(stream))])
    assert (forwarded, scanner.closing, scanner.saw_done) == (want, CLOSING, True)


@given(streams, st.integers(1, 700))
def test_withheld_bytes_are_bounded(stream: bytes, size: int) -> None:
    scanner = TailScanner()
    fed = forwarded = 0
    for start in range(0, len(stream), size):
        chunk = stream[start : start + size]
        fed += len(chunk)
        forwarded += len(forward(scanner, chunk))
        assert 0 <= fed - forwarded <= EVENT_LEN_MAX
        assert scanner.at_boundary


@pytest.mark.parametrize("size", [1000, EVENT_LEN_MAX, 3 * EVENT_LEN_MAX])
def test_an_event_that_is_too_long_to_hold_is_forwarded_as_it_comes(size: int) -> None:
    stream = DONE + sse.event(b"x" * 2 * EVENT_LEN_MAX) + DONE + COMMENT
    scanner = TailScanner()
    fed, forwarded = 0, b""
    for start in range(0, len(stream), size):
        chunk = stream[start : start + size]
        fed += len(chunk)
        forwarded += forward(scanner, chunk)
        assert fed - len(forwarded) <= EVENT_LEN_MAX
        assert scanner.at_boundary == forwarded.endswith(b"\n\n")
    assert (forwarded + scanner.finish(), scanner.closing) == (stream.removesuffix(COMMENT), CLOSING)
    assert scanner.saw_done


def test_a_comment_that_never_ends_is_not_withheld() -> None:
    scanner = TailScanner()
    comment = b": penstock " + b"x" * EVENT_LEN_MAX
    forwarded = b"".join(scanner.feed(comment[at : at + 1000]) for at in range(0, len(comment), 1000))
    assert len(comment) - len(forwarded) <= EVENT_LEN_MAX
    assert comment.startswith(forwarded)


def test_a_chunk_without_a_possible_tail_is_not_copied() -> None:
    scanner = TailScanner()
    chunks = [
        sse.event(b'{"text":"hello"}'),
        b'data: {"text":": penstock {}"}\n\n',
        b": keep-alive\n\n",
        DONE,
    ]
    for chunk in chunks:
        assert scanner.feed(chunk) is chunk


@given(st.lists(pieces | st.binary(max_size=6), max_size=12))
@example([COMMENT, sse.event(b'{"text":"behind it"}')])
@example([sse.event(b"x" * 2 * EVENT_LEN_MAX)[:-2], sse.event(b'{"text":"within it"}'), COMMENT])
def test_an_event_is_taken_only_where_it_would_be_forwarded_as_it_is(chunks: list[bytes]) -> None:
    one, other = TailScanner(), TailScanner()
    for chunk in chunks:
        assert forward(one, chunk) == other.feed(chunk)
        assert (one.saw_done, one.at_boundary, one.closing) == (
            other.saw_done,
            other.at_boundary,
            other.closing,
        )
    assert one.finish() == other.finish()


@pytest.mark.parametrize(
    ("chunk", "is_taken"),
    [
        (sse.event(b'{"text":"hello"}'), True),
        (sse.event(b'{"text":"one"}') + sse.event(b'{"text":"two"}'), False),
        (sse.event(b'{"text":"two\ndata: lines"}'), False),
        (b"event: named\ndata: {}\n\n", False),
        (b'data: {"text":"no end"}\n', False),
        (DONE, False),  # shorter than what is compared at the end
        (COMMENT, False),
    ],
)
def test_an_event_of_one_line_is_taken(chunk: bytes, is_taken: bool) -> None:
    assert TailScanner().takes(chunk) is is_taken


def test_nothing_is_taken_while_a_beginning_is_withheld() -> None:
    scanner = TailScanner()
    assert scanner.feed(b"data: half") == b""
    assert not scanner.takes(sse.event(b'{"text":"the other half"}'))


def test_a_comment_that_is_not_last_is_forwarded() -> None:
    stream = COMMENT + DONE
    forwarded, scanner = scan([COMMENT, DONE])
    assert (forwarded, scanner.closing, scanner.saw_done) == (stream, None, True)


def test_of_two_comments_only_the_last_is_kept() -> None:
    forwarded, scanner = scan([COMMENT, COMMENT])
    assert (forwarded, scanner.closing) == (COMMENT, CLOSING)


def test_a_comment_cut_short_is_dropped() -> None:
    forwarded, scanner = scan([DONE, COMMENT[:-1]])
    assert (forwarded, scanner.closing) == (DONE, None)
    assert scanner.saw_done


@pytest.mark.parametrize("cut", [b'data: {"a":', b'data: {"a":1}\n', b": keep"])
def test_an_event_that_is_cut_is_dropped(cut: bytes) -> None:
    forwarded, scanner = scan([sse.event(b"{}"), cut])
    assert forwarded == sse.event(b"{}")
    assert scanner.at_boundary
    assert not scanner.saw_done


def test_errors_are_openai_envelopes() -> None:
    assert sse.error_event(EngineFailed("The engine failed.")) == (
        b'data: {"error":{"message":"The engine failed.","type":"server_error","param":null,'
        b'"code":"engine_failed"}}\n\n'
    )


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"end_reason":1}', b"\xff", "{"])
def test_what_is_no_closing_is_none(data: bytes | str) -> None:
    assert sse.parse_closing(data) is None


@pytest.mark.parametrize("number", [-1, 2**63, 10**30])
@pytest.mark.parametrize("field", ["prompt_tokens", "completion_tokens", "cached_tokens", "preemptions"])
def test_a_closing_out_of_all_bounds_is_none(field: str, number: int) -> None:
    assert sse.parse_closing(f'{{"end_reason":"ok","{field}":{number}}}') is None


def test_a_closing_of_more_tokens_than_a_request_can_have_is_none() -> None:
    for tokens, is_read in ((USED_TOKENS_MAX, True), (USED_TOKENS_MAX + 1, False)):
        closing = sse.parse_closing(f'{{"end_reason":"ok","prompt_tokens":{tokens}}}')
        assert (closing is not None) == is_read


@pytest.mark.parametrize(
    "cause",
    [
        {"code": "x" * (CODE_LEN_MAX + 1), "ms": 1},
        {"code": "pages", "ms": 1, "step": COUNT_MAX + 1},
    ],
    ids=["code", "count"],
)
def test_a_closing_with_a_cause_out_of_all_bounds_is_none(cause: dict[str, Any]) -> None:
    assert sse.parse_closing(json.dumps({"end_reason": "ok", "causes": [cause]})) is None


def test_the_closing_survives_the_header() -> None:
    assert sse.parse_closing(sse.encode_closing(CLOSING).decode("ascii")) == CLOSING


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_are_the_same_however_they_arrive(size: int) -> None:
    data = b"a\n\r\nb\r\n\xe2\x80\xa8\x0b\x85c\rd\ne"
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    assert list(sse.lines(chunks)) == [b"a", b"", b"b", b"\xe2\x80\xa8\x0b\x85c\rd", b"e"]


def test_a_line_that_does_not_end_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "LINE_LEN_MAX", 100)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        list(sse.lines(b"x" for _ in range(102)))


def test_the_last_event_of_an_answer_is_its_dialects() -> None:
    done = b'event: response.completed\ndata: {"usage":{}}\n\n'
    scanner = TailScanner(done)
    assert scanner.feed(b"data: {}\n\n" + DONE) == b"data: {}\n\n" + DONE
    assert not scanner.saw_done
    forwarded = b"".join(scanner.feed(bytes([byte])) for byte in done + sse.closing_comment(CLOSING))
    assert forwarded == done
    assert scanner.saw_done
    assert scanner.closing == CLOSING


# -- events with names ----------------------------------------------------------------------------

SILENT = b"event: open\n"


@pytest.mark.parametrize(
    ("chunk", "is_taken"),
    [
        (sse.named_event(b"text", b'{"text":"a"}'), True),
        (sse.named_event(b"text", b"{}") * 2, False),
        (sse.named_event(b"open", b"{}"), False),
        (sse.event(b"{}"), False),
        (b"event: text\ndata: {}\n", False),
        (b"event: text\ndata: {}\nid: 1\n\n", False),
        (b"event: text\ndata: {}\n\n: \n", False),
        (COMMENT, False),
    ],
)
def test_an_event_with_a_name_is_taken_as_it_is(chunk: bytes, is_taken: bool) -> None:
    scanner = sse.NamedScanner(DONE, b"event: ", (SILENT,))
    assert scanner.takes(chunk) is is_taken
    if not is_taken:
        scanner.feed(b"event: half")
        assert not scanner.takes(sse.named_event(b"text", b"{}"))


@given(st.lists(st.sampled_from([b"text", b"open", b"done"]), max_size=6), st.booleans())
def test_taken_or_read_a_stream_is_the_same(names: list[bytes], is_whole: bool) -> None:
    chunks = [sse.named_event(name, b'{"a":"b"}') for name in names] + ([DONE] if is_whole else [])
    taking, reading = sse.NamedScanner(DONE, b"event: ", (SILENT,)), TailScanner()
    taken = b"".join(forward(taking, chunk) for chunk in [*chunks, COMMENT])
    read = b"".join(map(reading.feed, [*chunks, COMMENT]))
    assert taken == read == b"".join(chunks)
    assert taking.saw_done is reading.saw_done is is_whole
    assert taking.closing == reading.closing == CLOSING
