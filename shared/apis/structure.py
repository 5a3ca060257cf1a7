"""The structure that an answer is to have, as OpenAI asks for it (`response_format`) and as vLLM does
(`structured_outputs`).

Both are read in their shapes alone, as engines of other makes have kinds of their own. What our engines take
of them is checked where they serve it: one structure, of a size that can be looked at. Whether it can be held
is seen where its grammar is made, by the engine (`shared.apis.schemas`, `shared.apis.patterns`).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Final

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from shared.apis.nothing import unsupported
from shared.apis.patterns import PATTERN_LEN_MAX
from shared.apis.schemas import SCHEMA_LEN_MAX
from shared.apis.tools import NAME
from shared.wire.errors import InvalidRequest
from shared.wire.shapes import Unshown

GRAMMAR_LEN_MAX: Final = 64 * 1024
CHOICE_LEN_MAX: Final = 1024
"""Characters of one text to choose."""
CHOICES_MAX: Final = 1024

TEXT_FORMAT: Final = "text.format"
"""The name of a response's field with the format of its text."""
_NULL: Final = b"null"
_NOTHING: Final = (_NULL, b"false")
_object: Final = msgspec.json.Decoder(dict[str, Raw]).decode


class StructureKind(Enum):
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


class Structure(Struct, frozen=True):
    """The one structure of an answer's text."""

    kind: StructureKind
    source: str = ""
    """The schema as JSON, the regular expression, or the grammar in Lark's or GBNF's notation."""
    choices: tuple[str, ...] = ()
    """The texts of which the answer is one, for `CHOICE`."""
    strict: bool = False
    param: str = ""
    """The name of the request's field that holds it."""

    def __repr__(self) -> str:
        return f"<Structure {self.kind.value}>"


# -- OpenAI's -------------------------------------------------------------------------------------


class JsonSchemaFormat(Unshown):
    name: str | None = None
    """1 to 64 of A-Z, a-z, 0-9, _ and -. Required."""
    description: str | None = None
    schema: Raw | UnsetType = UNSET
    """The JSON schema, an object. Required."""
    strict: bool | None = None


class ResponseFormat(Unshown):
    type: str
    """`text`, `json_object` or `json_schema`."""
    json_schema: JsonSchemaFormat | None = None
    """The schema, for `json_schema`."""

    @property
    def structure(self) -> Structure | None:
        """The structure of a format that was checked. None for text."""
        match self.type:
            case "json_object":
                return Structure(StructureKind.JSON_OBJECT, param="response_format")
            case "json_schema" if self.json_schema is not None:
                return Structure(
                    StructureKind.JSON_SCHEMA,
                    _text(self.json_schema.schema),
                    strict=bool(self.json_schema.strict),
                    param="response_format.json_schema.schema",
                )
        return None


def check_format(format_: ResponseFormat, raw: Raw) -> None:
    """Check a format for our engines; `raw` is what it was decoded from. Raises InvalidRequest, and
    UnsupportedParameter for a kind, and for a field, that they do not know."""
    if format_.type not in ("text", "json_object", "json_schema"):
        raise unsupported("response_format.type")
    for name, value in _object(raw).items():  # `schema` beside `json_object` would be dropped
        if name not in ResponseFormat.__struct_fields__ and bytes(value) not in _NOTHING:
            raise unsupported(f"response_format.{name}")
    if format_.type != "json_schema":
        return
    where = "response_format.json_schema"
    if format_.json_schema is None:
        raise InvalidRequest(f"{where} is required.", param=where)
    _check_named(format_.json_schema, where)


def _check_named(schema: JsonSchemaFormat, where: str) -> None:
    """Check a schema that has a name."""
    if schema.name is None or schema.schema is UNSET:
        wanted = f"{where}.name" if schema.name is None else f"{where}.schema"
        raise InvalidRequest(f"{wanted} is required.", param=wanted)
    if NAME.fullmatch(schema.name) is None:
        message = f"{where}.name must be 1 to 64 of A-Z, a-z, 0-9, _ and -."
        raise InvalidRequest(message, param=f"{where}.name")
    check_schema(schema.schema, f"{where}.schema", (b"{",))


