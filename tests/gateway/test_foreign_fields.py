"""The fields that an engine of another make is sent, and the one maximum that it is told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats

from gateway.config import ModelConfig
from gateway.foreign_fields import EXTENSIONS, MAXIMA, OPENAI_CHAT, OPENAI_COMPLETION, passed_on
from shared.ids import IGNORED_FIELDS_HEADER
from shared.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from shared.validation import parse
from tests.gateway.conftest import CHAT, House, Open
from tests.gateway.fake_engine import Script, chunk, unary

ESTIMATED = 9
"""The tokens of the chat's prompt, as they are estimated."""
BOUND = 10
"""The most that they can be, which is set aside where a budget counts them."""
HI = [{"role": "user", "content": "hi"}]
STEERING: dict[str, Any] = {
    "n_predict": 90_000,
    "max_new_tokens": 90_000,
    "Max_Tokens": 90_000,
    "options": {"num_predict": 90_000},
    "thinking_budget": 90_000,
    "use_beam_search": True,
    "input_ids": [1],
    "chat_template": "x",
    "kv_transfer_params": {"remote_host": "10.0.0.1", "remote_port": 1},
    "lora_path": "/etc",
    "custom_logit_processor": "x",
    "priority": -5,
}
"""Fields of vLLM, SGLang, llama.cpp, Ollama: each would change how much is computed, for whom, or where."""


async def sent(house: House, path: str = "/v1/chat/completions", **fields: Any) -> tuple[dict[str, Any], str]:
    """What the engine was sent, and the fields that the answer says were ignored."""
    house.engine.script = unary()
    prompt = {"messages": HI} if "chat" in path else {"prompt": "hi"}
    body = {"model": "tiny", **prompt, **fields}
    async with house.client.post(f"{house.url}{path}", json=body, headers=house.headers) as answer:
        assert answer.status == 200
        return house.engine.seen[-1].body, answer.headers.get(IGNORED_FIELDS_HEADER, "")


@pytest.mark.parametrize(
    ("fields", "told", "ignored"),
    [
        ({"max_tokens": 7}, {"max_tokens": 7}, ""),
        ({"max_completion_tokens": 7}, {"max_completion_tokens": 7}, ""),
        ({"max_tokens": 90_000, "max_completion_tokens": 1}, {"max_completion_tokens": 1}, "max_tokens"),
        ({"max_tokens": 7, "max_completion_tokens": None}, {"max_tokens": 7}, ""),
        ({"max_tokens": 7, "n_predict": 90_000}, {"max_tokens": 7}, "n_predict"),
        ({"max_tokens": 7, "n": 2, "best_of": 20}, {"max_tokens": 7}, "best_of"),
    ],
)
async def test_a_chat_has_the_one_maximum_that_was_reserved(
    open_house: Open, fields: dict[str, Any], told: dict[str, int], ignored: str
) -> None:
    house = await open_house(bundle=None, tenant={"limits": {"token_budget": 1000}})
    body, named = await sent(house, **fields)
    assert ({name: body[name] for name in MAXIMA if name in body}, named) == (told, ignored)
    assert not body.keys() & {"n_predict", "best_of"}
    line = await house.line()
    [each] = told.values()
    assert line["reserved_tokens"] == BOUND + each * fields.get("n", 1)


@pytest.mark.parametrize("field", MAXIMA)
@pytest.mark.parametrize("asked", [{"max_tokens": 7}, {"max_completion_tokens": 7}, {}])
async def test_operators_choose_the_name_of_the_maximum_where_servers_know_one(
    open_house: Open, field: str, asked: dict[str, Any]
) -> None:
    """One that ignores the other name would generate without end, whatever its caller asked for."""
    limited = {"limits": {"token_budget": 1000}}
    house = await open_house(bundle=None, model={"maximum_field": field}, tenant=limited)
    body, _ = await sent(house, **asked)
    assert [name for name in MAXIMA if name in body] == [field]
    assert (await house.line())["reserved_tokens"] == BOUND + body[field]
    body, _ = await sent(house, "/v1/completions", max_tokens=3)
    assert (body["max_tokens"], "max_completion_tokens" in body) == (3, False)


async def test_a_limited_callers_chat_without_a_maximum_is_given_the_reserved_one(open_house: Open) -> None:
    house = await open_house(bundle=None, tenant={"limits": {"token_budget": 1000}})
    body, _ = await sent(house)
    assert (await house.line())["reserved_tokens"] == BOUND + body["max_tokens"]


@pytest.mark.parametrize(("fields", "most"), [({}, 16), ({"max_tokens": 3}, 3), ({"max_tokens": None}, 16)])
async def test_a_completion_has_the_maximum_that_openai_says_and_that_was_reserved(
    open_house: Open, fields: dict[str, Any], most: int
) -> None:
    """The engine's own default may be to fill its context."""
    house = await open_house(bundle=None)
    body, _ = await sent(house, "/v1/completions", **fields)
    assert body["max_tokens"] == most
    assert (await house.line())["reserved_tokens"] == 1 + most


@pytest.mark.parametrize(("best_of", "passes"), [(2, True), (None, True), (3, False), (1, False)])
async def test_as_many_sequences_are_computed_as_were_reserved(
    open_house: Open, best_of: int | None, passes: bool
) -> None:
    house = await open_house(bundle=None)
    body, ignored = await sent(house, "/v1/completions", n=2, best_of=best_of)
    assert ("best_of" in body, ignored) == (passes, "" if passes else "best_of")


@pytest.mark.parametrize("field", STEERING)
async def test_what_steers_an_engine_is_not_sent_and_is_named(open_house: Open, field: str) -> None:
    house = await open_house(bundle=None)
    body, ignored = await sent(house, top_k=5, **{field: STEERING[field]})
    assert (field in body, body["top_k"], ignored) == (False, 5, field)


async def test_options_of_a_stream_are_known_ones_and_ask_for_usage(open_house: Open) -> None:
    house = await open_house(bundle=None)
    house.engine.script = Script([chunk("a"), b"data: [DONE]\n\n"])
    options = {"include_obfuscation": False, "their_own": 1}
    async with house.chat(stream=True, stream_options=options) as answer:
        assert answer.headers[IGNORED_FIELDS_HEADER] == "stream_options.their_own"
        await answer.read()
    asked = {"include_obfuscation": False, "include_usage": True}
    assert house.engine.seen[-1].body["stream_options"] == asked


def test_openais_documented_fields_are_those_of_its_sdk() -> None:
    stream = {"stream"}
    assert OPENAI_CHAT | {*MAXIMA} == {*chats.CompletionCreateParamsBase.__annotations__} | stream
    theirs = {*completions.CompletionCreateParamsBase.__annotations__} | stream
    assert OPENAI_COMPLETION | {"max_tokens"} == theirs | {"service_tier"}


@pytest.mark.parametrize(
    ("shape", "body"),
    [
        (ChatRequest, {**CHAT, **dict.fromkeys(EXTENSIONS - {"echo"})}),
        (CompletionRequest, {"model": "tiny", "prompt": "x", **dict.fromkeys(EXTENSIONS)}),
        (TokenizeRequest, {"prompt": "x", "return_token_strs": True}),
        (DetokenizeRequest, {"tokens": [1]}),
    ],
)
def test_harmless_fields_are_passed_on_as_they_came(shape: Any, body: dict[str, Any]) -> None:
    parsed = parse(msgspec.json.encode(body), shape)
    passed = passed_on(parsed, ModelConfig("tiny"))
    assert (passed.fields, passed.left_out) == (parsed.fields, ())
