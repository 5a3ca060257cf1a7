"""JSON schemas that answers and arguments of tools follow: what can be held of them, checked at the door.

A keyword that the matcher cannot hold is refused by its name and place, or, where the schema is not strict,
left out and named, so that nothing is dropped silently. What neither JSON Schema nor the matcher gives a
meaning (titles, keywords of others) is left alone.

Rules:

1. All that is done here is bounded by the schema's length, and nothing follows a reference twice.
2. What a schema becomes when its alternatives are multiplied out (`_Cost`), how deep it goes through its
   references, and what its numbers and patterns ask for are bounded here: the matcher has no limit that
   comes before the work, and its stack ends the process where it ends.
3. References are local. Where a schema names resources of its own (`$id`), those below are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final, NamedTuple, NoReturn
from urllib.parse import unquote

from shared.apis.patterns import check_pattern
from shared.apis.validation import PLAIN_NAME
from shared.wire.errors import InvalidRequest

SCHEMA_LEN_MAX: Final = 120_000
"""Characters of a schema, as many as OpenAI takes."""
LEVELS_MAX: Final = 96
"""Levels of a schema's JSON. The matcher reads 127, with what stands around it."""
REF_LEVELS_MAX: Final = 800
"""Schemas within schemas, the deepest of the root and of each that is referred to added up: no way through
the references is longer. The matcher's stack ends at some 3,000."""
SIZE_MAX: Final = 2_500
"""Schemas that are left when alternatives are multiplied out, at some 40 us of compiling each."""
OPTIONAL_MAX: Final = 400
"""Properties of one object that may be absent: with some 500 a matcher fails at the first key."""
MULTIPLE_MAX: Final = 5_000
"""The least common multiple of all `multipleOf`, as integers: the states that the matcher builds."""
IGNORED_MAX: Final = 32
"""The most keywords that are named as ignored."""

Schema = dict[str, Any]

STRICT_LEVELS_MAX: Final = 10
STRICT_VALUES_MAX: Final = 1_000

FORMATS: Final = frozenset(
    "date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split()  # noqa: SIM905
)
_NO_LEAP_SECOND: Final = {"pattern": "^[^:]*:[^:]*:[0-5]"}
FORMATS_AND: Final[dict[str, Schema]] = {
    "email": {"maxLength": 64},
    "hostname": {"maxLength": 253},
    "date-time": _NO_LEAP_SECOND,
    "time": _NO_LEAP_SECOND,
}
"""Keywords that hold what the matcher lets through of some formats: names of any length, and leap seconds at
any time of day."""
NOT_HELD: Final = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
        *("propertyNames", "dependencies", "dependentRequired", "dependentSchemas"),
        *("unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    )
)
"""The keywords of JSON Schema, of any draft, that the matcher cannot hold."""
ASKS_NOTHING: Final = {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True}
"""The values with which keywords of NOT_HELD ask for nothing."""
NOT_STRICT: Final = frozenset(("allOf",))
"""The keywords that can be held, and that OpenAI does not take where a schema is strict."""
TYPES: Final = frozenset(("null", "boolean", "number", "integer", "string", "array", "object"))

_ONE: Final = frozenset(("additionalProperties", "items", "additionalItems"))
_MANY: Final = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_NAMED: Final = frozenset(("properties", "patternProperties"))
_COUNTS: Final = frozenset(
    ("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength")
)
_BOUNDS: Final = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_ASSERTING: Final = _ONE | _MANY | _NAMED | _COUNTS | _BOUNDS | {"type", "enum", "const", "required"}
_OWN: Final = (_ASSERTING | {"pattern", "format"}) - {"allOf", "anyOf", "oneOf"}
"""The keywords that are one part of a schema together; each of `allOf`, `anyOf`, `oneOf` and `$ref` is
another, and all parts are multiplied."""


