"""The bounds of a body, at whatever server it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from shared.wire.errors import BodyTimeout, BodyTooLarge, InvalidRequest, Overloaded
from shared.wire.request_body import check_page, read_body

LEN_MAX = 10


class Sender:
    """A client's body, piece by piece; None is a piece that never comes."""

    def __init__(self, *pieces: bytes | None) -> None:
        self._pieces = list(pieces)
        self.told: list[str] = []
        self.held: list[int] = []

    async def read(self) -> bytes | None:
        self.told.append("read")
        piece = self._pieces.pop(0) if self._pieces else b""
        if piece is None:
            await asyncio.Event().wait()
        return piece

    async def go_on(self) -> None:
        self.told.append("go on")

    def hold(self, size: int) -> None:
        if size > 8:
            raise Overloaded("full")
        self.held.append(size)

    async def body(self, headers: Mapping[str, str], deadline_s: float = 60.0) -> bytes:
        return await read_body(
            headers, self.read, self.go_on, len_max=LEN_MAX, deadline_s=deadline_s, hold=self.hold
        )


async def test_a_body_is_held_as_it_comes() -> None:
    sender = Sender(b"abc", b"de")
    assert await sender.body({"content-length": "5"}) == b"abcde"
    assert sender.held == [3, 5]
    assert "go on" not in sender.told


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ({"content-encoding": "gzip"}, InvalidRequest),
        ({"content-length": "11"}, BodyTooLarge),
        ({"content-length": "9" * 19}, BodyTooLarge),
        ({"content-length": "9" * 5000}, BodyTooLarge),
    ],
)
async def test_what_the_headers_rule_out_is_not_read_nor_asked_for(
    headers: dict[str, str], error: type[Exception]
) -> None:
    sender = Sender(b"abc")
    with pytest.raises(error):
        await sender.body({**headers, "expect": "100-continue"})
    assert sender.told == []


async def test_a_client_that_waits_is_told_to_go_on_before_its_body_is_read() -> None:
    sender = Sender(b"abc")
    assert await sender.body({"expect": "100-Continue", "content-length": "0" * 30 + "3"}) == b"abc"
    assert sender.told[:2] == ["go on", "read"]


async def test_more_than_was_declared_is_found_with_the_piece_that_passes_the_bound() -> None:
    sender = Sender(b"abcdef", b"ghijk", b"never asked for")
    with pytest.raises(BodyTooLarge, match="10 bytes"):
        await sender.body({"content-length": "3"})
    assert sender.told == ["read", "read"]


async def test_a_body_that_does_not_arrive_is_given_up() -> None:
    with pytest.raises(BodyTimeout, match=r"within 0\.001 s"):
        await Sender(b"abc", None).body({}, deadline_s=0.001)


async def test_a_body_without_room_is_refused_while_it_comes() -> None:
    sender = Sender(b"abcde", b"fghi", b"never asked for")
    with pytest.raises(Overloaded):
        await sender.body({})
    assert sender.told == ["read", "read"]


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8"])
def test_a_page_sends_what_a_browser_asks_for_first(content_type: str) -> None:
    check_page({"origin": "http://evil.example", "content-type": content_type})


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_what_a_page_of_any_site_sends_without_being_asked_is_refused(content_type: str) -> None:
    headers = {"content-type": content_type} if content_type else {}
    check_page(headers)  # a program's
    for origin in ("http://evil.example", "null"):
        with pytest.raises(InvalidRequest) as refused:
            check_page({**headers, "origin": origin})
        assert refused.value.param == "content-type"
