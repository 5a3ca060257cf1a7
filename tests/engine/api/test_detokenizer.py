"""Text leaves whole, and stop strings never do, wherever the tokens are cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.api.answer.detokenizer import Detokenizer
from engine.api.answer.stop_strings import StopMatcher, StopStrings
from shared.text.tokenizer import Tokenizer, TokenizerBundle
from tests.effort import drawn
from tests.engine.api import tiny

TEXTS = [
    "hello world",
    "日本語のテキスト, 中文",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈!",
    "naïve café, ÅÄÖ ß",
    "the é̀ combining",
    "नमस्ते दुनिया",
]


def bundle(tokenizer: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(TokenizerBundle(tokenizer_json=tokenizer.to_str()))


BYTE_LEVEL = bundle(tiny.byte_level())
BYTE_FALLBACK = bundle(tiny.byte_fallback())
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])


class Pieces:
    """A decoder whose tokens are strings: token i is `pieces[i]`."""

    lost_len = 0
    is_unfinished = False

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def step(self, token_id: int) -> str:
        return self._pieces[token_id]


def run(detokenizer: Detokenizer, ids: list[int]) -> Iterator[str]:
    """What leaves, token by token."""
    for token_id in ids:
        yield detokenizer.push(token_id)
        if detokenizer.stopped:
            return
    yield detokenizer.finish()


def naive(text: str, stops: list[str]) -> str:
    """Character by character, by definition."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return text[: end - max(map(len, matching))]
    return text


@BOTH
@pytest.mark.parametrize("text", TEXTS)
def test_ending_after_any_token_gives_whole_characters_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole, complete = tokenizer.decode(ids), ""
    for cut in range(1, len(ids) + 1):
        out = "".join(run(Detokenizer(tokenizer.decode_stream([])), ids[:cut]))
        assert "\ufffd" not in out
        assert whole.startswith(out)
        decoded = tokenizer.decode(ids[:cut])
        complete = decoded if "\ufffd" not in decoded else complete
        assert out.startswith(complete)
    assert out == whole


@BOTH
@pytest.mark.parametrize("text", TEXTS)
def test_the_prompt_may_end_anywhere(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode("the " + text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    for cut in range(1, len(ids)):
        prompt, output = ids[:cut], ids[cut:]
        out = "".join(run(Detokenizer(tokenizer.decode_stream(prompt)), output))
        prompt_text = tokenizer.decode(prompt)
        assert "\ufffd" not in out
        assert whole.endswith(out)
        if not prompt_text.endswith("\ufffd"):
            assert prompt_text + out == whole


@BOTH
@pytest.mark.parametrize("text", TEXTS)
def test_every_stop_string_at_every_position(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    for start in range(len(whole)):
        for end in range(start + 1, min(start + 6, len(whole)) + 1):
            stop = whole[start:end]
            detokenizer = Detokenizer(tokenizer.decode_stream([]), StopStrings([stop]))
            sent = ""
            for piece in run(detokenizer, ids):
                sent += piece
                assert naive(whole, [stop]).startswith(sent), "part of a stop string has leaked"
            assert sent == naive(whole, [stop])
            assert detokenizer.stopped
            assert detokenizer.released_len == len(sent)


PIECES = st.lists(st.text("ab", max_size=4), max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


@given(pieces=PIECES, stops=STOPS)
@example(pieces=["aab"], stops=["aabb", "ab"])
@settings(max_examples=drawn(100, whole=2000), deadline=None)
def test_the_cut_does_not_depend_on_the_tokens(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    detokenizer = Detokenizer(Pieces(pieces), StopStrings(stops))
    out = "".join(run(detokenizer, list(range(len(pieces)))))
    assert out == naive(text, stops)
    assert detokenizer.stopped == (any(stop in text for stop in stops))


@given(text=st.text("ab", max_size=20), stops=STOPS)
@settings(max_examples=drawn(100, whole=2000), deadline=None)
def test_what_is_held_is_exactly_the_longest_beginning_of_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    for end in range(1, len(text) + 1):
        if matcher.feed(text[end - 1]) is not None:
            return
        seen = text[:end]
        held = max((n for stop in stops for n in range(1, len(stop)) if seen.endswith(stop[:n])), default=0)
        assert matcher.held_len == held


def test_what_was_held_is_text_when_the_sequence_ends() -> None:
    detokenizer = Detokenizer(Pieces(["one <", "|en"]), StopStrings(["<|end|>"]))
    assert detokenizer.push(0) == "one "
    assert detokenizer.push(1) == ""
    assert detokenizer.finish() == "<|en"
    assert not detokenizer.stopped


BYTES = range(3, 3 + 256)
OFTEN = [BYTES[byte] for byte in "a日🌊é".encode()] * 20
PLACED = st.lists(st.sampled_from([*BYTES, *OFTEN, BYTES.stop + 1]))


@given(ids=PLACED)
@settings(max_examples=drawn(100, whole=2000), deadline=None)
def test_a_token_that_is_whole_stands_where_it_is_placed(ids: list[int]) -> None:
    """Whatever bytes stand before it, that are no character or none yet."""
    detokenizer = Detokenizer(BYTE_FALLBACK.decode_stream([]))
    placed = [detokenizer.push_placed(token_id) for token_id in ids]
    text, starts = "".join(part for part, _, _ in placed), [start for _, start, _ in placed]
    assert starts == sorted(starts)
    for token_id, start in zip(ids, starts, strict=True):
        own = BYTE_FALLBACK.token_bytes(token_id)
        if own.isascii():
            assert text[start:].startswith(own.decode())


def test_stop_strings_wait_for_the_least_number_of_tokens() -> None:
    pieces = ["a", "STOP", "b", "ST", "OP", "c"]
    detokenizer = Detokenizer(Pieces(pieces), StopStrings(["STOP"]), min_tokens=2)
    assert "".join(run(detokenizer, list(range(6)))) == "aSTOPb"
    assert detokenizer.stopped


def test_a_stop_string_does_not_begin_before_the_least_number_of_tokens() -> None:
    detokenizer = Detokenizer(Pieces(["ST", "OP", "x"]), StopStrings(["STOP"]), min_tokens=1)
    assert "".join(run(detokenizer, [0, 1, 2])) == "STOPx"


def test_bytes_that_are_no_character_do_not_hold_text_for_ever() -> None:
    ids = [BYTE_FALLBACK.encode("a", add_special_tokens=False)[-1]]
    lone = [3 + 0xFF] * 40
    out = "".join(run(Detokenizer(BYTE_FALLBACK.decode_stream(ids)), [*lone, *ids]))
    assert out.endswith("a")