@dataclass(frozen=True, slots=True)
class HeldSchema:
    """A schema as the matcher gets it."""

    text: str
    """Its JSON, without what is ignored."""
    ignored: tuple[str, ...] = ()
    """The places of the keywords that were left out, none if it is strict."""
    one_of: tuple[str, ...] = ()
    """The places of `oneOf`, which the matcher holds where it can tell that no two of its schemas meet."""
    size: int = 1
    """The schemas that are left when its alternatives are multiplied out."""


def check_schema(schema_json: bytes | str, *, strict: bool, param: str) -> tuple[str, ...]:
    """Check a schema, and return the places of what is ignored of it, none where `strict`. Raises
    InvalidRequest, whose `param` is the place below `param` of what cannot be held."""
    return held_schema(schema_json, strict=strict, param=param).ignored


def held_schema(schema_json: bytes | str, *, strict: bool, param: str) -> HeldSchema:
    """The schema without what cannot be held of it. Raises InvalidRequest."""
    if len(schema_json) > SCHEMA_LEN_MAX:
        raise InvalidRequest(f"{param} is longer than {SCHEMA_LEN_MAX:,} characters.", param=param)
    try:
        schema = json.loads(schema_json, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{param} is not a JSON schema.", param=param) from None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param} must be a JSON schema that is an object.", param=param)
    _check_levels(schema, param)
    walk = _Walk(schema, strict, param)
    size = walk.go()
    ignored, one_of = (tuple(dict.fromkeys(places))[:IGNORED_MAX] for places in (walk.ignored, walk.one_of))
    return HeldSchema(json.dumps(schema, allow_nan=False), ignored, one_of, size)


def _no_number(_name: str) -> NoReturn:
    raise ValueError


def _check_levels(schema: Schema, param: str) -> None:
    level: list[Any] = [schema]
    for _ in range(LEVELS_MAX):
        below: list[Any] = []
        for value in level:
            if isinstance(value, float) and not math.isfinite(value):
                raise InvalidRequest(f"{param} has a number out of range.", param=param)
            below += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if not below:
            return
        level = below
    raise InvalidRequest(f"{param} has more than {LEVELS_MAX} levels.", param=param)


class _Node(NamedTuple):
    schema: Any
    place: tuple[str, ...]
    target: int
    """The index, among the walk's targets, of what it is within."""
    levels: int
    """The schemas around it, up to its target."""
    depth: int
    """The objects and arrays around it that values of it stand in, likewise."""
    named: bool
    """True below an `$id`."""


