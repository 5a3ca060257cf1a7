"""The arguments of a call, in each family's notation, by the schema of its function.

JSON is held by the matcher itself. In the other notations a value is written by rules of our own, which know
less of JSON Schema (`_Values`): what they do not know is refused by name where the schema is strict, else
left out and named.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from engine.api.formats import lark
from engine.api.formats.format import AnswerFormat, ArgumentsKind, CallFormat, TaggedArgument
from engine.api.formats.lark import Rules
from shared.apis.schemas import TYPES
from shared.wire.errors import InvalidRequest

_BARE_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOTHING: Final = '""'
_INTEGER: Final = "/-?(0|[1-9][0-9]{0,30})/"
_NUMBER: Final = r"/-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,2})?/"
_KEPT: Final = frozenset(
    (
        *("type", "enum", "const", "properties", "required", "additionalProperties", "items"),
        *("anyOf", "oneOf", "$ref"),
    )
)
"""The keywords that the rules for values of notations other than JSON know."""
_MEANINGLESS: Final = frozenset(
    (
        *(
            "title",
            "description",
            "default",
            "examples",
            "$defs",
            "definitions",
            "$schema",
            "$id",
            "$comment",
        ),
        *("$anchor", "id", "readOnly", "writeOnly", "deprecated", "contentMediaType", "contentEncoding"),
    )
)
_NO_JSON: Final = r"/([^{\[ \t\r\n0-9-](?s:.*))?/"
"""A text that is read as none but a string, where it may also be a number, a list or an object."""
_TEXTUAL: Final = frozenset(("minLength", "maxLength", "pattern"))

Schema = dict[str, Any]


@dataclass(slots=True)
class Arguments:
    """The arguments of one function."""

    rules: Rules
    format: AnswerFormat
    calls: CallFormat
    schema: Schema | None
    """The schema, of which the matcher can hold all. None for any object."""
    strict: bool
    coerced: bool
    """True if `oneOf` is held as `anyOf`."""
    param: str
    ignored: list[str] = field(default_factory=list)
    """The keywords that this notation leaves out."""
    _known: dict[str, str] = field(default_factory=dict)
    """The rules of what references name."""

    def expression(self) -> str:
        match self.calls.arguments:
            case ArgumentsKind.JSON:
                schema = lark.ANY_OBJECT if self.schema is None else json.dumps(_object(self.schema))
                return lark.schema(schema, coerced=self.coerced)
            case ArgumentsKind.TAGGED:
                return self._tagged()
            case ArgumentsKind.PYTHON:
                return self._members(self._object(), "=", is_argument=True)
            case ArgumentsKind.RELAXED:
                return lark.row(["{", (self._members(self._object(), ":"),), "}"])

    def _object(self) -> Schema:
        return {} if self.schema is None else _object(self.schema)

    # -- tagged ---------------------------------------------------------------------------------------

    def _tagged(self) -> str:
        tag = self.calls.argument
        assert tag is not None
        schema = self._object()
        required = set(schema.get("required", ()))
        parts = []
        for key, value in schema.get("properties", {}).items():
            opening = self.format.pieces(tag.begin + key + tag.middle)
            part = lark.row([*opening, (self._tagged_value(value, tag),)])
            parts.append(part if key in required else f"({part})?")
        if schema.get("additionalProperties") is not False:
            key_rule = self.rules.add("KEY", r"/[A-Za-z0-9_.-]{1,64}/")
            begin, middle = self.format.pieces(tag.begin), self.format.pieces(tag.middle)
            value_rule = self._raw(tag, [])
            parts.append(f"({lark.row([*begin, (key_rule,), *middle, (value_rule,)])})*")
        return " ".join(parts) or _NOTHING

    def _tagged_value(self, schema: Any, tag: TaggedArgument) -> str:
        """A value and its end: a text as it is if it is a string, else JSON."""
        end = self.format.pieces(tag.end)
        schema = self._resolved(schema)
        if not isinstance(schema, dict) or not schema.keys() - _MEANINGLESS:
            return self._raw(tag, [])
        texts = _texts(schema)
        if texts is not None:
            return lark.row([(lark.any_of(map(lark.literal, texts)),), *end])
        others = _beside_string(schema)
        if others is not None:
            shown = [lark.row([(self._tagged_json(other),), *end]) for other in others]
            return lark.any_of([*shown, self._raw(tag, [_NO_JSON])])
        if schema.get("type") != "string":
            return lark.row([(self._tagged_json(schema),), *end])
        held = []
        for keyword in schema.keys() - _MEANINGLESS - {"type"}:
            if keyword not in _TEXTUAL:
                self._leave_out(keyword)
        if "pattern" in schema:
            held.append(lark.regex(f"(?s:.*)(?:{schema['pattern']})(?s:.*)"))
        if "minLength" in schema or "maxLength" in schema:
            most = schema.get("maxLength", "")
            held.append(lark.regex(f"(?s:.{{{schema.get('minLength', 0)},{most}}})"))
        return self._raw(tag, held)

    def _tagged_json(self, schema: Schema) -> str:
        definitions = {} if self.schema is None else _definitions(self.schema)
        return lark.schema(json.dumps({**schema, **definitions}), coerced=self.coerced)

    def _raw(self, tag: TaggedArgument, held: list[str]) -> str:
        return lark.text_before(self.rules, self.format.pieces(tag.end), held)

    # -- values of the other notations ----------------------------------------------------------------

    def _members(self, schema: Schema, colon: str, *, is_argument: bool = False) -> str:
        """The members of an object, in the order of its properties, with commas between those there are."""
        required = set(schema.get("required", ()))
        properties = schema.get("properties", {})
        tail = ""  # from one member to the end, with the comma before it
        head = ""  # the same, as the first member
        if schema.get("additionalProperties") is not False:
            other = schema.get("additionalProperties", True)
            member = lark.row([(self._any_key(is_argument),), colon, (self._value(other),)])
            tail = f"({lark.literal(self._comma)} {member})*"
            head = f"({member} {tail})?"
        for key in reversed(properties):
            member = lark.row([*self._key(key, is_argument), colon, (self._value(properties[key]),)])
            rest = self.rules.fresh("rest", tail or _NOTHING)
            comma = lark.literal(self._comma)
            if key in required:
                head, tail = f"{member} {rest}", f"{comma} {member} {rest}"
            else:
                head, tail = f"({member} {rest} | {head or _NOTHING})", f"({comma} {member})? {rest}"
        return head or _NOTHING

    @property
    def _comma(self) -> str:
        return ", " if self.calls.arguments is ArgumentsKind.PYTHON else ","

    def _value(self, schema: Any) -> str:
        """The name of a rule for one value."""
        schema = self._followed(schema)
        if isinstance(schema, str):
            return schema
        if schema is True or not schema.keys() - _MEANINGLESS:
            return self._any_value()
        for keyword in sorted(schema.keys() - _KEPT - _MEANINGLESS):
            self._leave_out(keyword)
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return self.rules.fresh("value", lark.any_of(lark.row(self._spelled(value)) for value in values))
        union = schema.get("anyOf", schema.get("oneOf"))
        if union is not None:
            return self.rules.fresh("value", lark.any_of(self._value(one) for one in union))
        stated = schema.get("type", "object" if "properties" in schema else sorted(TYPES))
        types = stated if isinstance(stated, list) else [stated]
        return self.rules.fresh("value", lark.any_of(self._of_type(kind, schema) for kind in types))

    def _followed(self, schema: Any) -> Any:
        """The schema, or the name of the rule for what it refers to."""
        if schema is False:
            self._refuse("false")
        if not (isinstance(schema, dict) and "$ref" in schema):
            return schema
        if schema.keys() - _MEANINGLESS - {"$ref"}:
            self._leave_out("$ref")
            return True
        name = schema["$ref"]
        if name not in self._known:
            rule = self._known[name] = self.rules.fresh("ref", _NOTHING)
            self.rules.add(rule, self._value(_target(self.schema or {}, name)))
        return self._known[name]

    def _of_type(self, kind: str, schema: Schema) -> str:
        python = self.calls.arguments is ArgumentsKind.PYTHON
        match kind:
            case "string":
                return self._string()
            case "integer":
                return self.rules.add("INTEGER", _INTEGER)
            case "number":
                return self.rules.add("NUMBER", _NUMBER)
            case "boolean":
                return '("True" | "False")' if python else '("true" | "false")'
            case "null":
                return '"None"' if python else '"null"'
            case "array":
                item = self._value(schema.get("items", True))
                return f'"[" ({item} ({lark.literal(self._comma)} {item})*)? "]"'
        return lark.row(["{", (self._members(schema, ": " if python else ":"),), "}"])

    def _any_value(self) -> str:
        if "any" not in self._known:
            rule = self._known["any"] = self.rules.fresh("any", _NOTHING)
            self.rules.add(rule, lark.any_of(self._of_type(kind, {}) for kind in sorted(TYPES - {"integer"})))
        return self._known["any"]

    def _string(self) -> str:
        if self.calls.arguments is ArgumentsKind.PYTHON:
            return self.rules.add(
                "STRING",
                r"""/'([^'\\\x00-\x1f]|\\['"\\nrt])*'/ | /"([^"\\\x00-\x1f]|\\['"\\nrt])*"/""",
            )
        delimiter = self.format.pieces(self.calls.delimiter)
        return lark.row([*delimiter, (lark.text_before(self.rules, delimiter),)])

    def _spelled(self, value: Any) -> list[lark.Atom]:
        """One value of an enum."""
        python = self.calls.arguments is ArgumentsKind.PYTHON
        if isinstance(value, str):
            if python:
                text = value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
                return [f"'{text}'"]
            delimiter = self.format.pieces(self.calls.delimiter)
            return [*delimiter, value, *delimiter]
        if value is None or isinstance(value, bool):
            return [str(value) if python else json.dumps(value)]
        if isinstance(value, int | float):
            return [json.dumps(value)]
        return self._refuse("enum")

    def _key(self, key: str, is_argument: bool) -> list[lark.Atom]:
        python = self.calls.arguments is ArgumentsKind.PYTHON
        if python and not is_argument:
            return self._spelled(key)
        if (_NAME if python else _BARE_KEY).fullmatch(key) is None:
            self._refuse("properties")
        return [key]

    def _any_key(self, is_argument: bool) -> str:
        if self.calls.arguments is ArgumentsKind.PYTHON and not is_argument:
            return self._string()
        return self.rules.add("KEY", "/[A-Za-z_][A-Za-z0-9_]{0,63}/")

    # -- what is not held -----------------------------------------------------------------------------

    def _resolved(self, schema: Any) -> Any:
        """The schema that a chain of references leads to."""
        for _ in range(8):
            if not (
                isinstance(schema, dict) and "$ref" in schema and not schema.keys() - _MEANINGLESS - {"$ref"}
            ):
                break
            schema = _target(self.schema or {}, schema["$ref"])
        return schema

    def _leave_out(self, keyword: str) -> None:
        if self.strict:
            self._refuse(keyword)
        self.ignored.append(keyword)

    def _refuse(self, keyword: str) -> NoReturn:
        param = f"{self.param}.{keyword}"
        raise InvalidRequest(f"{param} cannot be held in this model's notation of calls.", param=param)


def _object(schema: Schema) -> Schema:
    """The schema of arguments, which are an object whether it says so or not."""
    return {"type": "object", **schema}


def _texts(schema: Schema) -> list[str] | None:
    """The values of an enum of strings. None for another schema."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not values or not all(isinstance(value, str) for value in values):
        return None
    return list(values)


def _beside_string(schema: Schema) -> list[Schema] | None:
    """The other schemas of a union with any string. None for another schema."""
    kinds = schema.get("type")
    if isinstance(kinds, list) and "string" in kinds and len(kinds) > 1:
        rest = {keyword: value for keyword, value in schema.items() if keyword not in ("type", *_TEXTUAL)}
        return [{**rest, "type": kind} for kind in kinds if kind != "string"]
    for union in ("anyOf", "oneOf"):
        options = schema.get(union, ())
        if any(isinstance(option, dict) and option.get("type") == "string" for option in options):
            return [option for option in options if option.get("type") != "string"]
    return None


def _definitions(schema: Schema) -> Schema:
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def _target(root: Schema, ref: str) -> Any:
    target: Any = root
    for name in ref[2:].split("/") if len(ref) > 1 else ():
        target = target[int(name)] if isinstance(target, list) else target[name]
    return target
