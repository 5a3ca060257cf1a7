"""A response's items, however the answer comes: events and the whole answer are as described, and agree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.api.answer.custom_input import CustomInput
from engine.api.answer.encoder import Answered, Heading
from engine.api.answer.outputs import Delta, Entry
from engine.api.answer.parts import Part, PartKind
from engine.api.answer.responses import ResponsesEncoder
from engine.contract.messages import SamplingParams, TokenLogprobs
from shared.apis.generation import CompletionTokensDetails, FinishReasonName, PromptTokensDetails, Usage
from shared.apis.responses.repeated import repeated
from shared.apis.responses.request import ResponsesRequest
from shared.apis.validation import parse
from shared.wire.errors import EngineFailed, InvalidRequest, RequestAborted
from tests.described_responses import check_event, check_response, events_of, put_together, text_of

USAGE: Final = Usage(7, 5, 12, PromptTokensDetails(3), CompletionTokensDetails(2))
SAMPLING: Final = SamplingParams(seed=0, max_tokens=9, temperature=0.5, top_p=0.25)
TOOLS: Final = [
    {"type": "function", "name": "f", "description": None, "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "ns", "description": "d", "tools": [{"type": "custom", "name": "g"}]},
]


class Letters:
    """Token i is a character, token 5 is half of one, and tokens from 90 on are marks."""

    def token_bytes(self, token_id: int) -> bytes:
        return b"<mark>" if token_id >= 90 else b"\xff" if token_id == 5 else chr(97 + token_id % 26).encode()


def encoder(logprobs: int | None = None, **asked: Any) -> ResponsesEncoder:
    body = msgspec.json.encode({"model": "m", "input": "hi", "tools": TOOLS, **asked})
    parsed = parse(body, ResponsesRequest)
    heading = Heading("resp_ab", 10, "m", "fp", False, False, logprobs)
    answered = Answered(
        [], [], [None], sampling=SAMPLING, repeated=repeated(parsed.request, parsed.fields), wall=lambda: 20.5
    )
    return ResponsesEncoder(heading, Letters(), answered)


def streamed(deltas: Sequence[Delta], **asked: Any) -> list[dict[str, Any]]:
    """The events of a stream, all of them checked."""
    made = encoder(**asked)
    data = made.opening(USAGE) + b"".join(event for delta in deltas for event in made.events(delta))
    ending = made.ending(USAGE)
    assert ending.endswith(b"data: [DONE]\n\n")
    events = events_of(data + ending)
    for event in events:
        check_event(event)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    return events


def whole(parts: list[Part], reason: FinishReasonName, entries: Sequence[Entry] = (), **asked: Any) -> Any:
    body = b"".join(encoder(**asked).whole([Delta(0, parts, [*entries], reason, True)], USAGE))
    response = json.loads(body)
    check_response(response)
    return response


# -- any answer, in any pieces --------------------------------------------------------------------

texts = st.text(alphabet='ab"\\\n\u2028é😀%', min_size=1, max_size=12)
thoughts = texts.map(lambda text: [Part(text, PartKind.REASONING)])
prose = texts.map(lambda text: [Part(text)])
calls = st.tuples(
    st.sampled_from(["f", "patch", "ns__g", "unknown"]),
    st.one_of(
        texts.map(lambda text: json.dumps({"input": text})),
        texts.map(lambda text: json.dumps({"input": text}, ensure_ascii=False, indent=1)),
        st.sampled_from(["{}", '{"input": 3}', '{"other": "x", "input": "y"}', '{"input": "cut \\ud83']),
    ),
).map(lambda call: [Part(call[0], PartKind.CALL), Part(call[1], PartKind.ARGUMENTS)])


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[Part], list[Delta], FinishReasonName]:
    """The parts of an answer, and the same in deltas of any sizes."""
    runs = draw(st.lists(st.one_of(thoughts, prose, calls), max_size=5))
    parts: list[Part] = []
    number = -1
    for run in runs:
        number += run[0].kind is PartKind.CALL
        for part in run:
            is_call = part.kind in (PartKind.CALL, PartKind.ARGUMENTS)
            call_id = f"id{number}" if part.kind is PartKind.CALL else ""
            part = part._replace(call=number if is_call else -1, call_id=call_id)
            last = parts[-1] if parts else None
            if last is not None and last.kind is part.kind is not PartKind.CALL and last.call == part.call:
                parts[-1] = last._replace(text=last.text + part.text)
            else:
                parts.append(part)
    pieces = [
        part._replace(text=part.text[start:end]) if part.kind is not PartKind.CALL else part
        for part in parts
        for start, end in _cuts(draw, 0 if part.kind is PartKind.CALL else len(part.text))
    ]
    reason: FinishReasonName = draw(st.sampled_from(["stop", "length"]))
    deltas = [Delta(0, pieces[start:end], [], None, start == 0) for start, end in _cuts(draw, len(pieces))]
    last_delta = msgspec.structs.replace(deltas[-1], finish_reason=reason)
    return parts, [*deltas[:-1], last_delta], reason


def _cuts(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    """Bounds of pieces of something of this length, of which none is empty unless all is."""
    ends = sorted(draw(st.sets(st.integers(1, length), max_size=6))) if length else []
    bounds = [0, *(end for end in ends if end < length), length]
    return [*pairwise(bounds)]


@given(answers(), st.booleans(), st.booleans())
def test_events_and_the_whole_answer_tell_the_same(
    answer: tuple[list[Part], list[Delta], FinishReasonName], summary: bool, encrypted: bool
) -> None:
    parts, deltas, reason = answer
    asked: dict[str, Any] = {"reasoning": {"summary": "auto"}} if summary else {}
    asked |= {"include": ["reasoning.encrypted_content"]} if encrypted else {}
    events = streamed(deltas, **asked)
    last = events[-1]["response"]
    response = whole(parts, reason, **asked)
    assert last == response
    assert put_together(events) == response["output"]
    is_cut = reason == "length"
    assert events[-1]["type"] == ("response.incomplete" if is_cut else "response.completed")
    assert response["completed_at"] == (None if is_cut else 20)
    assert (response["incomplete_details"] is not None) == is_cut
    statuses = [item["status"] for item in response["output"]]
    assert statuses == ["completed"] * (len(statuses) - 1) + ["incomplete" if is_cut else "completed"]
    for item in response["output"]:
        if item["type"] == "reasoning":
            text = text_of(item)
            assert bool(item["summary"]) == summary == (not item["content"])
            assert item.get("encrypted_content") == (f"penstock:reasoning:{text}" if encrypted else None)


def test_an_answer_repeats_its_request() -> None:
    asked: dict[str, Any] = {
        "instructions": "Be brief.",
        "tool_choice": {"type": "custom", "name": "patch"},
        "metadata": {"a": "b"},
        "max_output_tokens": 9,
        "max_tool_calls": 2,
        "parallel_tool_calls": False,
        "top_logprobs": 0,
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "truncation": "auto",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "reasoning": {"effort": "low"},
    }
    response = whole([Part("hi")], "stop", **asked)
    changed = {
        "truncation": "disabled",
        "text": {"format": {**asked["text"]["format"], "description": None, "strict": False}},
        "reasoning": {"effort": "low", "summary": None},
    }
    assert {name: response[name] for name in asked} == asked | changed
    assert response["tools"] == TOOLS
    assert (response["temperature"], response["top_p"], response["service_tier"]) == (0.5, 0.25, "default")
    assert (response["store"], response["created_at"], response["id"]) == (False, 10, "resp_ab")
    usage = response["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (7, 5, 12)
    assert usage["input_tokens_details"] == {"cached_tokens": 3, "cache_write_tokens": 0}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 2}


def test_calls_are_told_as_their_tools_were_sent() -> None:
    parts = [
        Part("ns__g", PartKind.CALL, 0, "a"),
        Part('{"input": "x\\ny"}', PartKind.ARGUMENTS, 0),
        Part("f", PartKind.CALL, 1, "b"),
        Part('{"n": 1}', PartKind.ARGUMENTS, 1),
    ]
    custom, function = whole(parts, "tool_calls")["output"]
    assert (custom["type"], custom["name"], custom["namespace"]) == ("custom_tool_call", "g", "ns")
    assert (custom["input"], custom["call_id"]) == ("x\ny", "a")
    assert (function["type"], function["arguments"], function["call_id"]) == (
        "function_call",
        '{"n": 1}',
        "b",
    )
    assert "namespace" not in function


def test_a_stream_that_fails_says_so_to_sdks_and_to_codex() -> None:
    for error, code in (
        (EngineFailed("broke"), "server_error"),
        (RequestAborted("ended"), "invalid_prompt"),
        (InvalidRequest("no", param="input"), "invalid_prompt"),
    ):
        made = encoder()
        data = made.opening(USAGE) + b"".join(made.events(Delta(0, [Part("so far")], [], None, True)))
        *_, told, failed = events_of(data + made.failing(error, "r"))
        for event in (told, failed):
            check_event(event)
        assert (told["type"], told["error"]["code"]) == ("error", error.code)
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        assert failed["response"]["error"] == {"code": code, "message": error.message}
        assert failed["response"]["id"] == "resp_ab"


# -- tokens ---------------------------------------------------------------------------------------


def entry(token_id: int, start: int) -> Entry:
    return Entry(token_id, start, TokenLogprobs(-0.5, [token_id], [-0.5]))


THOUGHT_AND_TEXT: Final = [Part("abc", PartKind.REASONING), Part("déf")]
TOKENS: Final = [
    *(entry(0, 0), entry(1, 1), entry(2, 2)),  # the reasoning
    entry(90, 3),  # a mark, without any text
    *(entry(3, 3), entry(5, 4), entry(5, 4), entry(6, 5)),  # the text, with a character of two tokens
    entry(91, 6),
]


def test_tokens_belong_to_the_text_that_they_have_made() -> None:
    asked: dict[str, Any] = {"logprobs": 1, "top_logprobs": 1}
    response = whole(THOUGHT_AND_TEXT, "stop", TOKENS, **asked)
    [content] = response["output"][1]["content"]
    assert [one["bytes"] for one in content["logprobs"]] == [[100], [255], [255], [103]]
    deltas = [
        Delta(0, [Part("abc", PartKind.REASONING)], TOKENS[:4], None, True),
        Delta(0, [Part("d")], TOKENS[4:6], None, False),
        Delta(0, [Part("éf")], TOKENS[6:], "stop", False),
    ]
    events = streamed(deltas, **asked)
    assert events[-1]["response"]["output"] == response["output"]
    told = [
        one for event in events if event["type"].endswith("text.delta") for one in event.get("logprobs", ())
    ]
    assert told == content["logprobs"]


# -- the input of a custom tool -------------------------------------------------------------------


@given(st.text(alphabet='a"\\\n/é😀\x00{}', max_size=10), st.booleans(), st.data())
def test_the_input_of_a_custom_tool_is_unescaped_as_it_comes(text: str, is_ascii: bool, data: Any) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    reader, told = CustomInput(), []
    for start, end in _cuts(data.draw, len(arguments)):
        told.append(reader.feed(arguments[start:end]))
    assert "".join(told) + reader.finish() == text


def test_arguments_of_another_form_are_the_input() -> None:
    for arguments, text in (
        ('{"other": 1, "input": "x"}', "x"),
        ('{"inputs": "x"}', '{"inputs": "x"}'),
        ("{}", ""),
        ("[1", "[1"),
        ('{"input": "half \\ud800, odd \\x"}', "half \ufffd, odd \ufffd"),
        ('{"input": "cut \\u00', "cut "),
    ):
        reader = CustomInput()
        assert reader.feed(arguments) + reader.finish() == text