@dataclass(slots=True)
class _Walk:
    """One walk over a schema and what it refers to. It takes out of `root` what cannot be held."""

    root: Schema
    strict: bool
    param: str
    ignored: list[str] = field(default_factory=list)
    one_of: list[str] = field(default_factory=list)
    targets: list[Any] = field(default_factory=list)
    """The root, and what references name."""
    refs: dict[int, Any] = field(default_factory=dict)
    """The targets of a schema's `$ref`, by the schema's id."""
    seen: set[int] = field(default_factory=set)
    left: list[_Node] = field(default_factory=list)
    deepest: list[int] = field(default_factory=list)
    """The levels of each target."""
    multiple: int = 1
    values: int = 0

    def go(self) -> int:
        """Returns the schema's size."""
        if self.strict:
            self._check_strict_root()
        self._begin(self.root, ())
        while self.left:
            node = self.left.pop()
            self.deepest[node.target] = max(self.deepest[node.target], node.levels)
            self._visit(node)
        if sum(self.deepest) > REF_LEVELS_MAX:
            self._refuse((), f"goes through references to more than {REF_LEVELS_MAX} levels")
        size = _Cost(self.refs, self._too_large).of_all(self.targets)
        if size > SIZE_MAX:
            self._too_large()
        return size

    def _too_large(self) -> NoReturn:
        message = f"has more than {SIZE_MAX:,} schemas when its alternatives are multiplied out"
        self._refuse((), message)

    def _begin(self, schema: Any, place: tuple[str, ...]) -> None:
        self.left.append(_Node(schema, place, len(self.targets), levels=1, depth=0, named=False))
        self.targets.append(schema)
        self.deepest.append(1)

    # -- one schema -----------------------------------------------------------------------------------

    def _visit(self, node: _Node) -> None:
        schema = node.schema
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            self._refuse(node.place, "must be a JSON schema")
        if id(schema) in self.seen:
            return
        self.seen.add(id(schema))
        for keyword in tuple(schema):
            if keyword in NOT_HELD:
                self._leave_out(node, keyword)
            elif keyword in _CHECKS:
                _CHECKS[keyword](self, node, keyword, schema[keyword])
        if self.strict:
            self._check_strict(node)
        names = schema.get("properties", {}).keys() - set(schema.get("required", ()))
        if len(names) > OPTIONAL_MAX:
            self._refuse((*node.place, "properties"), f"has more than {OPTIONAL_MAX} that are not required")
        self._descend(node)
        if (more := FORMATS_AND.get(schema.get("format", ""))) is not None:
            schema["allOf"] = [*schema.get("allOf", ()), more]

    def _leave_out(self, node: _Node, keyword: str) -> None:
        value = node.schema[keyword]
        if not (keyword in ASKS_NOTHING and value is ASKS_NOTHING[keyword]):
            self._cannot((*node.place, keyword))
        del node.schema[keyword]

    def _cannot(self, place: tuple[str, ...], what: str = "is not supported") -> None:
        """Refuse what cannot be held where the schema is strict; else name it as ignored."""
        if self.strict:
            self._refuse(place, what)
        self.ignored.append(_shown(place))

    def _refuse(self, place: tuple[str, ...], what: str) -> NoReturn:
        param = self._param(place)
        raise InvalidRequest(f"{param} {what}.", param=param)

    def _param(self, place: tuple[str, ...]) -> str:
        names = (name if PLAIN_NAME.fullmatch(name.removeprefix("$")) else "*" for name in place)
        return ".".join((self.param, *names))

    def _descend(self, node: _Node) -> None:
        named = node.named or ("$id" in node.schema and node.schema is not self.root)
        for place, child, is_part in _children(node.schema):
            depth = node.depth + (not is_part)
            self.left.append(_Node(child, (*node.place, *place), node.target, node.levels + 1, depth, named))

    # -- keywords -------------------------------------------------------------------------------------

    def _count(self, node: _Node, keyword: str, value: object) -> None:
        if isinstance(value, float) and value.is_integer():
            value = node.schema[keyword] = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
            self._refuse((*node.place, keyword), "must be an integer of at least 0")

    def _bound(self, node: _Node, keyword: str, value: object) -> None:
        if isinstance(value, bool) and keyword.startswith("exclusive"):
            return  # as draft 4 has it
        if not isinstance(value, int | float) or isinstance(value, bool):
            self._refuse((*node.place, keyword), "must be a number")
        if keyword == "multipleOf":
            self._multiple(node, value)

    def _multiple(self, node: _Node, value: float) -> None:
        if value <= 0:
            self._refuse((*node.place, "multipleOf"), "must be above 0")
        digits = Decimal(repr(value)).normalize().as_tuple().digits
        self.multiple = math.lcm(self.multiple, int("".join(map(str, digits))))
        if self.multiple > MULTIPLE_MAX:
            self._refuse((*node.place, "multipleOf"), f"has, with others, multiples above {MULTIPLE_MAX:,}")

    def _pattern(self, node: _Node, keyword: str, value: object) -> None:
        if not isinstance(value, str):
            self._refuse((*node.place, keyword), "must be a string")
        check_pattern(value, self._param((*node.place, keyword)))

    def _format(self, node: _Node, keyword: str, value: object) -> None:
        if not isinstance(value, str):
            self._refuse((*node.place, keyword), "must be a string")
        if value not in FORMATS:
            self._cannot((*node.place, keyword), f"is none of {', '.join(sorted(FORMATS))}")
            del node.schema[keyword]

    def _type(self, node: _Node, keyword: str, value: object) -> None:
        names = value if isinstance(value, list) else [value]
        if not names or not all(isinstance(name, str) and name in TYPES for name in names):
            self._refuse((*node.place, keyword), f"must be of {', '.join(sorted(TYPES))}")

    def _enum(self, node: _Node, keyword: str, value: object) -> None:
        if not isinstance(value, list) or not value:
            self._refuse((*node.place, keyword), "must be a list of values")
        self.values += len(value)

    def _required(self, node: _Node, keyword: str, value: object) -> None:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self._refuse((*node.place, keyword), "must be a list of names")

    def _one(self, node: _Node, keyword: str, value: object) -> None:
        if not isinstance(value, dict | bool | (list if keyword == "items" else dict)):
            self._refuse((*node.place, keyword), "must be a JSON schema")

    def _many(self, node: _Node, keyword: str, value: object) -> None:
        if not isinstance(value, list) or not (value or keyword == "prefixItems"):
            self._refuse((*node.place, keyword), "must be a list of JSON schemas")
        if keyword == "oneOf" and len(value) > 1:
            self.one_of.append(_shown((*node.place, keyword)))

    def _named(self, node: _Node, keyword: str, value: object) -> None:
        if not isinstance(value, dict):
            self._refuse((*node.place, keyword), "must be an object of JSON schemas")
        if keyword == "patternProperties":
            for pattern in value:
                check_pattern(pattern, self._param((*node.place, keyword)))

    def _ref(self, node: _Node, keyword: str, value: object) -> None:
        place = (*node.place, keyword)
        if not isinstance(value, str) or not (value in ("", "#") or value.startswith("#/")):
            self._refuse(place, "must be a reference within the schema, as #/$defs/name")
        if node.named or ("$id" in node.schema and node.schema is not self.root):
            self._refuse(place, "stands below an $id, which changes what it refers to")
        names = [unquote(name).replace("~1", "/").replace("~0", "~") for name in value[2:].split("/")]
        target: Any = self.root
        for name in names if len(value) > 1 else ():
            if isinstance(target, list) and name.isdecimal() and int(name[:9]) < len(target):
                target = target[int(name[:9])]
            elif isinstance(target, dict) and name in target and "/" not in name:
                target = target[name]
            else:
                self._refuse(place, "refers to what is not there")
        if not isinstance(target, dict | bool):
            self._refuse(place, "refers to what is no JSON schema")
        node.schema[keyword] = "#/" + "/".join(names) if len(value) > 1 else "#"
        self.refs[id(node.schema)] = target
        if not any(target is known for known in self.targets):
            self._begin(target, place)

    # -- strict ---------------------------------------------------------------------------------------

    def _check_strict_root(self) -> None:
        if self.root.get("type") != "object":
            self._refuse(("type",), "must be object where the schema is strict")
        if "anyOf" in self.root:
            self._refuse(("anyOf",), "cannot be at the root of a strict schema")

    def _check_strict(self, node: _Node) -> None:
        schema, place = node.schema, node.place
        for keyword in NOT_STRICT & schema.keys():
            self._refuse((*place, keyword), "is not supported where the schema is strict")
        kind = schema.get("type")
        if kind == "object" or (isinstance(kind, list) and "object" in kind) or "properties" in schema:
            if schema.get("additionalProperties") is not False:
                self._refuse((*place, "additionalProperties"), "must be false where the schema is strict")
            missing = schema.get("properties", {}).keys() - set(schema.get("required", ()))
            if missing:
                self._refuse((*place, "required"), "must name every property where the schema is strict")
        if node.depth > STRICT_LEVELS_MAX:
            self._refuse(place, f"is deeper than {STRICT_LEVELS_MAX} levels, where the schema is strict")
        if self.values > STRICT_VALUES_MAX:
            self._refuse((), f"has more than {STRICT_VALUES_MAX:,} values in enum")


