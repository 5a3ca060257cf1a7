"""The door's arithmetic: seeds, salts, and how long an answer may be."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api.admission import (
    TIMEOUT_S_MAX,
    Limits,
    SamplingDefaults,
    cache_salt,
    derive_seed,
    max_tokens_of,
    plan_choices,
    service_class,
    timeout_s,
)
from engine.core.messages import SamplingParams, ServiceClass
from shared.errors import ContextLengthExceeded, InvalidRequest, NeverFits
from shared.openai import ChatMessage, ChatRequest, CompletionRequest

CHAT = ChatRequest(model="m", messages=[ChatMessage("user", "x")])


@given(
    prompt_len=st.integers(1, 80),
    asked=st.none() | st.integers(1, 80),
    max_model_len=st.integers(2, 64),
    kv_tokens=st.integers(2, 64),
)
def test_what_passes_fits_and_what_does_not_names_what_to_change(
    prompt_len: int, asked: int | None, max_model_len: int, kv_tokens: int
) -> None:
    limits = Limits(max_model_len, kv_tokens, 100)
    for request, prompt_param in (
        (ChatRequest(model="m", messages=CHAT.messages, max_tokens=asked), "messages"),
        (CompletionRequest(model="m", prompt="x", max_tokens=asked), "prompt"),
    ):
        granted = granted_or_refused(request, prompt_len, limits)
        if isinstance(granted, int):
            assert 1 <= granted <= min(max_model_len, kv_tokens + 1) - prompt_len
            assert granted == asked or asked is None
        else:
            is_context = isinstance(granted, ContextLengthExceeded)
            room = (max_model_len if is_context else kv_tokens + 1) - prompt_len
            assert room < (asked or 1)
            assert granted.param == ("max_tokens" if room >= 1 else prompt_param)
            assert is_context == (prompt_len + (asked or 1) > max_model_len)


def granted_or_refused(
    request: ChatRequest | CompletionRequest, prompt_len: int, limits: Limits
) -> int | ContextLengthExceeded | NeverFits:
    try:
        return max_tokens_of(request, prompt_len, limits)
    except (ContextLengthExceeded, NeverFits) as error:
        return error


def test_a_choice_keeps_its_seed_whatever_n_is() -> None:
    limits = Limits(64, 64, 100)

    def seeds(n: int | None) -> list[int]:
        request = ChatRequest(model="m", messages=CHAT.messages, seed=5, n=n)
        choices = plan_choices(request, [[1, 2]], limits, frozenset(), SamplingDefaults())
        return [choice.sampling.seed for choice in choices]

    assert seeds(None) == seeds(1) == seeds(4)[:1]
    assert len(set(seeds(4))) == 4


@given(seed=st.integers(0, 2**64 - 1), choice=st.integers(0, 255))
def test_seeds_are_unsigned_64_bit(seed: int, choice: int) -> None:
    assert 0 <= derive_seed(seed, choice) < 2**64


@given(st.text(max_size=5), st.text(max_size=5), st.text(max_size=5), st.text(max_size=5))
def test_salts_differ_unless_both_parts_agree(a: str, b: str, c: str, d: str) -> None:
    assert (cache_salt(a, b) == cache_salt(c, d)) == ((a, b) == (c, d))


def test_what_a_request_leaves_open_is_the_models_to_say() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)

    def sampling(**asked: Any) -> SamplingParams:
        request = ChatRequest(model="m", messages=CHAT.messages, **asked)
        [choice] = plan_choices(request, [[1, 2]], Limits(64, 64, 100), frozenset(), defaults)
        return choice.sampling

    open_, asked = sampling(), sampling(temperature=0.0, top_p=1.0, top_k=-1, repetition_penalty=1.0)
    assert (open_.temperature, open_.top_p, open_.top_k, open_.repetition_penalty) == (0.6, 0.9, 20, 1.1)
    assert (asked.temperature, asked.top_p, asked.top_k, asked.repetition_penalty) == (0.0, 1.0, 0, 1.0)


@pytest.mark.parametrize(
    ("fields", "tier_max", "expected"),
    [
        ({}, None, ServiceClass.DEFAULT),
        ({"service_tier": "auto"}, None, ServiceClass.DEFAULT),
        ({"service_tier": "scale"}, None, ServiceClass.DEFAULT),
        ({"service_tier": "priority"}, None, ServiceClass.PRIORITY),
        ({"service_tier": "flex"}, None, ServiceClass.FLEX),
        ({"priority": -1}, None, ServiceClass.PRIORITY),
        ({"priority": 0}, None, ServiceClass.DEFAULT),
        ({"priority": 7}, None, ServiceClass.FLEX),
        ({"priority": 7, "service_tier": "auto"}, None, ServiceClass.FLEX),
        ({"priority": 7, "service_tier": "default"}, None, ServiceClass.DEFAULT),
        ({"service_tier": "priority"}, "default", ServiceClass.DEFAULT),
        ({"service_tier": "priority"}, "priority", ServiceClass.PRIORITY),
        ({}, "flex", ServiceClass.FLEX),
        ({"service_tier": "flex"}, "nonsense", ServiceClass.FLEX),
    ],
)
def test_the_class_is_what_was_asked_for_under_the_tenants_cap(
    fields: dict[str, object], tier_max: str | None, expected: ServiceClass
) -> None:
    body = {"model": "m", "prompt": "x", **fields}
    assert service_class(msgspec.convert(body, CompletionRequest), tier_max) is expected


@pytest.mark.parametrize(
    ("value", "expected"), [(None, None), ("5", 5.0), ("0.25", 0.25), ("86400", TIMEOUT_S_MAX)]
)
def test_the_callers_bounds_are_seconds(value: str | None, expected: float | None) -> None:
    assert timeout_s("x-request-timeout", value) == expected


@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf", "86401", "5s"])
def test_a_bound_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        timeout_s("x-request-timeout", value)
    assert refused.value.param == "x-request-timeout"
