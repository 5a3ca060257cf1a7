"""Anthropic's Messages at the gateway: what is relayed, refused, counted and told is as Anthropic has it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, Final

import pytest

from engine.api.answer.encoder import encode
from gateway.relay.foreign import FoldingScanner, Folds
from shared.apis.generation import PromptTokensDetails, Usage
from shared.apis.message_answers import (
    PING,
    STOP,
    AnswerText,
    BlockDelta,
    BlockStart,
    BlockStop,
    MessageAnswer,
    MessageChange,
    MessageDelta,
    MessageStart,
    StopReason,
    TextDelta,
    delta_usage,
    error_body,
    error_event,
    message_usage,
)
from shared.apis.message_chat import sealed
from shared.wire.errors import EngineFailed, InvalidRequest, Overloaded
from shared.wire.sse import CLOSING_HEADER, NamedScanner, closing_comment, encode_closing, named_event
from tests.anthropic_schemas import events_of, holds, put_together
from tests.gateway.conftest import KEY, OTHER_KEY, House, Open, error_of
from tests.gateway.fake_engine import CUT, HEADERS, Script, Step, closing

ASKED: Final[dict[str, Any]] = {
    "model": "tiny",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "hi"}],
}
USAGE: Final = Usage(10, 3, 13, PromptTokensDetails(4))
VERSION: Final = {"anthropic-version": "2023-06-01"}
pytestmark = pytest.mark.hop("http2")


def event(value: Any) -> bytes:
    return named_event(value.__struct_config__.tag.encode(), encode(value))


def message(*texts: str, is_whole: bool = True) -> MessageAnswer:
    told = [AnswerText(text) for text in texts]
    reason: StopReason | None = "end_turn" if is_whole else None
    return MessageAnswer(
        id="msg_1", model="tiny", content=[*told], stop_reason=reason, usage=message_usage(USAGE)
    )


OPENING: Final = event(MessageStart(message(is_whole=False)))
START: Final = event(BlockStart(0, AnswerText("")))
END: Final = (
    event(BlockStop(0)),
    event(MessageDelta(MessageChange(stop_reason="end_turn", stop_sequence=None), delta_usage(USAGE))),
    STOP,
)


def piece(text: str) -> bytes:
    return event(BlockDelta(0, TextDelta(text)))


def stream(*steps: Step) -> Script:
    return Script([HEADERS, OPENING, START, *steps, *END, closing_comment(closing())])


def unary(**headers: str) -> Script:
    headers[CLOSING_HEADER] = encode_closing(closing()).decode()
    return Script([HEADERS, encode(message("hello"))], 200, "application/json", headers)


class Asking:
    def __init__(self, house: House) -> None:
        self.house = house

    def __call__(self, path: str = "/v1/messages", **fields: Any) -> Any:
        headers = fields.pop("headers", self.house.headers)
        body = {name: value for name, value in {**ASKED, **fields}.items() if value is not None}
        return self.house.client.post(self.house.url + path, json=body, headers=headers)


@pytest.fixture
def ask(house: House) -> Asking:
    return Asking(house)


# -- answers --------------------------------------------------------------------------------------


async def test_a_stream_is_passed_on_as_it_is(house: House, ask: Asking) -> None:
    computed = asyncio.Event()
    rest = START, piece("he"), PING, piece("llo"), *END
    house.engine.script = Script([OPENING, computed, *rest, closing_comment(closing())])
    async with ask(stream=True) as answer:
        assert (answer.status, answer.headers["request-id"]) == (200, answer.headers["x-request-id"])
        assert await answer.content.readuntil(OPENING) == OPENING
        computed.set()
        body = OPENING + await answer.content.read()
    assert body == b"".join([OPENING, *rest])
    assert put_together(events_of(body))["content"] == [{"type": "text", "text": "hello", "citations": None}]
    line = await house.line()
    assert (line["endpoint"], line["end_reason"], line["settled_tokens"]) == ("/v1/messages", "ok", 13)
    assert line["events"] == 6  # neither the opening nor the ping
    [seen] = house.engine.seen
    assert seen.body["penstock"]["prompt_ids"]
    await house.at_rest()


async def test_a_whole_answer(house: House, ask: Asking) -> None:
    house.engine.script = unary()
    async with ask() as answer:
        holds("Message", await answer.json())
    assert (await house.line())["settled_tokens"] == 13
    await house.at_rest()


async def test_a_stream_that_breaks_off_ends_with_an_error_of_the_apis(house: House, ask: Asking) -> None:
    house.engine.script = Script([OPENING, START, piece("he"), CUT])
    async with ask(stream=True) as answer:
        *_, error = events_of(await answer.read())
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")
    assert error["request_id"] == (await house.line())["request_id"]


async def test_what_may_be_generated_is_what_there_is_room_for(open_house: Open) -> None:
    house = await open_house(tenant={"limits": {"tokens_per_min": 5000}})
    house.engine.script = unary()
    async with Asking(house)(max_tokens=32_000) as answer:
        assert answer.status == 200
    line = await house.line()
    assert line["reserved_tokens"] == 4096


async def test_a_count_is_charged_nothing(house: House, ask: Asking) -> None:
    body = b'{"input_tokens":18}'
    house.engine.script = Script([HEADERS, body], 200, "application/json")
    async with ask("/v1/messages/count_tokens", max_tokens=None) as answer:
        assert (answer.status, await answer.read()) == (200, body)
    line = await house.line()
    assert (line["endpoint"], line["settled_tokens"]) == ("/v1/messages/count_tokens", 0)
    await house.at_rest()


@pytest.mark.parametrize("query", ["", "?limit=1000&after_id=tiny"])
async def test_models_as_anthropic_lists_them(house: House, query: str) -> None:
    async with house.get(f"/v1/models{query}", **VERSION) as answer:
        listed = await answer.json()
    holds("ListResponse_ModelInfo_", listed)
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("tiny", "small", False)
    async with house.get("/v1/models/small", **VERSION) as answer:
        told = await answer.json()
    holds("ModelInfo", told)
    assert (told["id"], told["max_input_tokens"], told["capabilities"]) == ("small", 4096, None)
    async with house.get("/v1/models") as answer:
        assert (await answer.json())["object"] == "list"


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "type_"),
    [
        ("GET", "/v1/models/huge", {}, 404, "not_found_error"),
        ("GET", "/v1/models", {"authorization": "Bearer no"}, 401, "authentication_error"),
        ("POST", "/v1/models", {}, 405, "invalid_request_error"),
        ("POST", "/v1/v1/messages", {}, 404, "not_found_error"),
    ],
)
async def test_who_names_the_version_is_told_in_the_envelope(
    house: House, method: str, path: str, headers: dict[str, str], status: int, type_: str
) -> None:
    sent = {**house.headers, **headers}
    for more, is_anthropics in (VERSION, True), ({}, False):
        async with house.client.request(method, house.url + path, headers={**sent, **more}) as answer:
            told = await answer.json()
            assert (answer.status, "request-id" in answer.headers) == (status, is_anthropics)
            if is_anthropics:
                assert (told["error"]["type"], told["request_id"]) == (type_, answer.headers["request-id"])
                holds("ErrorResponse", told)
            else:
                assert told["error"]["code"]


async def test_only_what_is_of_no_api_is_told_as_anthropic_does(house: House) -> None:
    async with house.client.post(
        f"{house.url}/v1/chat/completions", data="{", headers={**house.headers, **VERSION}
    ) as answer:
        assert (await error_of(answer))["code"] == "invalid_json"
        assert "request-id" not in answer.headers
    async with house.get("/v1/models", **VERSION) as answer:
        assert answer.headers["request-id"] == answer.headers["x-request-id"]


# -- callers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/models", "/v1/messages", "/v1/chat/completions", "/nowhere"])
async def test_a_key_may_come_in_either_header(house: House, path: str) -> None:
    house.engine.script = unary()
    method = "GET" if path == "/v1/models" else "POST"
    told: list[tuple[int, str | None]] = []
    bad = {"authorization": "Bearer no"}
    for headers in (
        {"authorization": f"Bearer {KEY}"},
        {"x-api-key": KEY},
        {"x-api-key": KEY, "authorization": f"Bearer {OTHER_KEY}"},
        {"x-api-key": "no"},
        {"x-api-key": ""},
        {"x-api-key": KEY, **bad},
        {},
    ):
        url = house.url + path
        async with house.client.request(method, url, json=ASKED, headers=headers) as answer:
            status = answer.status
        told.append((status, (await house.lines(len(told) + 1))[-1].get("tenant")))
    as_it_is = 404 if path == "/nowhere" else 200
    assert told[:3] == [(as_it_is, "acme"), (as_it_is, "acme"), (as_it_is, "other")]
    assert told[3:] == [(401, None)] * 4
    assert "no" not in house.log.getvalue().split(KEY)[1:]


async def test_a_key_that_is_sent_twice_is_refused(house: House) -> None:
    headers = [("x-api-key", KEY), ("x-api-key", OTHER_KEY)]
    async with house.client.get(house.url + "/v1/messages", headers=headers) as answer:
        assert (answer.status, (await error_of(answer))["param"]) == (400, "x-api-key")


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "fields", "headers", "status", "type_"),
    [
        ("POST", "", {}, {"authorization": "Bearer no"}, 401, "authentication_error"),
        ("POST", "", {"model": "big"}, {}, 404, "not_found_error"),
        ("POST", "", {"max_tokens": -1}, {}, 400, "invalid_request_error"),
        (
            "POST",
            "",
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            {},
            400,
            "invalid_request_error",
        ),
        ("POST", "/count_tokens", {"model": "big"}, {}, 404, "not_found_error"),
        ("POST", "/batches", {}, {}, 404, "not_found_error"),
        ("POST", "/batches", {}, {"authorization": "Bearer no"}, 401, "authentication_error"),
        ("GET", "", {}, {}, 405, "invalid_request_error"),
    ],
)
async def test_every_refusal_is_in_the_apis_envelope(
    house: House,
    method: str,
    path: str,
    fields: dict[str, Any],
    headers: dict[str, str],
    status: int,
    type_: str,
) -> None:
    url, sent = f"{house.url}/v1/messages{path}", {**house.headers, **headers}
    body = json.dumps({**ASKED, **fields})
    async with house.client.request(method, url, data=body, headers=sent) as answer:
        told = await answer.json()
        assert (answer.status, told["error"]["type"]) == (status, type_)
        assert told["request_id"] == answer.headers["x-request-id"]
    holds("ErrorResponse", told)


async def test_a_quota_is_told_with_its_moments(open_house: Open) -> None:
    limits = {"requests_per_min": 1, "tokens_per_min": 1000}
    house = await open_house(tenant={"limits": limits})
    house.engine.script = unary()
    ask = Asking(house)
    async with ask() as answer:
        assert answer.headers["anthropic-ratelimit-requests-remaining"] == "0"
        reset = datetime.fromisoformat(answer.headers["anthropic-ratelimit-tokens-reset"])
        assert abs((reset - datetime.now(UTC)).total_seconds()) < 120
        assert not any(name.startswith("x-ratelimit") for name in answer.headers)
    async with ask() as answer:
        assert (answer.status, answer.headers["x-should-retry"]) == (429, "true")
        told = await answer.json()
        assert told["error"]["type"] == "rate_limit_error"
        assert 0 < int(answer.headers["retry-after"]) <= 60
        assert answer.headers["anthropic-ratelimit-requests-limit"] == "1"
    holds("ErrorResponse", told)


@pytest.mark.parametrize(
    ("error", "engines_status", "status"),
    [(Overloaded("Full.", retry_after_s=3.0), 529, 529), (EngineFailed("Broken."), 500, 500)],
)
async def test_the_engines_own_errors_are_read_back(
    house: House, ask: Asking, error: Overloaded | EngineFailed, engines_status: int, status: int
) -> None:
    headers = {"retry-after": "3"}
    house.engine.script = Script([error_body(error, "r")], engines_status, "application/json", headers)
    async with ask() as answer:
        told = await error_of(answer)
        assert (answer.status, told["code"], told["message"]) == (status, error.code, error.message)
        assert answer.headers["retry-after"] == "3"
    assert (await house.line())["status"] == status


@pytest.mark.parametrize("error", [Overloaded("Full."), InvalidRequest("No.", param="messages")])
async def test_an_error_in_place_of_a_stream_has_its_status(
    house: House, ask: Asking, error: Overloaded | InvalidRequest
) -> None:
    house.engine.script = Script(
        [b": keep-alive\n\n", error_event(error, "r"), closing_comment(closing(0, 0))]
    )
    async with ask(stream=True) as answer:
        told = await error_of(answer)
        assert (answer.status, told["code"], told["param"]) == (
            529 if isinstance(error, Overloaded) else 400,
            error.code,
            error.param,
        )


# -- engines of another make ----------------------------------------------------------------------


@pytest.fixture
async def foreign(open_house: Open) -> House:
    house: House = await open_house(bundle=None)
    return house


async def test_another_make_is_sent_the_apis_fields(foreign: House) -> None:
    foreign.engine.script = unary()
    tools = [{"name": "f", "input_schema": {"type": "object"}, "made_up": 1}]
    blocks = [{"type": "text", "text": "hi", "kv": "http://inside"}]
    messages = [{"role": "user", "content": blocks}]
    fields: dict[str, Any]
    fields = {"tools": tools, "messages": messages, "top_k": 3, "best_of": 9, "metadata": {"user_id": "u"}}
    async with Asking(foreign)(**fields) as answer:
        assert answer.status == 200, await answer.text()
        ignored = answer.headers["x-penstock-ignored-fields"]
        told = await answer.json()
    [seen] = foreign.engine.seen
    assert seen.body == {
        "model": "tiny",
        "max_tokens": 50,
        "top_k": 3,
        "metadata": {"user_id": "u"},
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    }
    assert set(ignored.split(", ")) == {"best_of", "messages.content.kv", "tools.made_up"}
    assert (told["usage"]["input_tokens"], told["usage"]["cache_read_input_tokens"]) == (10, 0)
    assert (await foreign.line())["settled_tokens"] == 13


@pytest.mark.parametrize(
    ("room", "asked", "sent"), [(4096, 32_000, 4087), (4096, 100, 100), (None, 9000, 9000)]
)
async def test_another_make_is_asked_for_no_more_than_there_is_room_for(
    open_house: Open, room: int | None, asked: int, sent: int
) -> None:
    """It refuses what does not fit into its context; what the caller states need not."""
    house = await open_house(bundle=None, max_model_len=room)
    house.engine.script = unary()
    async with Asking(house)(max_tokens=asked) as answer:
        assert answer.status == 200, await answer.text()
    [seen] = house.engine.seen
    assert seen.body["max_tokens"] == sent
    assert (await house.line())["reserved_tokens"] == 9 + sent


async def test_another_make_is_sent_thoughts_that_were_not_told(foreign: House) -> None:
    foreign.engine.script = unary()
    blocks = [
        {"type": "thinking", "thinking": "", "signature": sealed("Hm.")},
        {"type": "thinking", "thinking": "Oh.", "signature": "another's"},
        {"type": "text", "text": "Yes."},
    ]
    hello = {"role": "user", "content": "hi"}
    async with Asking(foreign)(messages=[hello, {"role": "assistant", "content": blocks}, hello]) as answer:
        assert answer.status == 200, await answer.text()
    [seen] = foreign.engine.seen
    told = [block.get("thinking") for block in seen.body["messages"][1]["content"]]
    assert told == ["Hm.", "Oh.", None]


async def test_another_makes_stream_is_charged_and_tells_no_cache(foreign: House) -> None:
    foreign.engine.script = Script([OPENING, START, piece("hello"), *END])
    async with Asking(foreign)(stream=True) as answer:
        told = put_together(events_of(await answer.read()))
    assert (told["usage"]["input_tokens"], told["usage"]["cache_read_input_tokens"]) == (10, 0)
    line = await foreign.line()
    assert (line["settled_tokens"], line["cached_tokens"], line["end_reason"]) == (13, 4, "ok")


@pytest.mark.parametrize("tool", [{"type": "web_search_20250305", "name": "web_search"}])
async def test_another_make_is_sent_no_tool_that_it_would_run(foreign: House, tool: dict[str, str]) -> None:
    async with Asking(foreign)(tools=[tool]) as answer:
        assert (answer.status, (await error_of(answer))["param"]) == (400, "tools[0].type")
    assert not foreign.engine.seen


async def test_an_engine_that_lacks_the_path_harms_no_other_api(foreign: House) -> None:
    """Whoever asks for it, it says nothing of the replica: another tenant's chats go on."""
    foreign.engine.script = Script([b'{"detail":"Not Found"}'], 404, "application/json")
    for key in [KEY, OTHER_KEY] * 5:
        async with Asking(foreign)(headers={"x-api-key": key}) as answer:
            told = await error_of(answer)
            assert (answer.status, told["code"]) == (404, "path_not_served")
            assert "/v1/messages" in told["message"]
    [replica] = foreign.gateway.replicas._by_url.values()
    assert not replica.health.ejections