_CHECKS: Final = {
    **dict.fromkeys(_COUNTS, _Walk._count),
    **dict.fromkeys(_BOUNDS, _Walk._bound),
    **dict.fromkeys(_MANY, _Walk._many),
    **dict.fromkeys(_ONE, _Walk._one),
    **dict.fromkeys(_NAMED, _Walk._named),
    "pattern": _Walk._pattern,
    "format": _Walk._format,
    "type": _Walk._type,
    "enum": _Walk._enum,
    "required": _Walk._required,
    "$ref": _Walk._ref,
}


def _shown(place: tuple[str, ...]) -> str:
    """A place as a header can have it: its last part where it is too long."""
    whole = ".".join(place)
    return whole if PLAIN_NAME.fullmatch(whole) else place[-1]


def _children(schema: Schema) -> Iterator[tuple[tuple[str, ...], Any, bool]]:
    """The schemas within one, with their places, and whether they are about the same value."""
    for keyword, value in schema.items():
        if keyword in _NAMED:
            for name, child in value.items():
                yield (keyword, name), child, False
        elif keyword in _MANY and isinstance(value, list):
            for index, child in enumerate(value):
                yield (keyword, str(index)), child, keyword not in ("prefixItems", "items")
        elif keyword in _ONE:
            yield (keyword,), value, False


