"""Values for declared settings (`shared.process.settings`): read from a command line, variables and a TOML
file, and written as TOML.

The command line wins over variables, these over the file, and the file over defaults, for each setting by
itself. Every bad value is reported at once, by the name under which it was given. A setting that does not
exist is a mistake like any other, in the file and in the environment (`shared.process.environment` says which
variables are meant).

What no single value shows, a dataclass checks in its `__post_init__`, which raises ConfigError. Where single
values are wrong, the whole is checked without them, and what it then misses of their names is not told.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from shared.process.environment import no_such_setting, settings_in
from shared.process.files import MARK, read_text
from shared.process.settings import Kind, Setting, option_of, settings_of, variable_of, walk

T = TypeVar("T")

NO_FORMER: Final[Mapping[str, str]] = {}
_INDEX: Final = re.compile(r"\[\d+\]")
_WORD: Final = re.compile(r"(?<![\w/:])\w+")
"""A word that is no part of a URL."""
FILE_LEN_MAX: Final = 16 * 1024 * 1024
SHOWN_LEN_MAX: Final = 64
"""Characters of a wrong value that a message repeats."""


class ConfigError(Exception):
    """A configuration with mistakes: one `name: problem` for each bad value."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load(
    type_: type[T],
    source: Path | Mapping[str, Any],
    env: Mapping[str, str],
    prefix: str,
    options: Mapping[str, object] | None = None,
    moved: Mapping[str, str] = NO_FORMER,
    gone: Mapping[str, str] = NO_FORMER,
) -> T:
    """A value of the dataclass `type_`. Raises ConfigError.

    `source` is a TOML file, or what one holds. `prefix` is that of the variables, and ends with an
    underscore. `options` are those of a command line (`shared.process.arguments.add_settings`), by the
    settings' names; None for a service that has none. `moved` are the paths of settings by those that they
    had before, under which they are refused. `gone` says what became of those that there are no more.
    """
    assert prefix.endswith("_")
    texts, problems = _variables(type_, settings_in(env, prefix), prefix, moved, gone)
    for name, given in (options or {}).items():
        texts[name] = _Text(option_of(name), str(given))
    former = {**{old: f"{new} now" for old, new in moved.items()}, **gone}
    builder = _Builder(texts, former, has_options=options is not None)
    document = _read(source) if isinstance(source, Path) else source
    value = builder.section(type_, document, "")
    if problems := builder.problems + problems:
        rest = _Builder(texts, former, has_options=options is not None, leaves_out=True)
        rest.section(type_, document, "")
        known = set(problems)
        raise ConfigError(
            problems + [told for told in rest.problems if told not in known and not rest.misses(told)]
        )
    return typing.cast(T, value)


@dataclass(frozen=True, slots=True)
class _Text:
    """A value as it was given in an option or a variable, and the name of that."""

    name: str
    text: str


def _variables(
    type_: type, given: Mapping[str, str], prefix: str, moved: Mapping[str, str], gone: Mapping[str, str]
) -> tuple[dict[str, _Text], list[str]]:
    """The variables' texts by the paths of the settings, and what is wrong with the variables' names. `given`
    has the names without the prefix."""
    known: dict[str, tuple[Setting, bool]] = {}
    for setting in walk(type_):
        if (variable := setting.variable(prefix)) is not None:
            known[variable] = (setting, False)
            if setting.can_be_denied:
                known[setting.denial(prefix)] = (setting, True)
    former = {variable_of(old, prefix): f"{variable_of(new, prefix)} now" for old, new in moved.items()}
    former |= {variable_of(old, prefix): told for old, told in gone.items()}
    texts: dict[str, _Text] = {}
    problems = []
    for name, text in given.items():
        variable = prefix + name
        if variable not in known:
            problems.append(no_such_setting(variable, known, former.get(variable)))
            continue
        setting, is_denial = known[variable]
        if setting.path in texts:
            problems.append(f"{texts[setting.path].name} and {variable} set the same option")
        value = setting.kind.parse(text)
        is_denied = is_denial and isinstance(value, bool)
        texts[setting.path] = _Text(variable, str(not value) if is_denied else text)
    return texts, problems


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path, FILE_LEN_MAX).removeprefix(MARK))
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror or error}"]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError([f"{path}: not valid TOML: {error}"]) from error


