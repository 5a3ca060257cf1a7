"""The fields that an engine of another make is sent, and the one maximum that it is told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats

from gateway.admission.tokens import SLICE_LEN, TokenCount, estimate_slices
from gateway.config.whole import ModelConfig
from gateway.endpoints.chat import OPENAI_CHAT
from gateway.endpoints.completions import OPENAI_COMPLETION
from gateway.endpoints.endpoint import Asked
from gateway.endpoints.passing import EXTENSIONS, MAXIMA
from gateway.endpoints.table import ENDPOINTS
from gateway.request.outbound import Passed, passed_on
from shared.apis.chat import ChatRequest
from shared.apis.completions import CompletionRequest
from shared.apis.tokenize import DetokenizeRequest, TokenizeRequest
from shared.apis.validation import Parsed, parse
from shared.fairness.fair_threads import at_once
from shared.wire.errors import InvalidRequest
from shared.wire.ids import IGNORED_FIELDS_HEADER
from tests.gateway.conftest import CHAT, House, Open
from tests.gateway.fake_engine import Script, chunk, unary

ESTIMATED = 9
"""The tokens of the chat's prompt, as they are estimated."""
BOUND = 10
"""The most that they can be, which is set aside where a budget counts them."""
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
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
    whole = asked(shape, body)
    passed = passed_on(whole, ModelConfig("tiny"))
    assert (passed.fields, passed.left_out) == (whole.parsed.fields, ())


# -- what is counted ------------------------------------------------------------------------------

