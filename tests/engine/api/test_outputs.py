"""Bounded output: what queued while the writer waited comes as one, and errors come last."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api.answer.chat import ChatEncoder
from engine.api.answer.completions import CompletionEncoder
from engine.api.answer.detokenizer import Detokenizer
from engine.api.answer.encoder import Answered, Heading
from engine.api.answer.outputs import (
    TRAIL_MAX,
    UNSENT_TEXT_LEN_MAX,
    UNSENT_TOKENS_MAX,
    ChoiceOutput,
    Delta,
    RequestOutput,
)
from engine.api.answer.parts import Part
from engine.api.answer.stop_strings import StopStrings
from engine.contract.messages import Finished, FinishReason, Started, TokenLogprobs
from shared.apis.chat import ChatChunk
from shared.apis.completions import Completion
from shared.wire.errors import EngineFailed, SlowClient
from tests.engine.api import tiny
from tests.engine.api.test_detokenizer import BYTE_FALLBACK, BYTES, Pieces, bundle

PIECES = ["a", "b", "c", "<e", "nd>", "", "d"]


def choice(
    output: RequestOutput, *, index: int = 0, stops: tuple[str, ...] = (), keeps_entries: bool = True
) -> ChoiceOutput:
    return ChoiceOutput(
        index,
        output,
        Detokenizer(Pieces(PIECES), StopStrings(stops) if stops else None),
        stop_token_ids=frozenset({6}),
        keeps_entries=keeps_entries,
        submitted_at=10.0,
    )


def finished(reason: FinishReason) -> Finished:
    return Finished(1, reason, 1.0, 2.0, 3.0, 4.0, 5)


async def test_what_queued_is_merged() -> None:
    output = RequestOutput(2)
    first, second = choice(output), choice(output, index=1)
    logprobs = TokenLogprobs(-1.0, [], [])
    first.on_token(0, logprobs, 0.0)
    second.on_token(2, logprobs, 0.0)
    first.on_token(1, logprobs, 0.0)
    deltas = await output.take()
    assert [(delta.index, delta.text, delta.is_first) for delta in deltas] == [
        (0, "ab", True),
        (1, "c", True),
    ]
    assert [(entry.token_id, entry.start) for entry in deltas[0].entries] == [(0, 0), (1, 1)]
    first.on_token(2, logprobs, 0.0)
    assert [(delta.text, delta.is_first) for delta in await output.take()] == [("c", False)]


async def test_a_waiting_writer_is_woken_once_there_is_text() -> None:
    output = RequestOutput(1)
    only = choice(output, stops=("<end>",))
    taking = asyncio.create_task(output.take())
    await asyncio.sleep(0)
    only.on_token(3, None, 0.0)
    await asyncio.sleep(0)
    assert not taking.done()
    only.on_token(0, None, 0.0)
    assert [delta.text for delta in await taking] == ["<ea"]


async def test_entries_leave_with_their_text() -> None:
    output = RequestOutput(1)
    only = choice(output, stops=("<end>",))
    for token in (0, 3):
        only.on_token(token, None, 0.0)
    [delta] = await output.take()
    assert [entry.token_id for entry in delta.entries] == [0]
    assert only.on_token(4, None, 0.0)
    [delta] = await output.take()
    assert (delta.text, delta.entries, delta.finish_reason) == ("", [], "stop")
    assert only.completion_tokens == 3


@pytest.mark.parametrize(("answer", "stops"), [("aé!", ("ax", "é!")), ("ax日本", ("ax日y", "日本"))])
async def test_no_token_of_a_stop_string_is_listed(answer: str, stops: tuple[str, ...]) -> None:
    """Not even the first byte of its first character, where text before it was held back for another one."""
    output = RequestOutput(1)
    decoder = BYTE_FALLBACK.decode_stream([])
    only = ChoiceOutput(0, output, Detokenizer(decoder, StopStrings(stops)), keeps_entries=True)
    ids = [BYTES[byte] for byte in answer.encode()]
    assert [only.on_token(token_id, None, 0.0) for token_id in ids] == [False] * (len(ids) - 1) + [True]
    [delta] = await output.take()
    listed = b"".join(BYTE_FALLBACK.token_bytes(entry.token_id) for entry in delta.entries)
    assert delta.text
    assert listed == delta.text.encode()


async def test_a_stop_token_counts_and_has_no_text() -> None:
    output = RequestOutput(1)
    only = choice(output)
    only.on_token(0, TokenLogprobs(-1.0, [], []), 0.0)
    assert not only.on_token(6, TokenLogprobs(-1.0, [], []), 0.0)
    only.on_finished(finished(FinishReason.STOP))
    [delta] = await output.take()
    assert (delta.text, delta.finish_reason) == ("a", "stop")
    assert [(entry.token_id, entry.logprobs is None) for entry in delta.entries] == [(0, False), (6, True)]
    assert only.completion_tokens == 2
    assert output.is_done


async def test_an_error_comes_after_what_was_said() -> None:
    output = RequestOutput(1)
    only = choice(output)
    only.on_token(0, None, 0.0)
    output.fail(EngineFailed("first"))
    output.fail(EngineFailed("second"))
    assert [delta.text for delta in await output.take()] == ["a"]
    with pytest.raises(EngineFailed, match="first"):
        await output.take()


async def test_a_whole_answer_comes_at_the_end_or_not_at_all() -> None:
    output = RequestOutput(2, whole=True)
    first, second = choice(output), choice(output, index=1)
    taking = asyncio.create_task(output.take())
    for one in (first, second):
        one.on_token(0, None, 0.0)
        await asyncio.sleep(0)
        assert not taking.done()
        one.on_finished(finished(FinishReason.LENGTH))
    assert [delta.text for delta in await taking] == ["a", "a"]
    failing = RequestOutput(1, whole=True)
    choice(failing).on_token(0, None, 0.0)
    failing.fail(EngineFailed("gone"))
    with pytest.raises(EngineFailed):
        await failing.take()


def test_times_are_known_at_every_moment() -> None:
    only = choice(RequestOutput(1))
    assert only.timing(12.0).queue_s == 2.0
    assert only.stage == "queue"
    only.on_started(Started(1, 7, 1.5))
    assert (only.timing(12.0).queue_s, only.timing(12.0).prefill_s) == (1.5, 0.5)
    assert (only.stage, only.cached_len) == ("prefill", 7)
    only.on_token(0, None, 13.0)
    timing = only.timing(20.0)
    assert (timing.queue_s, timing.prefill_s, timing.decode_s) == (1.5, 1.5, 7.0)
    only.on_finished(finished(FinishReason.LENGTH))
    timing = only.timing(99.0)
    assert (timing.prefill_s, timing.decode_s, timing.preempted_s, timing.preemptions) == (2.0, 3.0, 4.0, 5)


# -- backpressure ---------------------------------------------------------------------------------


async def test_it_is_behind_past_the_mark_and_not_once_everything_is_taken() -> None:
    output = RequestOutput(1)
    only = choice(output)
    for _ in range(UNSENT_TOKENS_MAX - 1):
        only.on_token(0, None, 0.0)
    assert not only.is_behind
    only.on_token(0, None, 0.0)
    assert only.is_behind
    [delta] = await output.take()
    assert len(delta.text) == len(delta.entries) == UNSENT_TOKENS_MAX, "merged into one"
    assert not only.is_behind
    only.on_token(0, None, 0.0)
    assert not only.is_behind


def test_long_tokens_reach_the_mark_of_the_text() -> None:
    output = RequestOutput(1)
    long = ChoiceOutput(0, output, Detokenizer(Pieces(["x" * (UNSENT_TEXT_LEN_MAX // 4)])))
    for count in range(1, 5):
        long.on_token(0, None, 0.0)
        assert long.is_behind == (count == 4)


def test_choices_are_behind_one_by_one() -> None:
    output = RequestOutput(2)
    fast, slow = choice(output), choice(output, index=1)
    fast.on_token(0, None, 0.0)
    for _ in range(UNSENT_TOKENS_MAX):
        slow.on_token(0, None, 0.0)
    assert (fast.is_behind, slow.is_behind) == (False, True)


def test_a_whole_answer_is_never_behind() -> None:
    only = choice(RequestOutput(1, whole=True))
    for _ in range(2 * UNSENT_TOKENS_MAX):
        only.on_token(0, None, 0.0)
    assert not only.is_behind


async def test_tokens_without_text_are_no_reason_to_pause() -> None:
    """The writer would wait for text that a paused sequence cannot bring."""
    output = RequestOutput(1)
    only = choice(output, keeps_entries=False)
    for _ in range(2 * UNSENT_TOKENS_MAX):
        only.on_token(5, None, 0.0)
        assert not only.is_behind
    only.on_token(0, None, 0.0)
    assert not only.is_behind
    await output.take()
    for _ in range(2 * UNSENT_TOKENS_MAX):
        only.on_token(5, None, 0.0)
        assert not only.is_behind


async def test_tokens_without_text_are_sent_where_tokens_are_told() -> None:
    """And are a reason to pause: a client that does not read would have all of them held for it."""
    output = RequestOutput(1)
    only = choice(output, stops=("abd",))
    only.on_token(5, None, 0.0)
    [delta] = await output.take()
    assert (delta.text, [entry.token_id for entry in delta.entries]) == ("", [5])
    for token in (0, 5, 1, 5):
        only.on_token(token, None, 0.0)
    assert not output._news, "they may be behind a stop string"
    only.on_token(2, None, 0.0)
    [delta] = await output.take()
    assert (delta.text, [entry.token_id for entry in delta.entries]) == ("abc", [0, 5, 1, 5, 2])
    for _ in range(UNSENT_TOKENS_MAX):
        assert not only.is_behind
        only.on_token(5, None, 0.0)
    assert only.is_behind


@pytest.mark.parametrize("textless_at", [0, 1, 2, 3])
async def test_a_token_without_text_is_listed_up_to_the_stop_string(textless_at: int) -> None:
    output = RequestOutput(1)
    only = choice(output, stops=("bc",))
    tokens = [0, 1, 2]
    tokens.insert(textless_at, 5)
    for token in tokens[: 4 if textless_at < 3 else 3]:
        only.on_token(token, None, 0.0)
    [delta] = await output.take()
    assert (delta.text, delta.finish_reason) == ("a", "stop")
    listed = [entry.token_id for entry in delta.entries]
    assert listed == ([5, 0], [0, 5], [0], [0])[textless_at]


def test_what_is_held_behind_part_of_a_character_is_bounded() -> None:
    tokenizer = bundle(tiny.byte_level())
    [special] = tokenizer.encode(tiny.EOS)
    only = ChoiceOutput(0, RequestOutput(1), Detokenizer(tokenizer.decode_stream([])), keeps_entries=True)
    only.on_token(tokenizer.encode("日")[0], None, 0.0)
    for _ in range(2 * TRAIL_MAX):
        only.on_token(special, None, 0.0)
    assert len(only._trail) <= TRAIL_MAX
    assert only.is_behind


async def test_the_stall_deadline_comes_after_what_was_said() -> None:
    output = RequestOutput(1)
    only = choice(output)
    only.on_token(0, None, 0.0)
    only.on_finished(Finished(1, FinishReason.STALLED, 1.0, 2.0, 3.0, 4.0, 5, 6.0))
    assert [delta.text for delta in await output.take()] == ["a"]
    with pytest.raises(SlowClient):
        await output.take()
    assert only.timing(99.0).stalled_s == 6.0


def test_time_in_pauses_is_no_decoding() -> None:
    only = choice(RequestOutput(1))
    only.on_started(Started(1, 0, 1.0))
    only.on_token(0, None, 12.0)
    only.on_paused(13.0)
    assert only.stage == "stalled"
    assert (only.timing(15.0).decode_s, only.timing(15.0).stalled_s) == (1.0, 2.0)
    only.on_resumed(17.0)
    assert only.stage == "decode"
    assert (only.timing(18.0).decode_s, only.timing(18.0).stalled_s) == (2.0, 4.0)


class NoVocabulary:
    def token_bytes(self, token_id: int) -> bytes:
        raise AssertionError


def on_one_line(data: bytes) -> bytes:
    for char in "\x85\u2028\u2029":
        data = data.replace(char.encode(), f"\\u{ord(char):04x}".encode())
    return data


LINE_ENDS = st.text(st.sampled_from("a\x85\u2028\u2029\n\r\x0b\x0c\x1c"), min_size=1)


@given(
    text=st.text(min_size=1) | LINE_ENDS,
    model=st.text(max_size=20),
    index=st.integers(0, 63),
    usage=st.booleans(),
)
def test_a_template_makes_what_the_structs_make(text: str, model: str, index: int, usage: bool) -> None:
    heading = Heading("id-1", 1, model, "fp", usage, False, None)
    delta = Delta(index, [Part(text)], [], None, False)
    [chat] = ChatEncoder(heading, NoVocabulary(), Answered([], [[1]], [])).events(delta)
    assert len(chat.decode().splitlines()) == 2, "whatever a client takes for a line's end"
    chunk = msgspec.json.decode(chat.removeprefix(b"data: "), type=ChatChunk)
    assert (chunk.model, chunk.choices[0].index, chunk.choices[0].delta.content) == (model, index, text)
    assert chat == b"data: " + on_one_line(msgspec.json.encode(chunk)) + b"\n\n"
    outputs = [choice(RequestOutput(1))] * 64
    [event] = CompletionEncoder(heading, NoVocabulary(), Answered(outputs, [[1]] * 64, [None] * 64)).events(
        delta
    )
    completion = msgspec.json.decode(event.removeprefix(b"data: "), type=Completion)
    assert (completion.choices[0].index, completion.choices[0].text) == (index, text)
    assert event == b"data: " + on_one_line(msgspec.json.encode(completion)) + b"\n\n"
    assert (b'"usage":null' in chat) == usage
