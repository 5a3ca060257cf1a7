"""Settings, each declared once, as a field of a frozen dataclass.

    max_num_seqs: Annotated[int, Meta(ge=1, le=4096)] = 64
    \"""Sequences that run at once.\"""

The field's name is the key in TOML. Its type, with `msgspec.Meta`, `Unit` and `Rule`, says what a value must
be; its default is the setting's; the docstring below it is the help. The command line
(`shared.process.arguments`), the variables and the reading of files (`shared.process.setting_values`), the
tables in README, the JSON schema and the TOML example (`shared.cli.settings`) follow from that.

Rules:

1. A field whose type is a dataclass is a section, with settings of its own: `limits.live_max`. A tuple of
   dataclasses is a list of tables: `models[].name`.
2. `limits.live_max` is the variable `PREFIX_LIMITS__LIVE_MAX`. A switch that is on, or left open, by default
   also has a variable with `NO_` before its name, which turns it off.
3. The unit is a `Unit` in the type, else the last word of the name: `stall_deadline_s` is in seconds.
4. A text (an option, a variable) stands for the value that it spells; for a list or a section it is TOML. A
   number of bytes may be written as a size, `512MiB`, in a file too.
"""

from __future__ import annotations

import tomllib
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import datetime
from functools import cache
from typing import Annotated, Any, Final, Literal
from urllib.parse import SplitResult, urlsplit

import msgspec
from msgspec import Meta

from shared.process.docstrings import field_docstrings
from shared.process.sizes import parse_size, show_size

_UNITS: Final = {
    "s": "seconds",
    "ms": "milliseconds",
    "tokens": "tokens",
    **dict.fromkeys(("memory", "bytes"), "bytes"),
}
"""The unit of a setting, by the last word of its name."""
_TRUTHS: Final = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a setting whose name does not end with it; stands in an `Annotated`."""

    name: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition on a value beyond its type and `Meta`; stands in an `Annotated`. None always fulfils it."""

    says: str
    """The condition in words that continue "must", as in "not be empty"."""
    holds: Callable[[Any], bool]


NOT_UNICODE: Final = "must be UTF-8, as this process's locale has it"
"""The problem of a text that is none in a message between processes, in an answer, or in a file."""