# -- the scanners ---------------------------------------------------------------------------------


def test_a_stream_is_scanned_however_it_is_cut() -> None:
    stream = b"".join([OPENING, START, piece("he"), PING, piece("llo"), *END])
    whole = stream + closing_comment(closing())
    for size in range(1, len(whole)):
        scanner, passed = NamedScanner(STOP, b"event: content_block_"), b""
        for at in range(0, len(whole), size):
            chunk = whole[at : at + size]
            passed += chunk if scanner.takes(chunk) else scanner.feed(chunk)
        passed += scanner.finish()
        assert (passed, scanner.saw_done, scanner.closing) == (stream, True, closing())


def test_figures_of_a_cache_are_folded_however_they_are_cut() -> None:
    body = encode(message("hello"))
    told = json.loads(Folds().feed(body, ended=True))
    assert (told["usage"]["input_tokens"], told["usage"]["cache_read_input_tokens"]) == (10, 0)
    for size in range(1, 40):
        folds = Folds()
        pieces = [folds.feed(body[at : at + size]) for at in range(0, len(body), size)]
        assert json.loads(b"".join([*pieces, folds.feed(b"", ended=True)])) == told
    strange = b'{"usage":{"input_tokens":"7","cache_read_input_tokens":3},"usage":{"cut'
    assert Folds().feed(strange, ended=True) == strange
    scanner = FoldingScanner(STOP)
    passed = scanner.feed(b"".join([OPENING, *END])) + scanner.finish()
    assert b'"cache_read_input_tokens":4' not in passed
    assert (scanner.usage is not None, scanner.saw_done) == (True, True)


