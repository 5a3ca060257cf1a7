"""Anthropic's Messages at the engine: every answer and every event is as Anthropic describes it, and a stream
tells what a whole answer does."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api.answer.detokenizer import Detokenizer
from engine.api.answer.encoder import Answered, Heading
from engine.api.answer.messages import THOUGHTS_LEN_MAX, MessagesEncoder
from engine.api.answer.outputs import ChoiceOutput, Delta, RequestOutput
from engine.api.answer.parts import Part, PartKind
from engine.contract.messages import FinishReason
from shared.apis.generation import CompletionTokensDetails, FinishReasonName, PromptTokensDetails, Usage
from shared.apis.message_chat import SIGNATURE, unsealed
from shared.wire.ids import REQUEST_TIMEOUT_HEADER
from tests.anthropic_schemas import events_of, holds, put_together
from tests.engine.api.conftest import MODEL, Serve, Served, until
from tests.engine.api.test_calls import SCRIPTS, THINKING
from tests.engine.api.test_calls import model_dir as model_dir
from tests.engine.api.test_calls import tokenizer as tokenizer
from tests.engine.api.test_detokenizer import Pieces

HELLO: Final = {"role": "user", "content": "hello"}
ASKED: Final[dict[str, Any]] = {"model": MODEL, "max_tokens": 4096, "messages": [HELLO]}
TOOLS: Final = [
    {
        "name": name,
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    }
    for name in ("weather", "time")
]
ROOM: Final = {"max_model_len": 8192, "pages": 1024}
USAGE: Final = Usage(9, 5, 14, PromptTokensDetails(4), CompletionTokensDetails(2))


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    """A model of Qwen3's family."""
    async with serve(answer_format="qwen3", core=ROOM) as served:
        yield served
        served.assert_nothing_leaks()


# -- the encoder ----------------------------------------------------------------------------------


def encoder(
    *, sends: bool = True, hides: bool = False, stopped_by: str | int | None = None, cut: bool = False
) -> MessagesEncoder:
    heading = Heading("msg_1", 0, "m", "fp", False, False, None, sends, hides)
    output = ChoiceOutput(0, RequestOutput(1), Detokenizer(Pieces([])))
    output.stopped_by = stopped_by
    return MessagesEncoder(heading, Letters(), Answered([output], [], [], {7: "<stop>"}, cut))


class Letters:
    def token_bytes(self, token_id: int) -> bytes:
        return b"a"


def streamed(made: MessagesEncoder, deltas: Sequence[Delta]) -> dict[str, Any]:
    events = [made.opening(USAGE)]
    for delta in deltas:
        events += made.events(delta)
    return put_together(events_of(b"".join([*events, made.ending(USAGE)])))


def whole(made: MessagesEncoder, delta: Delta) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(b"".join(made.whole([delta], USAGE)))
    holds("Message", answer)
    return answer


def delta(parts: list[Part], reason: FinishReasonName | None = None) -> Delta:
    return Delta(0, parts, [], reason, False)


words = st.text(min_size=1, max_size=8)
prose = st.tuples(
    st.sampled_from([PartKind.TEXT, PartKind.REASONING]), st.lists(words, min_size=1, max_size=4)
)
called = st.tuples(st.just(PartKind.CALL), st.just(['{"a"', ': "', "b\\u2028", '"}']))


@given(
    st.lists(st.one_of(prose, called), max_size=6),
    st.lists(st.booleans()),
    st.sampled_from(["stop", "length", "tool_calls"]),
    st.sampled_from([(True, False), (False, True), (False, False)]),
)
def test_a_stream_tells_what_a_whole_answer_does(
    runs: list[tuple[PartKind, list[str]]],
    cuts: list[bool],
    reason: FinishReasonName,
    told: tuple[bool, bool],
) -> None:
    """However it is cut into deltas."""
    parts: list[Part] = []
    for number, (kind, pieces) in enumerate(runs):
        if kind is PartKind.CALL:
            parts.append(Part("f", kind, number, f"id{number}"))
            kind = PartKind.ARGUMENTS
        parts += [Part(piece, kind, number if kind is PartKind.ARGUMENTS else -1) for piece in pieces]
    deltas: list[Delta] = []
    batch: list[Part] = []
    for part, is_cut in zip(parts, [*cuts, *[False] * len(parts)], strict=False):
        batch.append(part)
        if is_cut:
            deltas.append(delta(batch))
            batch = []
    deltas.append(delta(batch, reason))
    sends, hides = told
    one = streamed(encoder(sends=sends, hides=hides), deltas)
    other = whole(encoder(sends=sends, hides=hides), delta(parts, reason))
    assert one == other


