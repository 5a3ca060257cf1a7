"""argparse, with mistakes answered by what would be right."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Options are never abbreviated; a misspelt one is answered with those that are like it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})
        self._given: list[str] = []

    @property
    def option_names(self) -> list[str]:
        return [name for name in self._option_string_actions if name.startswith("--")]

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self._given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        hints = []
        if message.startswith(("unrecognized", "the following arguments are required")):
            names = [word.partition("=")[0] for word in self._given if word.startswith("--")]
            unknown = [name for name in names if name not in self.option_names]
            hints = [hint for name in unknown if (hint := closest(name, self.option_names))]
        if hints:
            message += f"; did you mean {' and '.join(hints)}?"
        sys.stderr.write(f"{self.prog}: {message}\nSee {self.prog} --help.\n")
        sys.exit(2)


def closest(name: str, known: Iterable[str]) -> str | None:
    matches = difflib.get_close_matches(name, known, n=1)
    return matches[0] if matches else None


def checked(check: Callable[[str], str | None]) -> Callable[[str], str]:
    """A type for `add_argument`: the text itself, unless `check` says what it must be."""

    def convert(text: str) -> str:
        if problem := check(text):
            raise argparse.ArgumentTypeError(f"{problem}, got {text!r}")
        return text

    return convert


def port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= 65_535):
        raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, got {text!r}")
    return int(text)