def is_unicode(text: str) -> bool:
    """False where the text stands for bytes that are no characters, as those of a path may."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def url_parts(text: str) -> SplitResult | None:
    """The parts of an http or https URL of a server. None where the text is none."""
    try:
        parts = urlsplit(text)
        names_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an IPv6 address that is none
        return None
    return parts if names_server and text.isprintable() and " " not in text else None


Port = Annotated[int, Meta(ge=0, le=65_535, title="port")]
"""A TCP port; 0 takes any that is free."""
Text = Annotated[str, Meta(min_length=1), Rule("not be empty", lambda text: bool(text.strip()))]
Moment = Annotated[
    datetime, Meta(tz=True), Rule("be a moment with its zone, like 2026-11-01T12:00:00Z", bool)
]
LogLevel = Literal["debug", "info", "warning", "error"]
NAME_LEN_MAX: Final = 256
ModelName = Annotated[
    str,
    Meta(min_length=1, max_length=NAME_LEN_MAX),
    Rule(
        f"be a name of 1 to {NAME_LEN_MAX} printable characters",
        lambda text: bool(text.strip()) and text.isprintable(),
    ),
]
"""A name that clients call a model by."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A declared type, taken apart."""

    type: Any
    """The type as it is declared."""
    base: Any
    """The type without its annotations, and without None."""
    meta: Meta
    """The bounds on its values."""
    rule: Rule | None
    unit: str | None

    @staticmethod
    @cache
    def of(type_: Any, unit: str | None = None) -> Kind:
        """The kind of a type, which is one type with or without None. `unit` is that of its name."""
        [(base, notes)] = [option for option in _options(type_) if option[0] is not types.NoneType]
        metas = [note for note in notes if isinstance(note, Meta)]
        assert len(metas) <= 1, f"{type_} has several Meta"
        rule = next((note for note in notes if isinstance(note, Rule)), None)
        units = [note.name for note in notes if isinstance(note, Unit)]
        return Kind(type_, base, metas[0] if metas else Meta(), rule, units[0] if units else unit)

    @property
    def is_optional(self) -> bool:
        """True if None is a value of it."""
        return any(base is types.NoneType for base, _ in _options(self.type))

    @property
    def section(self) -> type | None:
        """The dataclass, when the setting is a section."""
        return self.base if isinstance(self.base, type) and is_dataclass(self.base) else None

    @property
    def item(self) -> Kind | None:
        """The kind of an entry, when the setting is a list."""
        is_list = typing.get_origin(self.base) is tuple
        return Kind.of(typing.get_args(self.base)[0]) if is_list else None

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a Literal; empty for any other type."""
        return typing.get_args(self.base) if typing.get_origin(self.base) is Literal else ()

    @property
    def is_switch(self) -> bool:
        """True if the setting is true or false."""
        return self.base is bool

    @property
    def is_size(self) -> bool:
        """True if the setting is a number of bytes."""
        return self.base is int and self.unit == "bytes"

    def convert(self, value: object) -> Any:
        """The value of this kind that `value`, as TOML has it, stands for. Raises ValueError, which says what
        it must be, and never shows `value`: it may be a secret in the wrong place."""
        if self.is_size and isinstance(value, str):
            size = parse_size(value)
            value = value if size is None else size
        try:
            converted = msgspec.convert(value, self.type)
        except msgspec.ValidationError:
            raise ValueError(f"must {self.requirement}") from None
        if self.rule is not None and converted is not None and not self.rule.holds(converted):
            raise ValueError(f"must {self.requirement}")
        if isinstance(converted, str) and not is_unicode(converted):
            raise ValueError(NOT_UNICODE)
        return converted

    def parse(self, text: str) -> object:
        """The value that `text` spells, for `convert`; the text itself when it spells none of this kind."""
        if self.choices:
            return next((choice for choice in self.choices if str(choice) == text), text)
        if self.is_switch:
            return _TRUTHS.get(text.lower(), text)
        if self.base is str or self.is_size:
            return text
        try:
            if self.base in (int, float):
                return self.base(text)
            return tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):  # a TOMLDecodeError is a ValueError
            return text

    def is_spelt_by(self, value: object) -> bool:
        """True of a text that would be a number, or true or false, without its quotes."""
        return (
            self.base in (bool, int, float)
            and not self.is_size
            and isinstance(value, str)
            and not isinstance(self.parse(value), str)
        )

    @property
    def requirement(self) -> str:
        """The condition on a value, in words that continue "must"."""
        if self.rule is not None:
            return self.rule.says
        if self.choices:
            return f"be one of {self.bounds}"
        if self.is_size:
            return f"be a size {self.bounds}, such as 512MiB, 2GiB or 4GB"
        unit = f" of {self.unit}" if self.base is float and self.unit is not None else ""
        article = "" if self.is_switch else "a "
        return f"be {article}{self.noun}{unit} {self.bounds}".rstrip()

    @property
    def noun(self) -> str:
        """The kind in one or a few words."""
        if self.meta.title is not None:
            return self.meta.title
        if self.section is not None:
            return "table"
        if self.item is not None:
            return "list"
        if self.choices:
            return "choice"
        if self.is_size:
            return "size"
        nouns = {
            bool: "true or false",
            int: "whole number",
            float: "number",
            str: "text",
            datetime: "date and time",
        }
        return nouns[self.base]

    @property
    def bounds(self) -> str:
        """The bounds of a value, or the choices; empty when there are none."""
        if self.choices:
            return ", ".join(map(str, self.choices))
        if self.base is datetime:
            return "such as 2030-01-31T00:00:00Z"
        meta = self.meta
        show: Callable[[Any], str] = show_size if self.is_size else _show
        if meta.pattern is not None:
            return f"that matches {meta.pattern}"
        if meta.min_length is not None or meta.max_length is not None:
            entries = "characters" if self.base is str else "entries"
            return f"of {_range(meta.min_length, meta.max_length, str)} {entries}"
        if meta.gt is not None:
            return f"above {show(meta.gt)}" + ("" if meta.le is None else f" and at most {show(meta.le)}")
        if meta.ge is None:
            return ""
        return ("of " if meta.le is None else "from ") + _range(meta.ge, meta.le, show)


def _range(least: Any, most: Any, show: Callable[[Any], str]) -> str:
    if least is None or most is None:
        return f"at most {show(most)}" if most is not None else f"at least {show(least)}"
    return f"{show(least)} to {show(most)}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One declared setting."""

    path: str
    """Its name after those of the sections that it is in: `limits.live_max`, `models[].name`."""
    kind: Kind
    default: Any
    """The default. MISSING when the setting is required."""
    help: str
    """The docstring below the field, as one line."""

    @property
    def name(self) -> str:
        """The name in its own section."""
        return self.path.rpartition(".")[2]

    @property
    def section(self) -> type | None:
        """The dataclass of a section, or of the tables in a list."""
        return (self.kind.item or self.kind).section

    @property
    def inner_path(self) -> str:
        """The path of the settings in it, when it is a section or a list."""
        return self.path if self.kind.item is None else f"{self.path}[]"

    @property
    def is_required(self) -> bool:
        """True if there is no default."""
        return self.default is MISSING

    @property
    def is_option(self) -> bool:
        """True if a command line can give it: it is at the top level, and no section or list."""
        return "." not in self.path and self.kind.section is None and self.kind.item is None

    @property
    def can_be_denied(self) -> bool:
        """True if it is a switch with a `NO_` variable, which turns off what is on or left open."""
        return self.kind.is_switch and self.default is not False

    @property
    def shown_default(self) -> str:
        """The default as a table shows it; empty for None, for a section and when there is none."""
        if self.is_required or self.default is None or self.section is not None:
            return ""
        if self.kind.is_switch:
            return str(self.default).lower()
        if self.kind.item is not None:
            return ", ".join(map(str, self.default))
        return show_size(self.default) if self.kind.is_size else _show(self.default)

    def variable(self, prefix: str) -> str | None:
        """The variable that sets it; None inside a list, which one variable sets as a whole."""
        return None if "[]" in self.path else variable_of(self.path, prefix)

    def denial(self, prefix: str) -> str:
        """The variable that turns a switch off."""
        section, dot, name = self.path.rpartition(".")
        return variable_of(f"{section}{dot}NO_{name}", prefix)