@pytest.mark.parametrize(
    ("reason", "stopped_by", "cut", "calls", "told"),
    [
        ("stop", None, False, False, ("end_turn", None)),
        ("stop", "x", False, False, ("stop_sequence", "x")),
        ("stop", 7, False, False, ("stop_sequence", "<stop>")),
        ("stop", 8, False, False, ("end_turn", None)),
        ("length", None, False, True, ("max_tokens", None)),
        ("length", None, True, False, ("model_context_window_exceeded", None)),
        ("tool_calls", None, False, True, ("tool_use", None)),
        ("stop", None, False, True, ("tool_use", None)),
    ],
)
def test_why_an_answer_ends(
    reason: FinishReasonName,
    stopped_by: str | int | None,
    cut: bool,
    calls: bool,
    told: tuple[str, str | None],
) -> None:
    parts = [Part("f", PartKind.CALL, 0, "id0"), Part("{}", PartKind.ARGUMENTS, 0)] if calls else [Part("a")]
    for answer in (
        streamed(encoder(stopped_by=stopped_by, cut=cut), [delta(parts, reason)]),
        whole(encoder(stopped_by=stopped_by, cut=cut), delta(parts, reason)),
    ):
        assert (answer["stop_reason"], answer["stop_sequence"]) == told
        assert (answer["usage"]["input_tokens"], answer["usage"]["cache_read_input_tokens"]) == (5, 4)
        assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": 2}


def test_hidden_thoughts_are_kept_within_bounds() -> None:
    for length, kept in (THOUGHTS_LEN_MAX, True), (THOUGHTS_LEN_MAX + 1, False):
        thoughts = "x" * length
        parts = [Part(thoughts[:9], PartKind.REASONING), Part(thoughts[9:], PartKind.REASONING), Part("a")]
        for answer in (
            streamed(encoder(sends=False, hides=True), [delta(parts, "stop")]),
            whole(encoder(sends=False, hides=True), delta(parts, "stop")),
        ):
            [thinking, _] = answer["content"]
            assert thinking["thinking"] == ""
            assert unsealed(thinking["signature"]) == (thoughts if kept else "")


def test_a_call_that_is_cut_off_has_no_input() -> None:
    for text in ('{"a": ', "[1]", ""):
        parts = [Part("f", PartKind.CALL, 0, "id0"), *([Part(text, PartKind.ARGUMENTS, 0)] if text else [])]
        assert whole(encoder(), delta(parts, "length"))["content"][0]["input"] == {}


# -- answers --------------------------------------------------------------------------------------


async def post(served: Served, path: str = "/v1/messages", **fields: Any) -> dict[str, Any]:
    answer = await served.http.post(path, json={**ASKED, **fields})
    body: dict[str, Any] = answer.json()
    assert answer.status_code == 200, body
    return body


async def both(served: Served, **fields: Any) -> dict[str, Any]:
    """The message of an answer, which is the same streamed as whole, but for its ids."""
    whole = await post(served, **fields)
    holds("Message", whole)
    stream = await served.http.post("/v1/messages", json={**ASKED, **fields, "stream": True})
    told = put_together(events_of(stream.content))
    assert re.sub(r'"id": "\w+"', "", json.dumps(told)) == re.sub(r'"id": "\w+"', "", json.dumps(whole))
    return whole


async def test_an_answer_in_all_its_parts(served: Served) -> None:
    served.says(THINKING)
    answer = await both(served, tools=TOOLS)
    thinking, text, *calls = answer["content"]
    assert (thinking["thinking"], thinking["signature"]) == ("Hm, Oslo.", SIGNATURE)
    assert text["text"] == "Let me see."
    assert [(call["name"], call["input"]) for call in calls] == [
        ("weather", {"city": "Oslo", "days": 2}),
        ("time", {}),
    ]
    assert answer["stop_reason"] == "tool_use"


async def test_hidden_and_unwanted_thoughts(served: Served) -> None:
    served.says("<think>\nHm, Oslo.\n</think>\n\nYes.")
    answer = await both(served, thinking={"type": "adaptive", "display": "omitted"})
    thinking, text = answer["content"]
    assert (thinking["thinking"], unsealed(thinking["signature"]), text["text"]) == ("", "Hm, Oslo.", "Yes.")
    again = {"role": "assistant", "content": answer["content"]}
    shown = {"role": "assistant", "content": [{**thinking, "thinking": "Hm, Oslo."}, text]}
    counts = [await post(served, messages=[HELLO, turn, HELLO]) for turn in (again, shown)]
    assert counts[0]["usage"]["input_tokens"] == counts[1]["usage"]["input_tokens"]
    answer = await both(served, thinking={"type": "disabled"})
    assert [block["type"] for block in answer["content"]] == ["text"]


