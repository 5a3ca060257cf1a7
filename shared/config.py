"""TOML and environment to frozen dataclasses, with every bad value reported at once.

The dataclasses say everything: names, types, bounds (`Annotated[int, msgspec.Meta(ge=1)]`),
defaults. The variable `PREFIX_SECTION__NAME` sets `section.name` and wins over the file; what is no
plain text is written as in TOML (`PREFIX_MODELS='[{name = "m"}]'`). A setting that does not exist is
a mistake like any other, in the file and in the environment (`shared.environment` says which variables
are meant).
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec

from shared.environment import no_such_setting, settings_in

T = TypeVar("T")

FILE_LEN_MAX: Final = 16 * 1024 * 1024


class ConfigError(Exception):
    """What is wrong with a configuration: one `path: problem` per bad value."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load(type_: type[T], source: Path | Mapping[str, Any], env: Mapping[str, str], prefix: str) -> T:
    """A value of the dataclass `type_`. `prefix` ends with an underscore. Raises ConfigError."""
    assert dataclasses.is_dataclass(type_)
    assert prefix.endswith("_")
    document = _read(source) if isinstance(source, Path) else source
    variables = {name.lower().replace("__", "."): text for name, text in settings_in(env, prefix).items()}
    builder = _Builder(variables)
    value = builder.section(type_, document, "")
    problems = builder.problems
    if variables:  # what is left of them set nothing
        known = [_variable(prefix, path) for path in _paths(type_)]
        problems += [no_such_setting(_variable(prefix, path), known) for path in variables]
    if problems:
        raise ConfigError(problems)
    return typing.cast(T, value)


def _variable(prefix: str, path: str) -> str:
    return prefix + path.replace(".", "__").upper()


def _paths(type_: type, path: str = "") -> Iterator[str]:
    """The dotted path of every setting that a variable can set."""
    for name, hint in typing.get_type_hints(type_, include_extras=True).items():
        yield (here := _join(path, name))
        if (section := _section_of(hint)) is not None:
            yield from _paths(section, here)


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > FILE_LEN_MAX:
            raise ConfigError([f"{path}: larger than {FILE_LEN_MAX} bytes"])
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror or error}"]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError([f"{path}: not valid TOML: {error}"]) from error


class _Builder:
    """Walks types and values side by side. What cannot be built is None, and adds to `problems`."""

    def __init__(self, variables: dict[str, str]) -> None:
        self.variables = variables
        """By dotted path; those that were used are taken out."""
        self.problems: list[str] = []

    def section(self, type_: type, values: Mapping[str, Any], path: str) -> Any:
        hints = typing.get_type_hints(type_, include_extras=True)
        known = len(self.problems)
        built: dict[str, Any] = {}
        for name in values:
            if name not in hints:
                self.problems.append(f"{_join(path, name)}: there is no such setting")
        for field in dataclasses.fields(type_):
            here = _join(path, field.name)
            text = self.variables.pop(here, None)
            if text is not None:
                built[field.name] = self.value(hints[field.name], _from_text(hints[field.name], text), here)
            elif field.name in values:
                built[field.name] = self.value(hints[field.name], values[field.name], here)
            elif any(variable.startswith(here + ".") for variable in self.variables):
                built[field.name] = self.value(hints[field.name], {}, here)
            elif field.default is field.default_factory is dataclasses.MISSING:
                self.problems.append(f"{here}: is required")
        return type_(**built) if len(self.problems) == known else None

    def value(self, type_: Any, value: Any, path: str) -> Any:
        section, item, metas = _section_of(type_), _item_of(type_), _metas_of(type_)
        if section is not None and isinstance(value, Mapping):
            return self.section(section, value, path)
        if item is not None and _section_of(item) is not None and isinstance(value, list):
            self._check_length(len(value), metas, path)
            return tuple(self.value(item, each, f"{path}[{i}]") for i, each in enumerate(value))
        try:
            return msgspec.convert(value, type_)
        except msgspec.ValidationError as error:
            problem, _, inside = str(error).partition(" - at `$")
            self.problems.append(f"{path}{inside.rstrip('`')}: {problem.replace('`', '')}")
            return None

    def _check_length(self, length: int, metas: list[msgspec.Meta], path: str) -> None:
        for meta in metas:
            if meta.min_length is not None and length < meta.min_length:
                self.problems.append(f"{path}: must have at least {meta.min_length} entries")
            if meta.max_length is not None and length > meta.max_length:
                self.problems.append(f"{path}: must have at most {meta.max_length} entries")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _from_text(type_: Any, text: str) -> Any:
    """Text as it is where text is wanted, else as TOML spells the value."""
    try:
        return msgspec.convert(text, type_)
    except msgspec.ValidationError:
        pass  # not a text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _options(type_: Any) -> list[Any]:
    """The members of a union, without their annotations."""
    while typing.get_origin(type_) is Annotated:
        type_ = type_.__origin__
    if typing.get_origin(type_) in (typing.Union, types.UnionType):
        return [inner for option in typing.get_args(type_) for inner in _options(option)]
    return [type_]


def _section_of(type_: Any) -> type | None:
    classes = (option for option in _options(type_) if isinstance(option, type))
    return next((option for option in classes if dataclasses.is_dataclass(option)), None)


def _item_of(type_: Any) -> Any:
    """The type of the items, when it is a `tuple[item, ...]`."""
    tuples = (option for option in _options(type_) if typing.get_origin(option) is tuple)
    return next((typing.get_args(option)[0] for option in tuples), None)


def _metas_of(type_: Any) -> list[msgspec.Meta]:
    return [meta for meta in getattr(type_, "__metadata__", ()) if isinstance(meta, msgspec.Meta)]
