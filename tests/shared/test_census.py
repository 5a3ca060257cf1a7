from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import census
from shared.census import Census, census_slices, take_census

TEXT = st.text(st.sampled_from('ab",:[]{}\\é\N{WATER WAVE}\n') | st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-99, 99)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def counted(value: Any) -> Census:
    """The same by looking at the decoded value."""
    if isinstance(value, str):
        return Census(0, 0, 1)
    if isinstance(value, dict):
        inner, names = list(value.values()), len(value)
    elif isinstance(value, list):
        inner, names = value, 0
    else:
        return Census(0, 0, 0)
    parts = [counted(one) for one in inner]
    return Census(
        max(1, len(inner)) + sum(part.values for part in parts),
        names + sum(part.fields for part in parts),
        names + sum(part.strings for part in parts),
    )


def numbers(census: Census) -> tuple[int, int, int]:
    return census.values, census.fields, census.strings


@given(JSON, st.booleans(), st.sampled_from([None, 1]))
def test_the_counts_are_exact(value: Any, ascii_only: bool, indent: int | None) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8")
    census = take_census(body)
    assert numbers(census) == numbers(counted(value))
    assert json.dumps(value, ensure_ascii=False).isascii() or not census.is_narrow


@given(JSON, st.booleans(), st.integers(2, 9))
def test_slices_change_nothing_wherever_they_are_cut(value: Any, ascii_only: bool, slice_len: int) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8")
    census = take_census(body, slice_len)
    assert numbers(census) == numbers(counted(value))
    assert json.dumps(value, ensure_ascii=False).isascii() or not census.is_narrow


def test_a_long_body_is_counted_in_slices_that_let_others_run() -> None:
    slices = census_slices(b'"' + b"\\n" * (2 * census.SLICE_LEN) + b'"')
    assert sum(1 for _ in slices) >= 4


@given(st.binary(max_size=60))
def test_what_is_no_json_is_counted_without_harm(body: bytes) -> None:
    take_census(body)


@pytest.mark.parametrize(
    ("body", "excess"),
    [
        (b"[" + b"1," * census.VALUES_MAX + b"1]", "values"),
        (b"[" + b"[1]," * (census.VALUES_MAX // 2) + b"1]", "values"),
        (b'{"a":' * (census.FIELDS_MAX + 1) + b"1" + b"}" * (census.FIELDS_MAX + 1), "fields"),
        (b"[" + b'"",' * census.STRINGS_MAX + b'""]', "strings"),
    ],
)
def test_each_bound_is_named(body: bytes, excess: str) -> None:
    told = take_census(body).excess
    assert told is not None
    assert excess in told


def test_a_long_text_is_no_excess() -> None:
    text = json.dumps({"prompt": 'print("{[,]}", \\n)' * 100_000}).encode()
    assert take_census(text) == Census(1, 1, 2)
    assert take_census(text).excess is None