@pytest.mark.parametrize(
    ("choice", "reason"), [({"type": "auto"}, "tool_use"), ({"type": "tool", "name": "weather"}, "tool_use")]
)
async def test_calls_that_are_asked_for(served: Served, choice: dict[str, Any], reason: str) -> None:
    served.says(SCRIPTS["hermes"].removeprefix("Let me see.\n"))
    answer = await both(served, tools=TOOLS, tool_choice=choice)
    assert answer["stop_reason"] == reason


async def test_an_empty_answer_is_one_empty_text(served: Served) -> None:
    served.says("")
    assert (await both(served))["content"] == [{"type": "text", "text": "", "citations": None}]


async def test_stop_sequences_and_limits(served: Served) -> None:
    served.says("one two three")
    answer = await both(served, stop_sequences=["three", " two"])
    assert (answer["content"][0]["text"], answer["stop_sequence"]) == ("one", " two")
    served.says("one <|im_start|> two")
    answer = await both(served, stop_sequences=["<|system|>"])
    assert answer["stop_reason"] == "end_turn"
    answer = await both(served, max_tokens=1)
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 1)


async def test_a_stop_sequence_that_is_a_token_of_its_own(served: Served) -> None:
    served.says("one<|system|>two")
    answer = await both(served, stop_sequences=["<|system|>"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "<|system|>")


async def test_the_context_ends_an_answer(serve: Serve) -> None:
    async with serve(core={"max_model_len": 64}) as served:
        served.says("x" * 100)
        answer = await both(served, max_tokens=32_000)
        assert answer["stop_reason"] == "model_context_window_exceeded"
        used = answer["usage"]
        assert used["input_tokens"] + used["output_tokens"] == 64
        long = await served.http.post(
            "/v1/messages", json={**ASKED, "messages": [{"role": "user", "content": "z" * 99}]}
        )
        assert (long.status_code, long.json()["error"]["details"]["param"]) == (400, "messages")


async def test_a_budget_of_thinking_where_none_is_marked(serve: Serve) -> None:
    async with serve(core=ROOM) as served:
        served.says("Yes.")
        answer = await both(served, thinking={"type": "enabled", "budget_tokens": 1024})
        assert [block["type"] for block in answer["content"]] == ["text"]


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "fields", "status", "type_", "code"),
    [
        ("POST", "/v1/messages", {"max_tokens": None}, 400, "invalid_request_error", "invalid_value"),
        ("POST", "/v1/messages", {"model": "x"}, 404, "not_found_error", "model_not_found"),
        ("POST", "/v1/messages/count_tokens", {"model": "x"}, 404, "not_found_error", "model_not_found"),
        ("GET", "/v1/messages", {}, 405, "invalid_request_error", "method_not_allowed"),
        ("POST", "/v1/messages/batches", {}, 404, "not_found_error", "unknown_url"),
    ],
)
async def test_errors_have_the_apis_envelope(
    served: Served, method: str, path: str, fields: dict[str, Any], status: int, type_: str, code: str
) -> None:
    answer = await served.http.request(method, path, json={**ASKED, **fields})
    body = answer.json()
    holds("ErrorResponse", body)
    assert answer.status_code == status
    assert (body["error"]["type"], body["error"]["details"]["error_code"]) == (type_, code)
    assert body["request_id"] == answer.headers["x-request-id"]


async def test_a_full_queue(serve: Serve) -> None:
    async with serve(max_queue_len=1) as served:
        served.core.admits = False
        first = asyncio.create_task(served.http.post("/v1/messages", json=ASKED))
        await until(lambda: bool(served.core.waiting))
        answer = await served.http.post("/v1/messages", json=ASKED)
        assert (answer.status_code, answer.json()["error"]["type"]) == (529, "overloaded_error")
        assert (answer.headers["x-should-retry"], int(answer.headers["retry-after"]) > 0) == ("true", True)
        holds("ErrorResponse", answer.json())
        first.cancel()
        await until(lambda: not served.core.waiting)


@pytest.mark.parametrize(
    ("reason", "type_"),
    [(FinishReason.REJECTED, "overloaded_error"), (FinishReason.NUMERIC, "api_error")],
)
async def test_a_stream_that_fails_ends_with_an_error(
    served: Served, reason: FinishReason, type_: str
) -> None:
    served.says("one", ends=False)
    path, body = "/v1/messages", {**ASKED, "stream": True}
    async with served.http.stream("POST", path, json=body) as answer:
        pieces = answer.aiter_raw()
        got = b""
        while b"content_block_delta" not in got:
            got += await anext(pieces)
        served.core.finish(next(iter(served.core.running)), reason)
        async for piece in pieces:
            got += piece
    *before, error = events_of(got)
    assert "message_stop" not in {event["type"] for event in before}
    assert error["error"]["type"] == type_


async def test_a_deadline_is_an_event(served: Served) -> None:
    served.says("one", ends=False)
    headers = {REQUEST_TIMEOUT_HEADER: "0.2"}
    answer = await served.http.post("/v1/messages", json={**ASKED, "stream": True}, headers=headers)
    error = events_of(answer.content)[-1]
    assert (error["type"], error["error"]["type"]) == ("error", "timeout_error")