THEIRS = ModelConfig("tiny")
encode = msgspec.json.encode
LEN = 3000
LONG = "7" * LEN
"""A token for each, whoever counts."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "description": LONG}}}
FUNCTION = {"name": "f", "description": LONG, "parameters": {"type": "object"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def said(*, part: Any = None, **fields: Any) -> dict[str, Any]:
    """A chat whose last message has these fields."""
    content = "hi" if part is None else [part]
    return {"messages": [{"role": "assistant", "content": content, **fields}]}


PLACES: dict[str, dict[str, Any]] = {
    **{
        name: {name: LONG}
        for name in (
            *("user", "guided_regex", "guided_grammar", "grammar", "ebnf", "regex", "verbosity"),
            *("reasoning_effort", "safety_identifier", "prompt_cache_key", "suffix", "moderation", "zzz"),
        )
    },
    "tools": {"tools": [{"type": "function", "function": FUNCTION}]},
    "tools, custom": {"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": LONG}}}]},
    "tools, beside": {"tools": [{"type": "function", "function": {"name": "f"}, "zzz": LONG}]},
    "functions": {"functions": [FUNCTION]},
    "tool_choice": {"tool_choice": {"type": "function", "function": {"name": LONG}}},
    "function_call": {"function_call": {"name": LONG}},
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "guided_json": {"guided_json": SCHEMA},
    "guided_choice": {"guided_choice": [LONG]},
    "structured_outputs": {"structured_outputs": {"json": SCHEMA}},
    "json_schema": {"json_schema": SCHEMA},
    "chat_template_kwargs": {"chat_template_kwargs": {"documents": [{"text": LONG}]}},
    "chat_template_kwargs.chat_template": {"chat_template_kwargs": {"chat_template": LONG}},
    "prediction": {"prediction": {"type": "content", "content": LONG}},
    "web_search_options": {"web_search_options": {"user_location": {"approximate": {"city": LONG}}}},
    "audio": {"audio": {"voice": LONG}},
    "modalities": {"modalities": ["text", LONG]},
    "prompt_cache_options": {"prompt_cache_options": {"x": LONG}},
    "metadata": {"metadata": {"a": LONG}},
    "dry_sequence_breakers": {"dry_sequence_breakers": [LONG]},
    "bad_words": {"bad_words": [LONG]},
    "content": said(part={"type": "text", "text": LONG}),
    "content, refused": said(part={"type": "refusal", "refusal": LONG}),
    "content, beside": said(part={"type": "text", "text": "hi", "zzz": LONG}),
    "message.name": said(name=LONG),
    "message.reasoning": said(reasoning=LONG),
    "message.reasoning_content": said(reasoning_content=LONG),
    "message.refusal": said(refusal=LONG),
    "message.audio": said(audio={"id": LONG}),
    "message.zzz": said(zzz=LONG),
    "message.tool_call_id": said(tool_call_id=LONG),
    "message.tool_calls": said(tool_calls=[CALL | {"function": {"name": "f", "arguments": LONG}}]),
    "message.tool_calls.id": said(tool_calls=[{**CALL, "id": LONG}]),
    "message.tool_calls, beside": said(tool_calls=[{**CALL, "zzz": LONG}]),
    "message.tool_calls, custom": said(
        tool_calls=[{"id": "1", "type": "custom", "custom": {"name": "f", "input": LONG}}]
    ),
    "message.function_call": said(function_call={"name": "f", "arguments": LONG}),
}


def asked(shape: Any, body: dict[str, Any]) -> Asked:
    parsed: Parsed[Any] = parse(encode(body), shape)
    endpoint = ENDPOINTS[shape.path]
    return Asked(endpoint, parsed, parsed.request if endpoint.generates else None)


def chosen(shape: Any = ChatRequest, *, model: ModelConfig = THEIRS, **fields: Any) -> Passed:
    """What of a request goes out."""
    prompt = {"messages": HI} if shape is ChatRequest else {"prompt": "hi"}
    return passed_on(asked(shape, {"model": "tiny", **prompt, **fields}), model)


def counted(
    shape: Any = ChatRequest, *, model: ModelConfig = THEIRS, **fields: Any
) -> tuple[TokenCount, bytes]:
    """The estimate of a request, and what of it goes out."""
    prompt = {"messages": HI} if shape is ChatRequest else {"prompt": "hi"}
    whole = asked(shape, {"model": "tiny", **prompt, **fields})
    passed = passed_on(whole, model)
    assert whole.generation is not None
    work = estimate_slices(whole.generation, passed.fields, model.image_tokens)
    return at_once(work), encode(passed.fields)


def test_no_text_hides_in_an_images_detail() -> None:
    part = {"type": "image_url", "image_url": {"url": PNG, "detail": LONG}}
    with pytest.raises(InvalidRequest) as error:
        counted(messages=[{"role": "user", "content": [part]}])
    assert error.value.param == "messages[0].content[0].image_url.detail"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", [ChatRequest, CompletionRequest])
def test_a_text_in_any_place_is_counted_or_is_not_sent_and_is_named(place: str, shape: Any) -> None:
    if shape is CompletionRequest and "messages" in PLACES[place]:
        place = "suffix"
    count, body = counted(shape, **PLACES[place])
    assert count.bound >= count.prompt_tokens
    if LONG.encode() in body:
        assert count.prompt_tokens >= LEN
    else:
        assert count.prompt_tokens < LEN
        left_out = ".".join(chosen(shape, **PLACES[place]).left_out)
        assert place.removeprefix("message.").partition(",")[0] in left_out


@pytest.mark.parametrize("field", ["zzz", "web_search_options"])
def test_operators_may_pass_further_fields_on_which_are_counted(field: str) -> None:
    model = ModelConfig("tiny", pass_fields=("zzz", "web_search_options"))
    count, body = counted(model=model, **{field: {"x": LONG}})
    assert LONG.encode() in body
    assert count.prompt_tokens >= LEN
    assert chosen(model=model, **{field: {"x": LONG}}).left_out == ()


def test_what_is_sent_with_each_prompt_is_counted_with_each() -> None:
    count, _ = counted(CompletionRequest, prompt=["a", "b", "c"], suffix=LONG)
    assert count.prompt_tokens >= 3 * LEN


def test_a_prediction_is_sent_in_its_shape_alone() -> None:
    part = {"type": "text", "text": "x", "image_url": {"url": "http://elsewhere"}}
    sent = chosen(prediction={"type": "content", "content": [part], "n_predict": 9})
    assert msgspec.json.decode(sent.fields["prediction"]) == {
        "type": "content",
        "content": [{"type": "text", "text": "x"}],
    }
    assert {"prediction.n_predict", "prediction.content.image_url"} <= {*sent.left_out}
    other = {"type": "outline", "content": "x"}  # a kind that another make may know
    assert msgspec.json.decode(chosen(prediction=other).fields["prediction"]) == other


def test_a_prediction_may_be_billed_with_each_choice() -> None:
    assert counted(n=3, prediction={"type": "content", "content": LONG})[0].prompt_tokens >= 3 * LEN


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("the quick brown fox", 7),
        ("0123456789", 10),
        ("{}[]<>~^", 8),
        ("жук", 3),
        ("ééé", 6),
        ("漢字かな한", 10),
        ("ꙮ⶿", 6),
        ("😀", 4),
        ("", 0),
    ],
)
def test_an_estimate_knows_classes_of_characters(text: str, tokens: int) -> None:
    message = [{"role": "user", "content": text}]
    count, _ = counted(messages=message)
    assert count.prompt_tokens == 8 + tokens
    assert count.bound == 8 + len(text.encode())


def test_a_long_text_is_estimated_in_slices_and_to_the_same() -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "é7 " * SLICE_LEN}]}
    work, slices, tokens = estimate_slices(parse(encode(body), ChatRequest).request, {}, 0), 0, 0
    while not tokens:
        try:
            next(work)
            slices += 1
        except StopIteration as end:
            tokens = end.value.prompt_tokens
    assert tokens == pytest.approx(SLICE_LEN * (2 + 1 + 1 / 3), rel=1e-3)
    assert slices >= 4


# -- messages, tools and images -------------------------------------------------------------------


@pytest.mark.parametrize("field", ["image_url", "video_url", "audio_url", "image_embeds", "prompt_embeds"])
async def test_a_part_that_says_it_is_text_is_text_alone(open_house: Open, field: str) -> None:
    """vLLM reads a part with a `uuid` by its other fields, and fetches what they name."""
    house = await open_house(bundle=None)
    part = {"type": "text", "text": "hi", "uuid": "1", field: "http://169.254.169.254/"}
    body, ignored = await sent(house, messages=[{"role": "user", "content": [part], "zzz": 1}])
    assert body["messages"] == [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert ignored == f"messages.zzz, messages.content.uuid, messages.content.{field}"


TURNS: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief.", "name": "boss"},
    {"role": "user", "content": [{"type": "text", "text": "And this?"}]},
    {"role": "user", "content": "Look it up."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": [{"type": "text", "text": "found"}], "tool_call_id": "1"},
    {"role": "assistant", "content": "", "function_call": CALL["function"], "reasoning": "hm"},
    {"role": "function", "content": "found", "name": "f"},
    {"role": "assistant", "refusal": "No."},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "reasoning_content": "hm"},
]


@pytest.mark.parametrize("more", [{}, {"zzz": 1}], ids=["as they came", "made anew"])
async def test_all_of_openais_messages_are_passed_on(open_house: Open, more: dict[str, Any]) -> None:
    house = await open_house(bundle=None)
    body, _ = await sent(house, messages=[*TURNS, {**HI[0], **more}])
    assert body["messages"] == [*TURNS, *HI]


async def refused(house: House, **fields: Any) -> tuple[int, Any]:
    async with house.chat(**fields) as answer:
        return answer.status, (await answer.json())["error"]["param"]


@pytest.mark.parametrize(
    "tool",
    [{"type": "mcp", "server_url": "http://10.0.0.1"}, {"type": "web_search"}, {"function": {"name": "f"}}],
)
async def test_tools_that_the_engine_would_call_are_refused(open_house: Open, tool: dict[str, Any]) -> None:
    house = await open_house(bundle=None)
    tools = [{"type": "function", "function": {"name": "f"}}, tool]
    assert await refused(house, tools=tools) == (400, "tools[1].type")
    assert not house.engine.seen


def test_tools_are_sent_in_their_shapes() -> None:
    spec = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    tools = [
        {"type": "function", "function": spec},
        {"type": "custom", "custom": {"name": "g", "format": {}}},
    ]
    passed = chosen(tools=tools)
    assert (msgspec.json.decode(passed.fields["tools"]), passed.left_out) == (tools, ())
    wider = [{**tools[0], "server_url": "x", "function": {**spec, "zzz": 1}}, {**tools[1], "function": spec}]
    passed = chosen(tools=wider)
    assert msgspec.json.decode(passed.fields["tools"]) == tools
    assert passed.left_out == ("tools.function.zzz", "tools.server_url", "tools.function")
    assert bytes(chosen(tools=None).fields["tools"]) == b"null"


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "any"},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        {"tools": [{"type": "function", "function": {"name": "a.b"}}], "min_tokens": 3},
        {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
        {"response_format": {"type": "structural_tag", "structures": []}},
        {"structured_outputs": {"json_object": True, "whitespace_pattern": " "}},
        {"chat_template_kwargs": {"a": "x" * 20_000}, "reasoning_effort": "their own"},
        {"thinking_token_budget": 100, "include_reasoning": False, "guided_json": {}},
        {"messages": [{"role": "tool", "content": "found"}]},
    ],
)
def test_what_our_engines_would_refuse_is_left_to_others(fields: dict[str, Any]) -> None:
    passed = chosen(**fields)
    kept = {name: msgspec.json.decode(passed.fields[name]) for name in fields}
    assert (kept, passed.left_out) == (fields, ())
    with pytest.raises(InvalidRequest):
        asked(ChatRequest, {**CHAT, **fields}).parsed.require_supported()


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"enable_thinking": False}, ()),
        ({"enable_thinking": False, "chat_template": "x"}, ("chat_template_kwargs.chat_template",)),
        ({"enable_thinking": False, "tokenize": False}, ("chat_template_kwargs.tokenize",)),
    ],
)
def test_nobody_writes_another_prompt_than_the_messages(given: dict[str, Any], left: tuple[str, ...]) -> None:
    passed = chosen(chat_template_kwargs=given)
    assert msgspec.json.decode(passed.fields["chat_template_kwargs"]) == {"enable_thinking": False}
    assert passed.left_out == left


def image(url: str) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]}


PNG = "data:image/png;base64,iVBORw0KGgo="


async def test_an_image_is_passed_on_and_its_tokens_are_reserved(open_house: Open) -> None:
    house = await open_house(bundle=None, model={"image_tokens": 500})
    body, ignored = await sent(house, **image(PNG), max_tokens=7)
    assert (body["messages"], ignored) == (image(PNG)["messages"], "")
    asked = "What is it?"
    assert (await house.line())["reserved_tokens"] == 8 + -(-(len(asked) - 1) // 3) + 1 + 500 + 7


HOSTS = ("images.example.com", "127.0.0.1")


@pytest.mark.parametrize(
    ("url", "hosts", "passes"),
    [
        (PNG, (), True),
        ("data:image/webp;base64,AAAA", (), True),
        ("data:image/svg+xml;base64,AAAA", (), False),
        ("data:text/html;base64,AAAA", (), False),
        ("data:image/png;base64,", (), False),
        ("data:image/png;base64,AA AA", (), False),
        ("data:image/png,AAAA", (), False),
        ("file:///etc/passwd", ("*",), False),
        ("ftp://images.example.com/a", ("*",), False),
        ("HTTP://images.example.com/a", ("*",), False),
        ("http://images.example.com/a", (), False),
        ("https://images.example.com", HOSTS, True),
        ("https://images.example.com:8443/a.png?size=1&b=[2]", HOSTS, True),
        ("http://127.0.0.1/a", HOSTS, True),
        ("http://anywhere/a", ("*",), True),
        ("http://other.example.com/", HOSTS, False),
        ("http://images.example.com.evil/", HOSTS, False),
        ("http://images.example.com/" + "a" * 9000, HOSTS, False),
        ("http://images.example.com@10.0.0.1/", HOSTS, False),
        ("http://u:p@images.example.com/", HOSTS, False),
        ("http://10.0.0.1\\@images.example.com/", HOSTS, False),
        ("http://images.example.com\\@10.0.0.1/", HOSTS, False),
        ("http://10.0.0.1#@images.example.com/", HOSTS, False),
        ("http://images.example.com\t.evil/", HOSTS, False),
        ("http://images.example.com/ a", HOSTS, False),
        ("http://images.ex%61mple.com/", HOSTS, False),
        ("http:images.example.com/", HOSTS, False),
        ("//images.example.com/", HOSTS, False),
        ("", ("*",), False),
    ],
)
def test_images_come_with_the_request_or_from_hosts_that_operators_allow(
    url: str, hosts: tuple[str, ...], passes: bool
) -> None:
    model = ModelConfig("tiny", image_hosts=hosts)
    if passes:
        assert chosen(model=model, **image(url)).left_out == ()
        return
    with pytest.raises(InvalidRequest) as error:
        chosen(model=model, **image(url))
    assert error.value.param == "messages[0].content[1].image_url.url"
    with pytest.raises(InvalidRequest):
        passed_on(asked(TokenizeRequest, image(url)), model)


async def test_a_large_image_is_not_counted_as_text(open_house: Open) -> None:
    """It is looked at on a thread, as any large body is."""
    house = await open_house(bundle=None)
    body, _ = await sent(house, **image(PNG + "A" * 600_000), max_tokens=7)
    assert len(encode(body)) > 600_000
    assert (await house.line())["reserved_tokens"] < 2100
