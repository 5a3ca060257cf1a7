from __future__ import annotations

import json
import math
import tracemalloc
from codecs import BOM_UTF8
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.apis import validation
from shared.apis.chat import ChatRequest
from shared.apis.completions import CompletionRequest
from shared.apis.generation import _PRIORITY_MAX, GenerationRequest
from shared.apis.request import Request
from shared.apis.tokenize import DetokenizeRequest, TokenizeRequest
from shared.apis.validation import FIELDS_MAX, IGNORED_NAMED_MAX, Parsed, parse, parse_slices, with_fields
from shared.fairness.fair_threads import at_once
from shared.wire.errors import InvalidJson, InvalidRequest, UnsupportedParameter
from shared.wire.shapes import (
    BODY_LEN_MAX,
    CHOICES_MAX,
    IMAGES_MAX,
    LOGIT_BIAS_MAX,
    LOGPROBS_MAX,
    MESSAGES_MAX,
    PROMPTS_MAX,
    STOP_LEN_MAX,
    STOP_MAX,
    STOP_TOKEN_IDS_MAX,
    TOKEN_ID_MAX,
    TOKENS_MAX,
)
from tests.shared.wire.request_bodies import CHAT, MESSAGE, MINIMAL, REQUESTS, chat, completion, refused

TEXT = {"type": "text", "text": "x"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CUSTOM = {"id": "1", "type": "custom", "custom": {"name": "f", "input": "x"}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}

# -- hostile bodies -------------------------------------------------------------------------------

DEEP = 4_000_000
"""The deepest that fits a body of 8 MiB. Python refuses about 1,000 levels; from 3.14 on it counts bytes of
stack instead, and refuses some 500,000."""
HOSTILE: dict[str, tuple[bytes, str | None]] = {
    "empty": (b"", None),
    "blank": (b" \n", None),
    "truncated": (b'{"model":"m"', None),
    "array": (b"[]", None),
    "number": (b"1", None),
    "string": (b'"x"', None),
    "null": (b"null", None),
    "trailing": (b"{} {}", None),
    "two byte order marks": (2 * BOM_UTF8 + chat(), None),
    "byte order mark alone": (BOM_UTF8, None),
    "byte order mark of UTF-16": (chat().decode().encode("utf-16"), None),
    "byte order mark, then a mistake": (BOM_UTF8 + chat(n="x"), "n"),
    "control character": (b'{"model":"\x00"}', None),
    "deep array": (b"[" * DEEP, None),
    "deep object": (b'{"a":' * DEEP, None),
    "deep known field": (b'{"model":"m","tools":' + b"[" * DEEP + b"]" * DEEP + b"}", None),
    "deep unknown field": (chat(zzz=0).replace(b'"zzz": 0', b'"zzz":' + b"[" * DEEP + b"]" * DEEP), None),
    "10k digits": (chat(n=7).replace(b"7", b"9" * 10_000), "n"),
    "10k digits of a float": (chat(temperature=7).replace(b"7", b"9" * 10_000), "temperature"),
    "huge exponent": (chat(temperature=7).replace(b"7", b"1e999999999"), "temperature"),
    "huge exponent in a field that is looked into": (chat(tools=7).replace(b"7", b"1e400"), "tools"),
    "huge exponent in it, nested": (chat(do_sample=7).replace(b"7", b'{"a":[-1e999]}'), "do_sample"),
    "10k digits in it": (chat(lora=7).replace(b"7", b"9" * 10_000), "lora"),
    "huge exponent within a message": (
        chat(messages=[{**MESSAGE, "tool_calls": 7}]).replace(b"7", b"1e400"),
        "messages[0].tool_calls",
    ),
    "NaN in it": (chat(tools=[math.nan]), None),
    "lone surrogate in it": (chat(tools=["\ud800"]), None),
    "NaN": (chat(temperature=math.nan), None),
    "Infinity": (chat(temperature=math.inf), None),
    "leading zero": (chat(n=7).replace(b"7", b"007"), None),
    "invalid UTF-8": (chat(user="x").replace(b'"x"', b'"\xff"'), None),
    "invalid UTF-8 in an unknown field": (chat(zzz="x").replace(b'"x"', b'"\xff"'), None),
    "invalid UTF-8 in a name": (chat(zzz=1).replace(b"zzz", b"\xff"), None),
    "surrogates in UTF-8": (chat(zzz="x").replace(b'"x"', b'"\xed\xa0\x80"'), None),
    "lone high surrogate": (chat(user="\ud800"), None),
    "lone low surrogate": (chat(user="\udfff x"), None),
    "lone surrogate, deep": (chat(messages=[{"role": "user", "content": "\\\ud83d"}]), None),
    "lone surrogate in an unknown field": (chat(zzz=["\ud800"]), None),
    "lone surrogate in a name": (chat(**{"\ud800": 1}), None),
    "many lone surrogates": (chat(user="\ud800" * 100_000), None),
    "high, then a pair": (chat(user="\ud800\U00010000"), None),
    "repeated field": (b'{"model":"m",' + chat()[1:], "model"),
    "repeated field, spelt otherwise": (b'{"\\u006dodel":"m",' + chat()[1:], "model"),
    "repeated unknown field": (b'{"zzz":1,"zzz":1,' + chat()[1:], "zzz"),
    "repeated stream option": (
        b'{"stream":true,"stream_options":{"include_usage":true,"include_usage":false},' + chat()[1:],
        "stream_options.include_usage",
    ),
    "repeated token of a bias": (b'{"logit_bias":{"5":1,"\\u0035":2},' + chat()[1:], "logit_bias"),
}


@pytest.mark.parametrize(("body", "param"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_bodies_are_refused(body: bytes, param: str | None) -> None:
    error = refused(body)
    assert error.param == param
    assert len(error.message) < 200


def passes(body: bytes, type_: type[ChatRequest]) -> Parsed[ChatRequest]:
    return at_once(parse_slices(body, type_))


def outcome(how: Callable[[bytes, type[ChatRequest]], Parsed[ChatRequest]], body: bytes) -> object:
    try:
        return how(body, ChatRequest)
    except InvalidRequest as error:
        return type(error), error.message, error.param


@pytest.mark.parametrize("slice_len", [1, 3, 1 << 20])
def test_a_body_that_is_parsed_pass_by_pass_is_what_it_is_at_once(
    monkeypatch: pytest.MonkeyPatch, slice_len: int
) -> None:
    """Whatever character or surrogate the slices cut in two."""
    monkeypatch.setattr(validation, "SLICE_LEN", slice_len)
    wide = chat(user="\u00e9\u20ac\U0001f600" * 3)
    bodies = [body for body, _ in HOSTILE.values() if len(body) < 10_000]
    for body in [*bodies, chat(), wide, wide[:-3], wide.replace(b"\xf0", b"\xe2"), chat(n="x"), b"", b"{}"]:
        assert outcome(passes, body) == outcome(parse, body)


@pytest.mark.parametrize("how", [parse, passes])
@pytest.mark.parametrize("body", [chat(), chat(zzz=1), completion()])
def test_a_byte_order_mark_is_ignored(how: Callable[..., Parsed[Any]], body: bytes) -> None:
    """PowerShell writes one."""
    type_ = ChatRequest if b"messages" in body else CompletionRequest
    assert how(BOM_UTF8 + body, type_).fields == how(body, type_).fields


def test_pairs_of_surrogates_are_characters() -> None:
    assert parse(chat(user="\U0001f600 \\ud800"), ChatRequest).request.user == "\U0001f600 \\ud800"


@given(
    st.binary(max_size=64)
    | st.text(st.characters(codec=None)).map(lambda text: json.dumps({"model": text}).encode())
)
def test_any_bytes_are_refused_properly(body: bytes) -> None:
    refused(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
known_names = st.sampled_from([*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, "zzz"])


@given(st.sampled_from(REQUESTS), st.dictionaries(known_names, json_values, max_size=6))
def test_any_fields_are_taken_or_refused(type_: type[GenerationRequest], fields: dict[str, Any]) -> None:
    body = json.dumps({**MINIMAL[type_], **fields}).encode()
    try:
        parsed = parse(body, type_)
    except InvalidRequest:
        return
    assert msgspec.json.decode(with_fields(parsed.fields)) == json.loads(body)


@given(
    st.lists(st.text(max_size=8), min_size=1, max_size=4, unique=True),
    st.booleans(),
    st.sampled_from([",", ", "]),
)
def test_a_name_given_twice_is_found_however_it_is_spelt(
    others: list[str], is_ascii: bool, comma: str
) -> None:
    fields = {**CHAT, **{f"zzz{name}": 0 for name in others}}
    pairs = [f"{json.dumps(name)}:{json.dumps(value)}" for name, value in fields.items()]
    assert parse(f"{{{comma.join(pairs)}}}".encode(), ChatRequest).fields.keys() == fields.keys()
    again = json.dumps(f"zzz{others[0]}", ensure_ascii=is_ascii)
    body = f"{{{comma.join([*pairs, f'{again}:0'])}}}"
    assert "given twice" in refused(body.encode(), ChatRequest).message


PARTS = [{"type": "text", "text": 'say "x": {}, '}, {"type": "text", "text": "\u00e9\n"}]
encode = msgspec.json.encode
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": 'as "role": "user", \n\\" \u00e9'},
    {"content": "x", "role": "user"},
    {"role": "user", "name": "n", "content": "x"},
    {"role": "assistant", "content": "x", "reasoning_content": "r", "zzz": {"a": [1, 2]}, 'z"': 1},
    {"role": "user", "content": PARTS},
]
STYLES = {
    "compact": lambda value: json.dumps(value, separators=(",", ":"), ensure_ascii=False),
    "compact, ASCII": lambda value: json.dumps(value, separators=(",", ":")),
    "spaced": json.dumps,
    "indented": lambda value: json.dumps(value, indent=2),
}


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_a_field_given_twice_within_messages_is_found_in_any_style(
    style: Callable[[object], str], length: int
) -> None:
    """The whole body is taken as long as none is."""

    def body(messages: str) -> bytes:
        return f'{{"model":"m","messages":{messages}}}'.encode()

    taken = parse(body(style(MESSAGES[:length])), ChatRequest).request
    assert [message.role for message in taken.messages] == [m["role"] for m in MESSAGES[:length]]
    comma, colon = (", ", ": ") if style is json.dumps else (",", ":")
    for at, message in enumerate(MESSAGES[:length]):
        for name, value in message.items():
            for again in (json.dumps(name), '"' + "".join(f"\\u{ord(char):04x}" for char in name) + '"'):
                pair = style(message)[:-1].rstrip() + f"{comma}{again}{colon}{style(value)}}}"
                others = [*map(style, MESSAGES[:at]), pair, *map(style, MESSAGES[at + 1 : length])]
                error = refused(body(f"[{comma.join(others)}]"), ChatRequest)
                assert isinstance(error, InvalidJson)
                assert error.param == (f"messages[{at}]" if '"' in name else f"messages[{at}].{name}")


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_a_field_given_twice_within_a_part_is_found(style: Callable[[object], str]) -> None:
    part = style(PARTS[0])[:-1].rstrip() + ',"text":"y"}'
    body = f'{{"model":"m","messages":[{{"role":"user","content":[{style(PARTS[1])},{part}]}}]}}'
    assert refused(body.encode(), ChatRequest).param == "messages[0].content[1].text"


@pytest.mark.parametrize(
    ("value", "name", "param"),
    [
        (IMAGE, "url", "messages[0].content[0].image_url.url"),
        (CALL, "arguments", "messages[0].tool_calls[0].function.arguments"),
        (CALL, "id", "messages[0].tool_calls[0].id"),
    ],
)
def test_a_field_given_twice_within_an_image_or_a_call_is_found(value: Any, name: str, param: str) -> None:
    field = "content" if value is IMAGE else "tool_calls"
    body = json.dumps({"model": "m", "messages": [{"role": "assistant", field: [value]}]})
    assert refused(body.replace(f'"{name}"', f'"{name}": "x", "{name}"').encode(), ChatRequest).param == param


def test_what_no_shape_has_is_listed_wherever_it_is() -> None:
    call = {**CALL, "index": 0, "function": {"name": "f", "arguments": "", "zzz": 1}}
    image = {"type": "image_url", "image_url": {"url": "x", "more": 1}, "uuid": "1"}
    messages = [
        {"role": "user", "content": [{**TEXT, "image_url": "http://x"}, image]},
        {"role": "assistant", "tool_calls": [call], "audio": None, "annotations": []},
        {"role": "tool", "content": "x", "tool_call_id": "1", "zzz": 1},
    ]
    parsed = parse(encode({"model": "m", "messages": messages}), ChatRequest)
    within = ("content.image_url", "content.uuid", "content.image_url.more", "audio", "annotations")
    calls = ("tool_calls.index", "tool_calls.function.zzz", "zzz")
    assert parsed.shapeless == tuple(f"messages.{name}" for name in (*within, *calls))


@pytest.mark.parametrize("unit", [b"\\ud800", b"\\n", b"\\ud83d\\ude00", b'\\"', b"x"])
def test_the_error_of_a_malformed_body_takes_linear_time(unit: bytes) -> None:
    """A quadratic scan of 8 MiB would not end before the day does."""
    refused(b'{"user":"\\udfff' + unit * (BODY_LEN_MAX // len(unit)) + b'","model":')


# -- messages for people --------------------------------------------------------------------------


def said(**part: str) -> dict[str, Any]:
    """A message of the user's that has one part."""
    return {"role": "user", "content": [part]}


@pytest.mark.parametrize(
    ("fields", "param", "what"),
    [
        ({"temperature": 3}, "temperature", "be at most 2.0"),
        ({"repetition_penalty": 0}, "repetition_penalty", "be greater than 0.0"),
        ({"n": "x"}, "n", "be an integer or null, not a string"),
        ({"stop": [""]}, "stop[0]", "have at least 1 characters"),
        ({"messages": []}, "messages", "have at least 1 items"),
        ({"messages": "hi"}, "messages", "be an array, not a string"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role", "be one of assistant, dev"),
        (
            {"messages": [said(type="input_audio")]},
            "messages[0].content[0].type",
            "be one of text, image_url",
        ),
        ({"messages": [said(type="text")]}, "messages[0].content[0].text", "required"),
        ({"messages": [said()]}, "messages[0].content[0].type", "required"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "required"),
        ({"messages": [{**MESSAGE, "content": None, "refusal": ""}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "user", "content": [IMAGE] * (IMAGES_MAX + 1)}]}, "messages", "have at most"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "be at most 100.0"),
        ({"metadata": {"a": 1}}, "metadata", "be a string, not an integer"),
        ({"service_tier": "gold"}, "service_tier", "be one of auto, default, flex, priority, scale"),
    ],
)
def test_messages_say_what_is_right(fields: dict[str, Any], param: str, what: str) -> None:
    error = refused(chat(**fields))
    assert error.param == param
    assert error.message.removeprefix("A value of ").startswith(
        (f"{param} must {what}", f"{param} is {what}")
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [MESSAGE] * (MESSAGES_MAX + 1)}, "messages"),
        ({"n": CHOICES_MAX + 1}, "n"),
        ({"stop": ["a"] * (STOP_MAX + 1)}, "stop"),
        ({"stop": "a" * (STOP_LEN_MAX + 1)}, "stop"),
        ({"stop_token_ids": [1] * (STOP_TOKEN_IDS_MAX + 1)}, "stop_token_ids"),
        ({"stop_token_ids": [TOKEN_ID_MAX + 1]}, "stop_token_ids[0]"),
        ({"logprobs": True, "top_logprobs": LOGPROBS_MAX + 1}, "top_logprobs"),
        ({"logit_bias": {str(token): 0 for token in range(LOGIT_BIAS_MAX + 1)}}, "logit_bias"),
        ({"max_tokens": TOKENS_MAX + 1}, "max_tokens"),
        ({"priority": _PRIORITY_MAX + 1}, "priority"),
        ({f"field{number}": 0 for number in range(FIELDS_MAX)}, None),
    ],
)
def test_what_is_beyond_a_bound_is_refused_by_its_name(fields: dict[str, Any], param: str | None) -> None:
    assert refused(chat(**fields)).param == param


@pytest.mark.parametrize("text", ["\\ud800", "\\ud800 and more of it", "\\udfff", "\\ud800" * 100_000])
def test_half_of_a_surrogate_pair_is_called_so(text: str) -> None:
    assert "half of a surrogate pair" in refused(f'{{"user":"{text}"}}'.encode()).message


@pytest.mark.parametrize("name", ["model", "messages"])
def test_a_missing_field_is_named(name: str) -> None:
    body = {key: value for key, value in CHAT.items() if key != name}
    error = refused(json.dumps(body).encode())
    assert (error.param, error.message) == (name, f"{name} is required.")


@given(st.text("QXZ0123456789", min_size=8, max_size=20))
def test_no_message_repeats_a_value(canary: str) -> None:
    for fields in ({"messages": [{"role": canary, "content": "x"}]}, {"service_tier": canary}, {"n": canary}):
        assert canary not in refused(chat(**fields)).message


# -- meaning --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "type_", "param"),
    [
        (chat(stream_options={}), ChatRequest, "stream_options"),
        (chat(stream_options={}, stream=False), ChatRequest, "stream_options"),
        (chat(top_logprobs=1), ChatRequest, "top_logprobs"),
        (chat(top_logprobs=1, logprobs=False), ChatRequest, "top_logprobs"),
        (chat(min_tokens=3, max_tokens=2), ChatRequest, "min_tokens"),
        (chat(min_tokens=3, max_tokens=9, max_completion_tokens=2), ChatRequest, "min_tokens"),
        (completion(min_tokens=17), CompletionRequest, "min_tokens"),
        (completion(max_tokens=0), CompletionRequest, "max_tokens"),
        (completion(prompt=[]), CompletionRequest, "prompt"),
        (completion(prompt=["a", 1]), CompletionRequest, "prompt"),
        (completion(prompt=["a"] * (PROMPTS_MAX + 1)), CompletionRequest, "prompt"),
        (completion(prompt=["a"] * 5, n=64), CompletionRequest, "n"),
        *(
            (chat(logit_bias={key: 1}), ChatRequest, "logit_bias")
            for key in ("x", "-1", "1.0", "", " 1", "٣", "9" * 10, "1" * 5000)
        ),
        (chat(logit_bias={"7": 100, "07": -100}), ChatRequest, "logit_bias"),
    ],
)
def test_contradictory_fields_are_refused(body: bytes, type_: type[Request], param: str) -> None:
    assert refused(body, type_).param == param


@pytest.mark.parametrize(
    ("body", "type_", "param"),
    [
        (chat(functions=[{}]), ChatRequest, "functions"),
        (chat(function_call={"name": "f"}), ChatRequest, "function_call"),
        (chat(modalities=["text", "audio"]), ChatRequest, "modalities"),
        (chat(audio={"voice": "alloy"}), ChatRequest, "audio"),
        (chat(verbosity="low"), ChatRequest, "verbosity"),
        (completion(best_of=2), CompletionRequest, "best_of"),
        (completion(best_of=2, n=3), CompletionRequest, "best_of"),
        (chat(guided_json={"type": "object"}), ChatRequest, "guided_json"),
        (completion(tools=[{}]), CompletionRequest, "tools"),
        (completion(chat_template_kwargs={"a": 1}), CompletionRequest, "chat_template_kwargs"),
        (completion(thinking_token_budget=100), CompletionRequest, "thinking_token_budget"),
        (chat(web_search_options={}), ChatRequest, "web_search_options"),
        (completion(use_beam_search=True), CompletionRequest, "use_beam_search"),
        (completion(bad_words=["x"]), CompletionRequest, "bad_words"),
        (completion(allowed_token_ids=[1]), CompletionRequest, "allowed_token_ids"),
        (completion(truncate_prompt_tokens=3), CompletionRequest, "truncate_prompt_tokens"),
        (completion(skip_special_tokens=False), CompletionRequest, "skip_special_tokens"),
        (completion(include_stop_str_in_output=True), CompletionRequest, "include_stop_str_in_output"),
        (
            chat(messages=[{"role": "user", "content": "x", "tool_calls": [CALL]}]),
            ChatRequest,
            "messages[0].tool_calls",
        ),
        (chat(messages=[CALLS, {**MESSAGE, "tool_call_id": "1"}]), ChatRequest, "messages[1].tool_call_id"),
        (chat(messages=[{**CALLS, "tool_calls": [CALL, CUSTOM]}]), ChatRequest, "messages[0].tool_calls[1]"),
        (
            chat(messages=[{**MESSAGE, "function_call": CALL["function"]}]),
            ChatRequest,
            "messages[0].function_call",
        ),
        (chat(messages=[{"role": "function", "name": "f", "content": "x"}]), ChatRequest, "messages[0].role"),
        (chat(messages=[{**MESSAGE, "content": [TEXT, IMAGE]}]), ChatRequest, "messages[0].content[1]"),
        (chat(messages=[{**MESSAGE, "audio": {"id": "x"}}]), ChatRequest, "messages[0].audio"),
        (encode({"messages": [{**MESSAGE, "content": [IMAGE]}]}), TokenizeRequest, "messages[0].content[0]"),
        (chat(messages=[MESSAGE, {**MESSAGE, "prefix": True}]), ChatRequest, "messages[1].prefix"),
    ],
)
def test_unsupported_parameters_are_refused(body: bytes, type_: type[Request], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as error:
        parse(body, type_).require_supported()
    assert error.value.param == param


@pytest.mark.parametrize(
    ("body", "type_"),
    [
        (chat(stream_options={"include_usage": True}, stream=True), ChatRequest),
        (chat(top_logprobs=0), ChatRequest),
        (chat(top_logprobs=5, logprobs=True), ChatRequest),
        (chat(tools=[], tool_choice="none", functions=[], function_call=None, audio=None), ChatRequest),
        (chat(response_format={"type": "text"}, modalities=["text"], verbosity="medium"), ChatRequest),
        (chat(logit_bias={"0": -100, "2147483647": 100}), ChatRequest),
        (chat(guided_json=None, chat_template_kwargs={}, skip_special_tokens=True), ChatRequest),
        (
            chat(
                messages=[{**MESSAGE, "refusal": None, "tool_calls": None, "audio": None, "annotations": []}]
            ),
            ChatRequest,
        ),
        (
            chat(messages=[{**MESSAGE, "reasoning_content": "hm", "tool_calls": [], "prefix": False}]),
            ChatRequest,
        ),
        (chat(metadata={"a": "b"}, store=True, user="u", service_tier="auto"), ChatRequest),
        (
            chat(messages=[{"role": "developer", "content": [{"type": "text", "text": "x"}], "name": "n"}]),
            ChatRequest,
        ),
        (completion(prompt=[1, 2, 3]), CompletionRequest),
        (completion(prompt=[[1], [2]], n=2, best_of=2), CompletionRequest),
        (completion(max_tokens=0, echo=True, suffix=""), CompletionRequest),
    ],
)
def test_fields_that_ask_for_nothing_are_accepted(body: bytes, type_: type[GenerationRequest]) -> None:
    parsed = parse(body, type_)
    parsed.require_supported()
    assert not parsed.ignored


@pytest.mark.parametrize(
    ("name", "asks", "nothing"),
    [
        ("stop_regex", "a+", ""),
        ("stop_sequences", ["x"], []),
        ("prompt_embeds", "AAAA", ""),
        ("structural_tag", {"type": "tag"}, {}),
        ("n_predict", 3, -1),
        ("top_n_sigma", 1.5, -1.0),
        ("guidance_scale", 2, 1.0),
        ("return_tokens_as_token_ids", True, False),
        ("logprob_token_ids", [1], []),
        ("repetition_detection", {"max_pattern_size": 3}, {}),
        ("lora", [{"id": 0, "scale": 1.0}], []),
        ("adapter_id", "of-somebody", ""),
    ],
)
@pytest.mark.parametrize(("make", "type_"), [(chat, ChatRequest), (completion, CompletionRequest)])
def test_other_engines_extensions_that_change_the_answer_are_refused(
    name: str, asks: object, nothing: object, make: Any, type_: type[GenerationRequest]
) -> None:
    with pytest.raises(UnsupportedParameter) as error:
        parse(make(**{name: asks}), type_).require_supported()
    assert error.value.param == name
    for value in (nothing, None):
        parsed = parse(make(**{name: value}), type_)
        parsed.require_supported()
        assert not parsed.ignored


# -- what goes on ---------------------------------------------------------------------------------


def test_unknown_fields_are_named_and_kept() -> None:
    parsed = parse(chat(temprature=0.5, **{"bad name\r\n": 1, "x" * 65: 2}), ChatRequest)
    assert parsed.ignored == ("temprature", "bad name\r\n", "x" * 65)
    assert parsed.ignored_header == "temprature"
    assert bytes(parsed.fields["temprature"]) == b"0.5"


def test_an_unknown_field_that_is_null_asks_for_nothing() -> None:
    assert parse(chat(prediction=None, zzz="null", top_k=None), ChatRequest).ignored == ("zzz",)


def test_unknown_fields_inside_objects_are_named() -> None:
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    messages = [{**MESSAGE, "contnet": "y"}, {"role": "user", "content": [part, part]}, MESSAGE]
    parsed = parse(
        chat(messages=messages, stream=True, stream_options={"include_obfuscation": 1}), ChatRequest
    )
    assert parsed.ignored == (
        "stream_options.include_obfuscation",
        "messages.contnet",
        "messages.content.cache_control",
    )


def test_the_header_of_ignored_fields_is_bounded() -> None:
    parsed = parse(chat(**{f"zzz{number}": 1 for number in range(250)}), ChatRequest)
    assert len(parsed.ignored) == 250
    assert parsed.ignored_header.count(",") == IGNORED_NAMED_MAX - 1


def test_fields_are_replaced_and_added() -> None:
    parsed = parse(chat(temperature=0.50, zzz={"a": [1]}), ChatRequest)
    body = with_fields(parsed.fields, model="served", penstock={"x": 1})
    assert json.loads(body) == {
        **CHAT,
        "model": "served",
        "temperature": 0.5,
        "zzz": {"a": [1]},
        "penstock": {"x": 1},
    }


def test_tokenize_and_detokenize_requests_parse() -> None:
    assert parse(b'{"tokens":[1,2]}', DetokenizeRequest).request.tokens == [1, 2]
    assert refused(b'{"tokens":[-1]}', DetokenizeRequest).param == "tokens[0]"
    assert isinstance(refused(b"{", DetokenizeRequest), InvalidJson)


# -- bounds on what is made -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "type_", "says"),
    [
        (chat(**{f"f{number}": 1 for number in range(300)}), ChatRequest, "256 fields"),
        (chat(**{f"f{number}": 1 for number in range(20_000)}), ChatRequest, "fields"),
        (completion(prompt=[[1]] * 200_000), CompletionRequest, "values"),
        (completion(stop=["a"] * 70_000), CompletionRequest, "strings"),
        (chat(tools=[1] * 300_000), ChatRequest, "values"),
        (b'{"tokens":[' + b"1," * 300_000 + b"1]}", DetokenizeRequest, "values"),
    ],
    ids=["fields", "many fields", "lists", "strings", "tools", "tokens"],
)
def test_bodies_that_would_become_too_many_objects_are_refused_before_they_do(
    body: bytes, type_: type[Request], says: str
) -> None:
    tracemalloc.start()
    try:
        assert says in refused(body, type_).message
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * len(body) + 8_000_000, (
        "counting copies the bytes and cuts them at strings, no more"
    )


def test_a_long_prompt_of_ids_is_not_too_much() -> None:
    assert len(parse(completion(prompt=[123_456] * 200_000), CompletionRequest).request.prompt) == 200_000