class _Builder:
    """Walks declarations and values side by side. A value that cannot be built is None, and adds to
    `problems`."""

    def __init__(
        self,
        texts: Mapping[str, _Text],
        former: Mapping[str, str],
        *,
        has_options: bool,
        leaves_out: bool = False,
    ) -> None:
        """`leaves_out`: build what can be built without bad values."""
        self.problems: list[str] = []
        self._leaves_out = leaves_out
        self._left_out: set[str] = set()
        """The names of settings that the whole is built without."""
        self._texts = texts
        """The options and variables that are given, by the settings' paths."""
        self._former = former
        """Sentences on what became of settings, by their former paths."""
        self._has_options = has_options

    def section(self, type_: type, values: Mapping[str, Any], path: str) -> Any:
        """A value of the dataclass, from those of a table in TOML and the texts."""
        settings, known = settings_of(type_, path), len(self.problems)
        names, paths = {setting.name for setting in settings}, [setting.path for setting in settings]
        built: dict[str, Any] = {}
        for name in values:
            if name not in names:
                given = f"{path}.{name}".lstrip(".")
                told = self._former.get(_INDEX.sub("[]", given))
                self.problems.append(no_such_setting(given, paths, told))
                self._left_out.update(difflib.get_close_matches(name, names))
        for setting in settings:
            here, text = setting.path, self._texts.get(setting.path)
            if text is not None:
                built[setting.name] = self._value(setting.kind, setting.kind.parse(text.text), here, text)
            elif setting.name in values:
                built[setting.name] = self._value(setting.kind, values[setting.name], here)
            elif any(other.startswith(here + ".") for other in self._texts):
                built[setting.name] = self._value(setting.kind, {}, here)
            elif setting.is_required:
                is_option = self._has_options and setting.is_option
                self.problems.append(f"{option_of(here) if is_option else here}: is required")
        if len(self.problems) > known:
            bad = {one.name for one in settings if one.name not in built or built[one.name] is None}
            bad -= {one.name for one in settings if not one.is_required and one.name not in built}
            self._left_out |= bad
            if not self._leaves_out or any(one.is_required and one.name in bad for one in settings):
                return None
            built = {name: inside for name, inside in built.items() if name not in bad}
        try:
            return type_(**built)
        except ConfigError as error:
            self.problems += [f"{path}: {problem}" if path else problem for problem in error.problems]
            return None

    def misses(self, problem: str) -> bool:
        """True if a problem names a setting that was left out: it may be that which is missing."""
        return not self._left_out.isdisjoint(_WORD.findall(problem))

    def _value(self, kind: Kind, value: Any, path: str, text: _Text | None = None) -> Any:
        name = path if text is None else text.name
        if kind.section is not None and isinstance(value, Mapping):
            return self.section(kind.section, value, path)
        if kind.item is not None and isinstance(value, list):
            items = [self._value(kind.item, item, f"{path}[{at}]") for at, item in enumerate(value)]
            least, most = kind.meta.min_length or 0, kind.meta.max_length
            if len(items) < least or (most is not None and len(items) > most):
                self.problems.append(f"{name}: must {kind.requirement}")
            return tuple(item for item in items if item is not None) if self._leaves_out else tuple(items)
        try:
            return kind.convert(value)
        except ValueError as error:
            is_secret = text is None or not (kind.choices or kind.base in (bool, int, float))
            shown = "" if text is None or is_secret else f", got {text.text[:SHOWN_LEN_MAX]!r}"
            if text is None and kind.is_spelt_by(value):
                shown = ", without quotes"
            self.problems.append(f"{name}: {error}{shown}")
            return None


# -- writing --------------------------------------------------------------------------------------


def to_toml(value: Any, path: str = "") -> str:
    """A file that `load` makes the value of a dataclass from, or the part of one that is below the header of
    the table at `path`. Settings that have their defaults are left out."""
    return "\n".join(_lines(value, path)) + "\n"


def _lines(value: Any, path: str) -> Iterator[str]:
    """A table's own values, then the tables in it: a value after one of those would belong to it."""
    tables: list[tuple[str, str, Any]] = []
    type_: type = type(value)
    for setting in settings_of(type_, path):
        inside = getattr(value, setting.name)
        if inside is None or inside == setting.default:
            continue
        if is_dataclass(inside):
            tables.append((f"[{setting.path}]", setting.path, inside))
        elif setting.section is not None:
            tables += [(f"[[{setting.path}]]", setting.path, item) for item in inside]
        else:
            yield f"{setting.name} = {toml_value(inside)}"
    for head, inner_path, inside in tables:
        yield f"\n{head}"
        yield from _lines(inside, inner_path)


def toml_value(value: object) -> str:
    """A text, number, truth, date or list of them as TOML spells it."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():  # JSON's spelling, but for one control character that TOML escapes too
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case datetime():
            return value.isoformat()
        case tuple() | list():
            return f"[{', '.join(map(toml_value, value))}]"
        case _:
            return repr(value)
