from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.apis import holding
from shared.apis.holding import Census, census_slices, take_census

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
@example("\N{WATER WAVE}", True, None)
def test_the_counts_are_exact(value: Any, ascii_only: bool, indent: int | None) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8")
    census = take_census(body)
    assert numbers(census) == numbers(counted(value))
    assert json.dumps(value, ensure_ascii=False).isascii() or not census.is_narrow


@given(JSON, st.booleans(), st.integers(2, 9))
@example('"', True, 2)
@example("[,", True, 2)
@example("\N{WATER WAVE}", True, 2)
def test_slices_change_nothing_wherever_they_are_cut(value: Any, ascii_only: bool, slice_len: int) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8")
    census = take_census(body, slice_len)
    assert numbers(census) == numbers(counted(value))
    assert json.dumps(value, ensure_ascii=False).isascii() or not census.is_narrow


def depth_of(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth_of, inner), default=0)


@given(JSON, st.integers(0, 2 * holding.DEPTH_MAX), st.sampled_from([2, 9, holding.SLICE_LEN]))
@example(1, holding.DEPTH_MAX, holding.SLICE_LEN)
def test_what_is_too_deep_and_nothing_else_is_told(value: Any, levels: int, slice_len: int) -> None:
    """Wherever the depth is: behind much that is flat, in a field, in several slices."""
    flat = [value] * 3 + [[]] * holding.DEPTH_MAX
    deep: Any = value
    for number in range(levels):
        deep = {"a": deep} if number % 3 else [deep, value]
    found = take_census(json.dumps({"flat": flat, "deep": deep}).encode(), slice_len)
    is_deep = depth_of(deep) + 1 > holding.DEPTH_MAX
    assert (found.depth > holding.DEPTH_MAX) == is_deep
    assert (found.excess is not None) == is_deep


@given(st.integers(0, 2 * holding.DEPTH_MAX), st.sampled_from(["[", '{"a":']))
@example(holding.DEPTH_MAX + 1, "[")
def test_a_short_body_may_be_deep_too(levels: int, opening: str) -> None:
    closing = "]" if opening == "[" else "}"
    body = (opening * levels + "1" + closing * levels).encode()
    assert len(body) < holding.COUNTED_LEN_MIN
    assert (holding.census_of(body).excess is not None) == (levels > holding.DEPTH_MAX)
    text = json.dumps({"text": "[{" * levels}).encode()
    assert holding.census_of(text).excess is None, "text is no structure"


def test_looking_for_depth_lets_others_run() -> None:
    wide = b"[" * 100 + b"[]," * (4 * holding.PIECES * holding.DEPTH_MAX)
    pieces = sum(1 for _ in census_slices(wide, len(wide)))
    assert pieces >= 4


def test_a_long_body_is_counted_in_slices_that_let_others_run() -> None:
    slices = census_slices(b'"' + b"\\n" * (2 * holding.SLICE_LEN) + b'"')
    assert sum(1 for _ in slices) >= 4


@given(st.binary(max_size=60))
def test_what_is_no_json_is_counted_without_harm(body: bytes) -> None:
    take_census(body)


@pytest.mark.parametrize(
    ("body", "excess"),
    [
        (b"[" + b"1," * holding.VALUES_MAX + b"1]", "values"),
        (b"[" + b"[1]," * (holding.VALUES_MAX // 2) + b"1]", "values"),
        (b'{"a":' * (holding.FIELDS_MAX + 1) + b"1" + b"}" * (holding.FIELDS_MAX + 1), "fields"),
        (b"[" + b'"",' * holding.STRINGS_MAX + b'""]', "strings"),
        (b"[" * (holding.DEPTH_MAX + 1) + b"]" * (holding.DEPTH_MAX + 1), "128 levels"),
    ],
)
def test_each_bound_is_named(body: bytes, excess: str) -> None:
    told = take_census(body).excess
    assert told is not None
    assert excess in told


def test_text_that_is_not_narrow_takes_so_many_bytes_a_character() -> None:
    narrow, wide = Census(1, 1, 2), Census(1, 1, 2, is_narrow=False)
    more = holding.memory_of(1000, wide) - holding.memory_of(1000, narrow)
    assert more == holding.TEXTS * 1000 * (holding.CHARACTER_BYTES_MAX - 1)


def test_a_long_text_is_no_excess() -> None:
    text = json.dumps({"prompt": 'print("{[,]}", \\n)' * 100_000}).encode()
    assert take_census(text) == Census(1, 1, 2)
    assert take_census(text).excess is None
