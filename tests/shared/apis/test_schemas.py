"""What the door says of JSON schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.apis.patterns import UNROLLED_LEN_MAX, check_pattern, unrolled_len
from shared.apis.schemas import (
    IGNORED_MAX,
    LEVELS_MAX,
    OPTIONAL_MAX,
    REF_LEVELS_MAX,
    SCHEMA_LEN_MAX,
    SIZE_MAX,
    check_schema,
    held_schema,
)
from shared.wire.errors import InvalidRequest

STRICT = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}


def refused(schema: Any, *, strict: bool = False) -> str | None:
    """The place of what is refused."""
    with pytest.raises(InvalidRequest) as error:
        check_schema(schema if isinstance(schema, str) else json.dumps(schema), strict=strict, param="at")
    assert error.value.param is not None
    assert error.value.message.startswith(error.value.param)
    return error.value.param


def of(name: str, value: Any, **more: Any) -> dict[str, Any]:
    """A strict schema whose property `a` has a keyword."""
    return {**STRICT, "properties": {"a": {"type": "string", **more, name: value}}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("not", {}), ("if", {}), ("contains", {}), ("uniqueItems", True), ("propertyNames", {})),
        *(("dependentRequired", {}), ("dependentSchemas", {}), ("dependencies", {}), ("minContains", 1)),
        *(("unevaluatedProperties", False), ("$dynamicRef", "#x"), ("format", "idn-email")),
    ],
)
def test_a_keyword_that_cannot_be_held_is_named(name: str, value: Any) -> None:
    assert refused(of(name, value), strict=True) == f"at.properties.a.{name}"
    held = held_schema(json.dumps(of(name, value)), strict=False, param="at")
    assert held.ignored == (f"properties.a.{name}" if "$" not in name else name,)
    assert name not in json.loads(held.text)["properties"]["a"]


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({**STRICT, "type": "array"}, "type"),
        ({**STRICT, "anyOf": [{}]}, "anyOf"),
        ({**STRICT, "required": []}, "required"),
        ({**STRICT, "additionalProperties": True}, "additionalProperties"),
        (of("type", "object"), "properties.a.additionalProperties"),
        ({**STRICT, "allOf": [{}]}, "allOf"),
        (of("enum", list(range(1001))), ""),
    ],
)
def test_strict_is_as_openai_has_it(schema: Any, place: str) -> None:
    assert refused(schema, strict=True) == f"at.{place}".removesuffix(".")
    check_schema(json.dumps(schema), strict=False, param="at")


def test_strict_has_ten_levels() -> None:
    schema: dict[str, Any] = STRICT
    for _ in range(9):
        schema = {**STRICT, "properties": {"a": schema}}
    assert check_schema(json.dumps(schema), strict=True, param="at") == ()
    refused({**STRICT, "properties": {"a": schema}}, strict=True)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "text"}, "type"),
        ({"minLength": -1}, "minLength"),
        ({"maxItems": 1.5}, "maxItems"),
        ({"minimum": "1"}, "minimum"),
        ({"multipleOf": 0}, "multipleOf"),
        ({"multipleOf": 10_007}, "multipleOf"),
        ({"pattern": 1}, "pattern"),
        ({"pattern": "((x{100}){100}){100}"}, "pattern"),
        ({"pattern": f"x{{{UNROLLED_LEN_MAX + 1}}}"}, "pattern"),
        ({"enum": []}, "enum"),
        ({"required": "a"}, "required"),
        ({"properties": []}, "properties"),
        ({"properties": {"a": 1}}, "properties.a"),
        ({"properties": {"a b": {"enum": 1}}}, "properties.*.enum"),
        ({"anyOf": {}}, "anyOf"),
        ({"items": 1}, "items"),
        ({"$ref": "https://example.com/s"}, "$ref"),
        ({"$ref": "#/$defs/missing"}, "$ref"),
        ({"$ref": "#name"}, "$ref"),
        ({"properties": {"a": {"$id": "x", "$ref": "#"}}}, "properties.a.$ref"),
    ],
)
def test_what_is_no_schema_is_refused_at_its_place(schema: Any, place: str) -> None:
    assert refused(schema) == f"at.{place}"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "1", "null", '{"const": NaN}', '{"const": 1e999}', "[" * 5000]
)
def test_what_is_no_json_object_is_refused(text: str) -> None:
    assert refused(text) == "at"


def test_a_reference_is_found_by_its_decoded_name() -> None:
    schema = {
        "$ref": "#/$defs/A%3CB%3E",
        "$defs": {"A<B>": {"$ref": "#/$defs/t~0x"}, "t~x": {"type": "null"}},
    }
    held = json.loads(held_schema(json.dumps(schema), strict=False, param="at").text)
    assert held["$ref"] == "#/$defs/A<B>"
    assert held["$defs"]["A<B>"]["$ref"] == "#/$defs/t~x"


def test_what_asks_for_nothing_is_no_keyword_that_cannot_be_held() -> None:
    assert check_schema(json.dumps(of("uniqueItems", False)), strict=True, param="at") == ()
    assert (
        check_schema('{"unevaluatedProperties": true, "x-note": {"not": {}}}', strict=False, param="at") == ()
    )


def test_no_more_is_named_as_ignored_than_a_header_can_have() -> None:
    schema = {"properties": {f"p{i}": {"uniqueItems": True} for i in range(IGNORED_MAX + 1)}}
    assert len(held_schema(json.dumps(schema), strict=False, param="at").ignored) == IGNORED_MAX


def test_what_stands_in_data_is_no_schema() -> None:
    schema = {"const": {"not": {}}, "enum": [{"uniqueItems": True}], "default": {"$ref": "#/x"}}
    assert check_schema(json.dumps(schema), strict=False, param="at") == ()
    assert check_schema('{"properties": {"not": {"type": "null"}}}', strict=False, param="at") == ()


def test_one_of_is_told_apart() -> None:
    held = held_schema('{"oneOf": [{"type": "null"}, {"const": 1}]}', strict=False, param="at")
    assert held.one_of == ("oneOf",)
    assert held.ignored == ()


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def _doubling(levels: int) -> dict[str, Any]:
    """Each definition is copied twice into the one before it."""
    defs = {
        f"d{i}": {"properties": {key: {"$ref": f"#/$defs/d{i + 1}", "type": "object"} for key in "lr"}}
        for i in range(levels)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{levels}": {"type": "object"}}}


def _chain(length: int) -> dict[str, Any]:
    defs = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{length}": {"type": "null"}}}


def _merged(length: int) -> dict[str, Any]:
    """A chain of references, each of them one part of its schema: they are looked at within each other."""
    defs = {f"d{i}": {"type": "object", "$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{length}": {}}}


def _products(factors: int) -> dict[str, Any]:
    return {
        "allOf": [
            {"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(8)]} for i in range(factors)
        ]
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"description": "x" * SCHEMA_LEN_MAX},
        _nested(LEVELS_MAX),
        _doubling(12),
        _chain(REF_LEVELS_MAX // 2),
        _merged(REF_LEVELS_MAX - 2),
        _products(4),
        {"properties": {f"p{i}": {} for i in range(OPTIONAL_MAX + 1)}},
        {"enum": [f"value {i}" for i in range(100_000)]},
        {"anyOf": [{"properties": {f"k{i}": {"type": "string"}}} for i in range(SIZE_MAX)]},
        {"allOf": [{"type": "integer", "multipleOf": number} for number in (97, 101, 103)]},
    ],
    ids=[
        *("characters", "levels", "copies", "references", "merged references", "products", "optional"),
        *("values", "alternatives", "multiples"),
    ],
)
def test_a_schema_that_would_cost_too_much_is_refused(schema: dict[str, Any]) -> None:
    refused(schema)


OF_ITSELF = {"properties": {key: {"$ref": "#", "type": "object"} for key in "lr"}}


@pytest.mark.parametrize("schema", [_nested(80), _doubling(6), _chain(200), _products(2), OF_ITSELF])
def test_a_schema_of_the_same_kinds_that_costs_little_is_taken(schema: dict[str, Any]) -> None:
    check_schema(json.dumps(schema), strict=False, param="at")


@pytest.mark.parametrize(
    ("pattern", "length"),
    [
        ("abc", 3),
        ("(ab){3}", 6),
        ("((x{10}){10}){10}", 1000),
        ("x{10}{10}{10}", 1000),
        ("a{2,}b{,5}", 7),
        (r"[a-z{9}]{4}\{9\}", 7),
        (r"\p{L}{3}", 3),
        ("[]{9}]", 10),
        ("(a|bc)*", 3),
    ],
)
def test_counted_repeats_are_written_out(pattern: str, length: int) -> None:
    assert unrolled_len(pattern) == length


def test_a_pattern_that_is_not_ended_is_refused() -> None:
    for pattern in ("a\\", "\\\\\\", "x" * 20_000):
        with pytest.raises(InvalidRequest):
            check_pattern(pattern, "at")
    check_pattern("a\\\\", "at")