@cache
def settings_of(type_: type, path: str = "") -> tuple[Setting, ...]:
    """The settings of one section, in the order of their declaration. `path` is that of the section."""
    hints, help_ = typing.get_type_hints(type_, include_extras=True), field_docstrings(type_)
    found = []
    for field in fields(type_):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        kind = Kind.of(hints[field.name], _UNITS.get(field.name.rpartition("_")[2]))
        here = f"{path}.{field.name}" if path else field.name
        found.append(Setting(here, kind, default, help_.get(field.name, "")))
    return tuple(found)


def walk(type_: type, path: str = "") -> Iterator[Setting]:
    """All settings, a section's own after the section itself."""
    for setting in settings_of(type_, path):
        yield setting
        if setting.section is not None:
            yield from walk(setting.section, setting.inner_path)


def problems_of(value: Any) -> list[str]:
    """The problems of a section that was made in code: one `name: problem` for each bad value."""
    problems = []
    type_: type = type(value)
    for setting in settings_of(type_):
        try:
            setting.kind.convert(getattr(value, setting.name))
        except ValueError as error:
            problems.append(f"{setting.path}: {error}")
    return problems


def variable_of(path: str, prefix: str) -> str:
    """The variable of the setting at a path, which is in no list."""
    return prefix + path.replace(".", "__").upper()


def option_of(name: str) -> str:
    """The option of the command line that gives a setting of this name."""
    return "--" + name.replace("_", "-")


def _show(value: object) -> str:
    """A value without the zero that a whole float ends with."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _options(type_: Any, notes: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The members of a union, or the type alone, each without annotations and with them."""
    while typing.get_origin(type_) is Annotated:
        type_, notes = type_.__origin__, (*notes, *type_.__metadata__)
    if typing.get_origin(type_) in (typing.Union, types.UnionType):
        for option in typing.get_args(type_):
            yield from _options(option, notes)
    else:
        yield type_, notes