class TextFormat(JsonSchemaFormat, kw_only=True, omit_defaults=True):
    """The format of a response's text, with the schema beside its type."""

    type: str
    """`text`, `json_object` or `json_schema`."""

    @property
    def structure(self) -> Structure | None:
        """The structure of a format that was checked. None for text."""
        match self.type:
            case "json_object":
                return Structure(StructureKind.JSON_OBJECT, param=TEXT_FORMAT)
            case "json_schema":
                source, strict = _text(self.schema), bool(self.strict)
                return Structure(
                    StructureKind.JSON_SCHEMA, source, strict=strict, param=f"{TEXT_FORMAT}.schema"
                )
        return None


def check_text_format(format_: TextFormat) -> None:
    """Check a format for our engines. Raises InvalidRequest, and UnsupportedParameter for a kind that they do
    not know."""
    match format_.type:
        case "text" | "json_object":
            return
        case "json_schema":
            _check_named(format_, TEXT_FORMAT)
        case _:
            raise unsupported(f"{TEXT_FORMAT}.type")


# -- vLLM's ---------------------------------------------------------------------------------------


class StructuredOutputs(Unshown):
    """Exactly one of its fields is given."""

    json: Raw | UnsetType = UNSET
    """A JSON schema, as an object or as its text."""
    regex: str | None = None
    """A regular expression that the whole answer matches."""
    choice: list[str] | None = None
    """Texts of which the answer is one."""
    grammar: str | None = None
    """A grammar in Lark's or GBNF's notation."""

    @property
    def structure(self) -> Structure | None:
        """The structure of outputs that were checked. None where they ask for none."""
        where = "structured_outputs"
        if self.regex is not None:
            return Structure(StructureKind.REGEX, self.regex, param=f"{where}.regex")
        if self.choice is not None:
            return Structure(StructureKind.CHOICE, choices=tuple(self.choice), param=f"{where}.choice")
        if self.grammar is not None:
            return Structure(StructureKind.GRAMMAR, self.grammar, param=f"{where}.grammar")
        if self.json is UNSET or bytes(self.json) == _NULL:
            return None
        return Structure(StructureKind.JSON_SCHEMA, _text(self.json), param=f"{where}.json")


def check_outputs(outputs: StructuredOutputs, raw: Raw) -> None:
    """Check structured outputs for our engines; `raw` is what they were decoded from. Raises InvalidRequest,
    and UnsupportedParameter for a field that they do not know."""
    where, given = "structured_outputs", []
    for name, value in _object(raw).items():
        if bytes(value) in _NOTHING:
            continue
        if name not in StructuredOutputs.__struct_fields__:
            raise unsupported(f"{where}.{name}")
        given.append(name)
    if len(given) > 1:
        raise InvalidRequest(f"{where} must have one field, not {len(given)}.", param=f"{where}.{given[1]}")
    if "json" in given:
        check_schema(outputs.json, f"{where}.json", (b"{", b'"'))
    for problem, name in _problems(outputs):
        raise InvalidRequest(f"{where}.{name} {problem}.", param=f"{where}.{name}")


def _problems(outputs: StructuredOutputs) -> Iterator[tuple[str, str]]:
    """The fault in them: in words, and the field's name."""
    texts = ("regex", outputs.regex, PATTERN_LEN_MAX), ("grammar", outputs.grammar, GRAMMAR_LEN_MAX)
    for name, text, most in texts:
        if text is not None and not 1 <= len(text) <= most:
            yield f"must have 1 to {most} characters", name
    choices = outputs.choice
    if choices is not None and not 1 <= len(choices) <= CHOICES_MAX:
        yield f"must have 1 to {CHOICES_MAX} items", "choice"
    for index, text in enumerate(choices or ()):
        if not 1 <= len(text) <= CHOICE_LEN_MAX:
            yield f"must have 1 to {CHOICE_LEN_MAX} characters", f"choice[{index}]"


def _text(raw: Raw | UnsetType) -> str:
    """A schema as JSON: what was sent, or what a string that was sent holds."""
    assert raw is not UNSET
    data = bytes(raw)
    return msgspec.json.decode(data, type=str) if data.startswith(b'"') else data.decode()


def check_schema(raw: Raw | UnsetType, param: str, begins: tuple[bytes, ...]) -> None:
    """Check the form of a schema. `begins` are the bytes that it may begin with."""
    schema = b"" if raw is UNSET else bytes(raw)
    if not schema.startswith(begins):
        raise InvalidRequest(f"{param} must be an object.", param=param)
    if len(schema) > 2 * SCHEMA_LEN_MAX:  # escapes make what is held shorter
        raise InvalidRequest(f"{param} is longer than {SCHEMA_LEN_MAX:,} characters.", param=param)
