"""Answers in parts: what a machine reads leaves in order, and stop strings look at the text alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api.answer.detokenizer import PartsDetokenizer
from engine.api.answer.outputs import (
    UNSENT_TEXT_LEN_MAX,
    UNSENT_TOKENS_MAX,
    ChoiceOutput,
    Delta,
    RequestOutput,
)
from engine.api.answer.parts import Part, PartKind
from engine.api.answer.stop_strings import StopStrings
from engine.contract.messages import Finished, FinishReason, TokenLogprobs
from shared.wire.errors import GrammarFailed
from tests.engine.api.test_detokenizer import Pieces

STOP_TOKEN = 1000


def text(data: str) -> Part:
    return Part(data)


def thought(data: str) -> Part:
    return Part(data, PartKind.REASONING)


def call(number: int, name: str = "f") -> Part:
    return Part(name, PartKind.CALL, number, f"id{number}")


def arguments(number: int, data: str) -> Part:
    return Part(data, PartKind.ARGUMENTS, number)


class Scripted:
    """A machine that makes the given parts of each token, and the last ones at the end."""

    def __init__(self, script: Sequence[Sequence[Part]], ending: Sequence[Part] = ()) -> None:
        self._script, self._ending = script, ending
        self.reasoning_tokens = self.calls = 0

    def feed(self, token_id: int, text: str) -> Sequence[Part]:
        parts = self._script[token_id]
        self.calls += sum(part.kind is PartKind.CALL for part in parts)
        self.reasoning_tokens += any(part.kind is PartKind.REASONING for part in parts)
        return parts

    def finish(self) -> Sequence[Part]:
        return self._ending


def choice(
    output: RequestOutput,
    script: Sequence[Sequence[Part]],
    *,
    ending: Sequence[Part] = (),
    stops: Sequence[str] = (),
    min_tokens: int = 0,
    keeps_entries: bool = False,
    tells_calls: bool = True,
) -> ChoiceOutput:
    return ChoiceOutput(
        0,
        output,
        PartsDetokenizer(
            Pieces([""] * len(script)),
            Scripted(script, ending),
            StopStrings(stops) if stops else None,
            min_tokens,
        ),
        stop_token_ids=frozenset({STOP_TOKEN}),
        keeps_entries=keeps_entries,
        tells_calls=tells_calls,
    )


def ended(reason: FinishReason) -> Finished:
    return Finished(1, reason, 1.0, 2.0, 3.0, 4.0, 5)


async def whole(
    script: Sequence[Sequence[Part]],
    *,
    reason: FinishReason = FinishReason.STOP,
    ending: Sequence[Part] = (),
    stops: Sequence[str] = (),
    min_tokens: int = 0,
    tells_calls: bool = True,
) -> Delta:
    output = RequestOutput(1, whole=True)
    only = choice(output, script, ending=ending, stops=stops, min_tokens=min_tokens, tells_calls=tells_calls)
    for token in range(len(script)):
        if only.on_token(token, None, 0.0):
            break
    if only.finish_reason is None:
        only.on_finished(ended(reason))
    [delta] = await output.take()
    return delta


async def test_parts_leave_in_order_and_joined_by_their_kind() -> None:
    script = [
        [thought("I ")],
        [thought("see."), text("Let")],
        [text(" me."), call(0), arguments(0, "{")],
        [arguments(0, "}"), call(1, "g"), arguments(1, "{}")],
        [text("Done")],
    ]
    delta = await whole(script)
    assert delta.parts == [
        thought("I see."),
        text("Let me."),
        call(0),
        arguments(0, "{}"),
        call(1, "g"),
        arguments(1, "{}"),
        text("Done"),
    ]
    assert delta.text == "Let me.Done"
    assert delta.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("reason", "tells_calls", "told"),
    [
        (FinishReason.STOP, True, "tool_calls"),
        (FinishReason.STOP, False, "stop"),
        (FinishReason.LENGTH, True, "length"),
    ],
)
async def test_the_finish_reason_of_calls(reason: FinishReason, tells_calls: bool, told: str) -> None:
    delta = await whole([[call(0)]], ending=[arguments(0, "{}")], reason=reason, tells_calls=tells_calls)
    assert delta.finish_reason == told
    assert delta.parts == [call(0), arguments(0, "{}")]


async def test_no_call_no_tool_calls() -> None:
    assert (await whole([[text("none")]])).finish_reason == "stop"


@pytest.mark.parametrize(
    ("script", "left", "told"),
    [
        ([[thought("a end b")], [text("c e")], [text("nd d")]], [thought("a end b"), text("c ")], "stop"),
        ([[call(0), arguments(0, '{"end"')], [arguments(0, "}")]], None, "tool_calls"),
        ([[text("e")], [call(0), arguments(0, "{}")], [text("nd")]], None, "tool_calls"),
        ([[thought("e"), text("nd")]], None, "stop"),
        (
            [[call(0), arguments(0, "{}")], [text("xend")]],
            [call(0), arguments(0, "{}"), text("x")],
            "tool_calls",
        ),
    ],
    ids=["behind reasoning", "in arguments", "around a call", "across kinds", "behind a call"],
)
async def test_stop_strings_look_at_text_alone(
    script: list[list[Part]], left: list[Part] | None, told: str
) -> None:
    delta = await whole(script, stops=["end"])
    joined = [part for token in script for part in token]
    if left is None:
        assert "".join(part.text for part in delta.parts) == "".join(part.text for part in joined)
    else:
        assert delta.parts == left
    assert delta.finish_reason == told


async def test_a_stop_string_in_what_the_machine_held_to_the_end() -> None:
    delta = await whole(
        [[text("a")]], ending=[text("xendy"), call(0)], stops=["end"], reason=FinishReason.LENGTH
    )
    assert (delta.parts, delta.finish_reason) == ([text("ax")], "stop")


async def test_text_of_the_first_tokens_is_no_stop_string() -> None:
    delta = await whole([[thought("a")], [text("end")], [text(" b end")]], stops=["end"], min_tokens=2)
    assert delta.parts == [thought("a"), text("end b ")]


async def test_what_a_client_does_not_read_counts_whatever_its_kind() -> None:
    for part in (thought("a"), arguments(0, "a")):
        output = RequestOutput(1)
        only = choice(output, [[part]] * UNSENT_TOKENS_MAX)
        for token in range(UNSENT_TOKENS_MAX):
            assert not only.is_behind
            only.on_token(token, None, 0.0)
        assert only.is_behind
        only.take()
        assert not only.is_behind
    only = choice(RequestOutput(1), [[arguments(0, "a" * UNSENT_TEXT_LEN_MAX)]])
    only.on_token(0, None, 0.0)
    assert only.is_behind


async def test_nothing_is_behind_while_the_machine_holds_it() -> None:
    output = RequestOutput(1)
    only = choice(output, [[]] * 2 * UNSENT_TOKENS_MAX)
    taking = asyncio.create_task(output.take())
    for token in range(2 * UNSENT_TOKENS_MAX):
        only.on_token(token, None, 0.0)
    await asyncio.sleep(0)
    assert not only.is_behind
    assert not taking.done()
    taking.cancel()


async def test_every_token_is_listed_once_and_none_of_a_stop_string() -> None:
    script = [[thought("a")], [], [text("bc")], [text("e")], [text("nd")]]
    output = RequestOutput(1)
    only = choice(output, script, stops=["end"], keeps_entries=True)
    listed = []
    for token in range(len(script)):
        only.on_token(token, TokenLogprobs(-1.0, [], []), 0.0)
        if only._has_news:
            listed += [entry.token_id for entry in only.take().entries]
    assert listed == [0, 1, 2]


async def test_a_grammar_that_fails_is_an_error() -> None:
    output = RequestOutput(1)
    only = choice(output, [[text("a")]])
    only.on_token(0, None, 0.0)
    only.on_finished(ended(FinishReason.GRAMMAR))
    assert [delta.text for delta in await output.take()] == ["a"]
    with pytest.raises(GrammarFailed):
        await output.take()


PARTS = st.lists(
    st.one_of(
        st.text("abc", min_size=1, max_size=4).map(text),
        st.text("abc", min_size=1, max_size=4).map(thought),
        st.text("abc", min_size=1, max_size=4).map(lambda data: arguments(0, data)),
    ),
    max_size=3,
)


@given(script=st.lists(PARTS, max_size=8), stops=st.lists(st.text("abc", min_size=1, max_size=3), max_size=2))
def test_streamed_parts_are_the_whole_ones(script: list[list[Part]], stops: list[str]) -> None:
    async def streamed() -> list[Part]:
        output = RequestOutput(1)
        only = choice(output, script, stops=stops)
        parts: list[Part] = []
        for token in range(len(script)):
            stopped = only.on_token(token, None, 0.0)
            parts += only.take().parts
            if stopped:
                break
        if only.finish_reason is None:
            only.on_finished(ended(FinishReason.STOP))
            parts += only.take().parts
        return parts

    joined: list[Part] = []
    for part in asyncio.run(streamed()):
        if joined and (joined[-1].kind, joined[-1].call) == (part.kind, part.call):
            part = part._replace(text=joined.pop().text + part.text)
        joined.append(part)
    assert joined == asyncio.run(whole(script, stops=stops)).parts