# -- the official SDK -----------------------------------------------------------------------------


@pytest.fixture
async def sdk(house: House) -> AsyncIterator[Any]:
    import anthropic  # it takes longer than most tests

    async with anthropic.AsyncAnthropic(base_url=house.url, api_key=KEY, max_retries=0) as client:
        yield client


async def test_the_official_sdk(house: House, sdk: Any) -> None:
    house.engine.script = unary()
    answer = await sdk.messages.create(**ASKED)
    assert (answer.content[0].text, answer._request_id) == ("hello", (await house.line())["request_id"])
    house.engine.script = stream(piece("he"), PING, piece("llo"))
    async with sdk.messages.stream(**ASKED) as events:
        assert "".join([text async for text in events.text_stream]) == "hello"
        assert (await events.get_final_message()).usage.cache_read_input_tokens == 4
    assert [model.id async for model in sdk.models.list()] == ["tiny", "small"]


async def test_the_sdk_raises_what_the_status_says(house: House, sdk: Any) -> None:
    import anthropic

    with pytest.raises(anthropic.AuthenticationError):
        await sdk.with_options(api_key="no").messages.create(**ASKED)
    with pytest.raises(anthropic.BadRequestError) as mistake:
        await sdk.messages.create(**ASKED, extra_body={"temperature": 3})
    assert (mistake.value.type, mistake.value.error_code) == ("invalid_request_error", "invalid_value")
    house.engine.script = Script([error_body(Overloaded("Full."), "r")], 529, "application/json")
    with pytest.raises(anthropic.InternalServerError) as full:
        await sdk.messages.create(**ASKED)
    assert (full.value.status_code, full.value.type) == (529, "overloaded_error")
    house.engine.script = Script([OPENING, START, piece("he"), CUT])
    with pytest.raises(anthropic.APIStatusError, match="broke off"):
        async with sdk.messages.stream(**ASKED) as events:
            await events.get_final_message()