class _Cost:
    """The size of schemas when their alternatives are multiplied out, as the matcher does it.

    The parts of a schema (its own keywords, each of `allOf`, all of `anyOf`, all of `oneOf`, what it refers
    to) are all merged with each other: two parts of a and b alternatives become a * b. What is merged is
    copied, also what is referred to; a schema that is a reference and nothing else is not.
    """

    DEPTH_MAX: Final = 200
    VALUES_OF_ONE: Final = 8
    """Values of an enum that take as long as one schema."""

    def __init__(self, refs: dict[int, Any], too_large: Any) -> None:
        self._refs = refs
        self._too_large = too_large
        self._known: dict[tuple[int, bool], tuple[int, int]] = {}

    def of_all(self, targets: list[Any]) -> int:
        return sum(self._of(target, merged=False, depth=0)[1] for target in targets)

    def _of(self, schema: Any, *, merged: bool, depth: int) -> tuple[int, int]:
        """Alternatives, and schemas in all of them together. `merged`: with another part of the schema around
        it."""
        if isinstance(schema, bool):
            return 1, 1
        if depth > self.DEPTH_MAX:
            self._too_large()
        key = (id(schema), merged)
        if key in self._known:
            return self._known[key]
        self._known[key] = (1, 1)  # what a cycle comes back to is not copied again
        parts = [keyword for keyword in ("anyOf", "oneOf", "$ref") if keyword in schema]
        has_own = not _OWN.isdisjoint(schema)
        merged = merged or len(parts) + len(schema.get("allOf", ())) + has_own > 1
        alternatives, size = (1, self._own(schema, depth)) if has_own else (1, 1)
        for more, added in self._parts(schema, merged, depth):
            alternatives, size = alternatives * more, size * more + added * alternatives
            if size > SIZE_MAX:
                self._too_large()
        self._known[key] = alternatives, size
        return alternatives, size

    def _own(self, schema: Schema, depth: int) -> int:
        size = 1 + len(schema.get("enum", ())) // self.VALUES_OF_ONE
        for _, child, is_part in _children(schema):
            if not is_part:
                size += self._of(child, merged=False, depth=depth + 1)[1]
        return size

    def _parts(self, schema: Schema, merged: bool, depth: int) -> Iterator[tuple[int, int]]:
        for child in schema.get("allOf", ()):
            yield self._of(child, merged=merged, depth=depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                options = [self._of(child, merged=merged, depth=depth + 1) for child in schema[keyword]]
                yield sum(more for more, _ in options), sum(size for _, size in options)
        if id(schema) in self._refs and "$ref" in schema:
            if merged:
                yield self._of(self._refs[id(schema)], merged=True, depth=depth + 1)
            else:
                yield 1, 1
