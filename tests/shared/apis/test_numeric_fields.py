"""Every numeric field of a request at its bounds, which are read from the types themselves."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from shared.apis.completions import CompletionRequest
from shared.apis.generation import GenerationRequest
from shared.apis.validation import parse
from shared.wire.errors import InvalidRequest
from tests.shared.wire.request_bodies import MINIMAL, REQUESTS, refused


class NumericField:
    def __init__(
        self,
        type_: type[GenerationRequest],
        name: str,
        number: inspect.IntType | inspect.FloatType,
        optional: bool,
    ):
        self.type, self.name, self.number, self.optional = type_, name, number, optional
        self.integral = isinstance(number, inspect.IntType)

    def __repr__(self) -> str:
        return f"{self.type.__name__}.{self.name}"

    def outside(self) -> list[float]:
        """Just below the lowest and just above the highest value allowed."""
        number, values = self.number, []
        step = 1 if self.integral else 1e-9
        if number.ge is not None:
            values.append(number.ge - step)
        if number.gt is not None:
            values.append(number.gt)
        if number.le is not None:
            values.append(number.le + step)
        return values

    def inside(self) -> list[float]:
        number, values = self.number, []
        if number.ge is not None:
            values.append(number.ge)
        if number.gt is not None:
            values.append(1 if self.integral else math.nextafter(number.gt, math.inf))
        if number.le is not None:
            values.append(number.le)
        return values


def numeric_fields() -> list[NumericField]:
    found = []
    for type_ in REQUESTS:
        info = inspect.type_info(type_)
        assert isinstance(info, inspect.StructType)
        for field in info.fields:
            options = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
            for option in options:
                if isinstance(option, inspect.IntType | inspect.FloatType):
                    optional = any(isinstance(other, inspect.NoneType) for other in options)
                    found.append(NumericField(type_, field.encode_name, option, optional))
    return found


FIELDS = numeric_fields()


def companions(field: NumericField, value: Any) -> dict[str, Any]:
    """What a field needs beside it to be legal at its own extremes."""
    match field.name:
        case "top_logprobs":
            return {"logprobs": True}
        case "best_of" if value in range(1, 65) and type(value) is int:
            return {"n": value}
        case "max_tokens" if field.type is CompletionRequest:
            return {"echo": True}
        case "min_tokens":
            return {"max_tokens": 2**24}
    return {}


def body_with(field: NumericField, value: Any) -> bytes:
    return json.dumps({**MINIMAL[field.type], **companions(field, value), field.name: value}).encode()


def taken(field: NumericField, value: Any) -> Any:
    """The value that a request has where it was sent this one."""
    return getattr(parse(body_with(field, value), field.type).request, field.name)


def test_the_numeric_fields_are_found() -> None:
    names = {repr(field) for field in FIELDS}
    assert {
        "ChatRequest.temperature",
        "CompletionRequest.logprobs",
        "ChatRequest.seed",
        "CompletionRequest.n",
    } <= names
    assert len(FIELDS) >= 26


def test_every_number_is_bounded_on_both_sides() -> None:
    assert [field for field in FIELDS if not len(field.inside()) == len(field.outside()) == 2] == []


def test_the_bounds_themselves_are_allowed() -> None:
    for field in FIELDS:
        for value in field.inside():
            assert taken(field, value) == value, field


def test_past_the_bounds_is_refused_by_name() -> None:
    for field in FIELDS:
        for value in [*field.outside(), 10**30, -(10**30)]:
            error = refused(body_with(field, value), field.type)
            assert error.param == field.name, field
            assert error.message.startswith(f"{field.name} must be ")


@pytest.mark.parametrize("value", ["1", True, False, [], {}, [1]], ids=repr)
def test_a_wrong_type_is_refused_by_name(value: Any) -> None:
    for field in FIELDS:
        assert refused(body_with(field, value), field.type).param == field.name, field


def test_null_is_the_same_as_absent() -> None:
    for field in FIELDS:
        assert field.optional
        assert taken(field, None) is None, field


@given(st.sampled_from(FIELDS), st.integers() | st.floats() | st.text() | st.none() | st.booleans())
def test_any_value_is_taken_or_refused_by_name(field: NumericField, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        assert refused(body_with(field, value), field.type).param is None  # no JSON at all
        return
    try:
        kept = taken(field, value)
    except InvalidRequest as error:
        param, kept = error.param, value
    else:
        param = field.name
    assert (param, kept) == (field.name, value)
