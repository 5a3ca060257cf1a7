"""Fields of other engines: what asks for another answer is refused, what asks for nothing is not."""

from __future__ import annotations

from typing import Any

import pytest

from shared.apis.chat import ChatRequest
from shared.apis.completions import CompletionRequest
from shared.apis.nothing import INSTEAD
from shared.apis.tokenize import DetokenizeRequest, TokenizeRequest
from shared.apis.validation import parse
from shared.wire.errors import UnsupportedParameter
from tests.shared.wire.request_bodies import chat, completion

ASKING: dict[str, Any] = {
    "do_sample": False,
    "json_schema": {},
    "guided_json": {},
    "functions": [{}],
    "function_call": {"name": "f"},
    "guided_regex": "a+",
    "enable_thinking": False,
    "num_beams": 4,
    "max_new_tokens": 5,
    "min_new_tokens": 5,
    "random_seed": 7,
    "input_ids": [1],
    "prompt_token_ids": [[1]],
    "penalty_alpha": 0.6,
    "banned_tokens": [1],
    "negative_prompt": "no",
    "lora_request": {"lora_name": "x"},
}
"""Fields with which other engines would answer otherwise, whether to chats or to completions."""


@pytest.mark.parametrize("name", ASKING)
def test_what_asks_for_another_answer_is_refused(name: str) -> None:
    fields = {name: ASKING[name]}
    for parsed in (parse(chat(**fields), ChatRequest), parse(completion(**fields), CompletionRequest)):
        assert parsed.unsupported == name


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": None, "length_penalty": 1.0, "do_sample": True, "num_beams": 1},
        {"tools": [], "functions": None, "tool_choice": "auto", "input_ids": [], "min_new_tokens": 0},
        dict.fromkeys(("json_schema", "max_new_tokens", "random_seed", "prompt_token_ids", "do_sample")),
        {"penalty_alpha": 0, "banned_tokens": [], "negative_prompt": "", "lora_request": {}},
    ],
)
def test_a_field_of_another_engine_that_asks_for_nothing_is_not_named(fields: dict[str, Any]) -> None:
    for parsed in (parse(chat(**fields), ChatRequest), parse(completion(**fields), CompletionRequest)):
        assert parsed.ignored == ()
        parsed.require_supported()


def test_what_asks_for_other_tokens_is_refused() -> None:
    thinks = b'{"prompt": "a", "enable_thinking": true}'
    assert parse(thinks, TokenizeRequest).unsupported == "enable_thinking"
    nothing = b'{"prompt": "a", "tools": [], "add_generation_prompt": true, "chat_template_kwargs": null}'
    parsed = parse(nothing, TokenizeRequest)
    assert (parsed.ignored, parsed.unsupported) == ((), None)
    skips = b'{"tokens": [1], "skip_special_tokens": true}'
    assert parse(skips, DetokenizeRequest).unsupported == "skip_special_tokens"


def test_a_field_that_has_another_name_here_is_refused_with_that_name() -> None:
    assert INSTEAD.keys() <= ChatRequest.nothing.keys()
    with pytest.raises(UnsupportedParameter, match=r"^do_sample is not supported; use temperature 0\.$"):
        parse(chat(do_sample=False), ChatRequest).require_supported()
    with pytest.raises(UnsupportedParameter, match=r"use structured_outputs\.json\.$"):
        parse(chat(guided_json={"type": "object"}), ChatRequest).require_supported()
