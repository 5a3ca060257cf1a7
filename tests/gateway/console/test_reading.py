"""The reading of a chat's answer."""

from __future__ import annotations

from gateway.operators.chat_reading import TICKS_MAX, ChatReading, error_text


def event(text: str) -> bytes:
    return b'data: {"choices":[{"delta":{"content":"%b"}}]}\n' % text.encode()


def test_text_and_times_are_kept_and_told_from_where_the_page_is() -> None:
    reading = ChatReading()
    for at_ms, text in enumerate(("Hel", "lo", " you")):
        reading.take(event(text), float(at_ms))
    assert (reading.text_after(0), reading.text_after(5), reading.text_after(99)) == ("Hello you", " you", "")
    assert (reading.text_len, reading.ticks_ms) == (9, [0.0, 1.0, 2.0])
    assert reading.problem is not None
    reading.take(b"data: [DONE]\n", 3.0)
    assert reading.problem is None
    assert ChatReading().text_after(0) == ""


def test_other_lines_are_passed_over() -> None:
    reading = ChatReading()
    for line in (
        b"\n",
        b": comment\n",
        b"data: {broken\n",
        b'data: {"choices":[]}\n',
        b'data: {"usage":{}}\n',
    ):
        reading.take(line, 1.0)
    reading.take(b'data: {"choices":[{"delta":{"role":"assistant","content":null}}]}\n', 1.0)
    assert (reading.text_len, reading.ticks_ms) == (0, [])


def test_an_error_in_the_stream_is_told() -> None:
    reading = ChatReading()
    reading.take(event("a"), 1.0)
    reading.take(b'data: {"error":{"message":"The engine is gone."}}\n', 2.0)
    assert reading.problem == "The engine is gone."
    assert error_text(b'{"error":{"message":"Not today."}}') == "Not today."
    assert error_text(b"<html>") == "It was refused."


def test_the_times_are_bounded() -> None:
    reading = ChatReading()
    for _ in range(TICKS_MAX + 5):
        reading.take(event("a"), 1.0)
    assert len(reading.ticks_ms) == TICKS_MAX
    assert reading.text_len == TICKS_MAX + 5