async def test_a_client_that_leaves_frees_its_sequence(served: Served, lines: list[dict[str, Any]]) -> None:
    served.says("one", ends=False)
    async with served.http.stream("POST", "/v1/messages", json={**ASKED, "stream": True}) as answer:
        async for piece in answer.aiter_raw():
            if b"content_block_delta" in piece:
                break
    await until(lambda: bool(lines))
    assert not served.core.running
    assert (lines[0]["end_reason"], lines[0]["prompt_tokens"] > 0) == ("client_cancel", True)


# -- counts and models ----------------------------------------------------------------------------


async def test_a_count_is_what_a_request_of_the_same_has(served: Served) -> None:
    served.says("Yes.")
    asked: dict[str, Any]
    asked = {"tools": TOOLS, "system": "Be.", "messages": [HELLO, {"role": "assistant", "content": "It"}]}
    answer = await post(served, **asked)
    body = {"model": MODEL, **asked}
    counted = await served.http.post("/v1/messages/count_tokens", json=body)
    holds("CountMessageTokensResponse", counted.json())
    assert counted.json() == {"input_tokens": answer["usage"]["input_tokens"]}
    assert len(served.core.asked) == 1


@pytest.mark.parametrize("path", ["/v1/models", f"/v1/models/{MODEL}"])
async def test_models_in_both_shapes(served: Served, path: str) -> None:
    theirs = (await served.http.get(path, headers={"anthropic-version": "2023-06-01"})).json()
    holds("ModelInfo" if path.endswith(MODEL) else "ListResponse_ModelInfo_", theirs)
    ours = (await served.http.get(path)).json()
    card, info = (ours, theirs) if path.endswith(MODEL) else (ours["data"][0], theirs["data"][0])
    assert card["max_model_len"] == card["context_length"] == info["max_input_tokens"] == 8192
    assert card["capabilities"] == {
        "tools": True,
        "reasoning": True,
        "structured_output": True,
        "effort": False,
        "embeddings": False,
        "reranking": False,
        "decisions": True,
        "generation": True,
    }
    assert info["capabilities"]["thinking"]["supported"]
    assert info["capabilities"]["structured_outputs"]["supported"]


@pytest.mark.parametrize(
    ("method", "path", "body", "is_version_sent"),
    [
        ("POST", "/v1/messages", ASKED, False),
        ("POST", "/v1/messages", {**ASKED, "stream": True}, False),
        ("POST", "/v1/messages", {"model": MODEL}, False),
        ("POST", "/v1/messages/count_tokens", {"model": MODEL, "messages": [HELLO]}, False),
        ("POST", "/v1/messages/batches", {}, False),
        ("GET", "/v1/models", None, True),
        ("GET", f"/v1/models/{MODEL}", None, True),
        ("GET", "/v1/models/huge", None, True),
        ("GET", "/v1/nowhere", None, True),
    ],
)
async def test_every_answer_has_its_id_where_the_sdks_read_it(
    served: Served, method: str, path: str, body: Any, is_version_sent: bool
) -> None:
    served.says("Yes.")
    headers = {"anthropic-version": "2023-06-01"} if is_version_sent else {}
    answer = await served.http.request(method, path, json=body, headers=headers)
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    if answer.status_code >= 400:
        holds("ErrorResponse", answer.json())
    if is_version_sent:
        assert "request-id" not in (await served.http.request(method, path)).headers
    other = {"model": MODEL, "messages": [HELLO], "max_tokens": 9}
    chat = await served.http.post("/v1/chat/completions", json=other, headers={"anthropic-version": "x"})
    assert "request-id" not in chat.headers


@pytest.fixture
async def sdk(served: Served) -> AsyncIterator[Any]:
    import anthropic  # it takes longer than most tests

    url = f"http://127.0.0.1:{served.engine.port}"
    async with anthropic.AsyncAnthropic(
        base_url=url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


async def test_the_official_sdk(served: Served, sdk: Any) -> None:
    served.says(THINKING)
    create: dict[str, Any] = {**ASKED, "tools": TOOLS}
    message = await sdk.messages.create(**create)
    async with sdk.messages.stream(**create) as stream:
        streamed = await stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.type for block in streamed.content] == [block.type for block in message.content]
    assert streamed.content[2].input == message.content[2].input == {"city": "Oslo", "days": 2}
    assert streamed.usage == message.usage
    del create["max_tokens"]
    assert (await sdk.messages.count_tokens(**create)).input_tokens == message.usage.input_tokens
    assert [model.id async for model in sdk.models.list()] == [MODEL]
    assert (await sdk.models.retrieve(MODEL)).max_input_tokens == 8192
