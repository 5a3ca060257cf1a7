"""Command lines by argparse: a mistake is answered with a suggestion, and declared settings become
options."""

from __future__ import annotations

import argparse
import difflib
import errno
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from shared.process.settings import Kind, Setting, option_of, settings_of


class Parser(argparse.ArgumentParser):
    """A parser whose options are never abbreviated. For a misspelt one it suggests the option that is most
    like it. It refuses to start in a Python that leaves assertions out: the laws of the services are
    assertions, such as that no page of the KV cache has two owners, and a fault would go on unseen."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})
        self.gone: Mapping[str, str] = {}
        """Sentences on what became of options that are no more, by name."""
        self._given: list[str] = []

    @property
    def option_names(self) -> list[str]:
        """The names of the long options."""
        return [name for name in self._option_string_actions if name.startswith("--")]

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if not __debug__:
            self.error("needs its assertions: start Python without -O, and unset PYTHONOPTIMIZE")
        self._given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        hints = []
        if message.startswith(("unrecognized", "the following arguments are required")):
            names = [word.partition("=")[0] for word in self._given if word.startswith("--")]
            unknown = [name for name in names if name not in self.option_names]
            message += "".join(f"; {name} is {self.gone[name]}" for name in unknown if name in self.gone)
            unknown = [name for name in unknown if name not in self.gone]
            hints = [hint for name in unknown if (hint := closest(name, self.option_names))]
        if hints:
            message += f"; did you mean {' and '.join(hints)}?"
        sys.stderr.write(f"{self.prog}: {message}\nSee {self.prog} --help.\n")
        sys.exit(2)


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like this one; None when none is."""
    matches = difflib.get_close_matches(name, known, n=1)
    return matches[0] if matches else None


def cannot_listen(host: str, port: int, error: OSError, option: str = "--port") -> str:
    """The message about an address that cannot be bound, with the option to change: that of the host, or
    `option`, that of the port."""
    option = option if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"cannot listen on {address}: {error.strerror or error}; choose another with {option}"


# -- types for `add_argument` ---------------------------------------------------------------------


def checked(check: Callable[[str], str | None], *, is_secret: bool = False) -> Callable[[str], str]:
    """An argparse type: a text that `check` accepts. `check` returns what the text must be, or None when it
    is that. A secret is not repeated in the message."""

    def convert(text: str) -> str:
        if problem := check(text):
            raise argparse.ArgumentTypeError(problem if is_secret else f"{problem}, got {text!r}")
        return text

    return convert


def spelt(type_: Any) -> Callable[[str], Any]:
    """An argparse type: a value of a setting's type (`shared.process.settings`), as it is spelt on a command
    line."""
    kind = Kind.of(type_)

    def convert(text: str) -> Any:
        try:
            return kind.convert(kind.parse(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}, got {text!r}") from None

    return convert


# -- settings as options --------------------------------------------------------------------------


def add_settings(parser: argparse.ArgumentParser, type_: type, headings: Mapping[str, str]) -> None:
    """Add an option for each setting at the top level of `type_` that is no section and no list.

    The parsed options have the settings' names and hold texts (bools for switches), for
    `shared.process.setting_values.load`; those that were not given are absent. `headings` are the help's
    headings, by the name of the setting that is the first below each.
    """
    group: argparse._ActionsContainer = parser
    for setting in settings_of(type_):
        if setting.name in headings:
            group = parser.add_argument_group(headings[setting.name])
        if not setting.is_option:
            continue
        common: dict[str, Any] = {
            "dest": setting.name,
            "default": argparse.SUPPRESS,
            "help": _help(setting),
        }
        if not setting.kind.is_switch:
            group.add_argument(option_of(setting.name), metavar=_metavar(setting), **common)
        else:
            action = argparse.BooleanOptionalAction if setting.can_be_denied else "store_true"
            group.add_argument(option_of(setting.name), action=action, **common)


def _help(setting: Setting) -> str:
    is_omitted = setting.is_required or setting.default is None or setting.kind.is_switch
    default = "" if is_omitted else f" Default: {setting.shown_default}."
    return (setting.help + default).replace("%", "%%")


def _metavar(setting: Setting) -> str:
    if setting.kind.choices:
        return "{" + ",".join(map(str, setting.kind.choices)) + "}"
    unit = setting.kind.unit if setting.kind.base in (int, float) else None
    return (unit or setting.name.rpartition("_")[2]).upper().replace(" ", "-")
