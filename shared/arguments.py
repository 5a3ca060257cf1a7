"""argparse, with mistakes answered by what would be right."""

from __future__ import annotations

import argparse
import difflib
import errno
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NoReturn

COUNT_MAX: Final = 1 << 30
BYTES_MAX: Final = 1 << 50
NAME_LEN_MAX: Final = 256
_BYTES: Final = re.compile(r"(\d{1,16}(?:\.\d{1,16})?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class Parser(argparse.ArgumentParser):
    """Options are never abbreviated; a misspelt one is answered with those that are like it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})
        self._given: list[str] = []

    @property
    def option_names(self) -> list[str]:
        return [name for name in self._option_string_actions if name.startswith("--")]

    @property
    def options(self) -> list[argparse.Action]:
        """Everything that can be set, so not `--help` and `--version`, which only print."""
        return [action for action in self._actions if action.default is not argparse.SUPPRESS]

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


def cannot_listen(host: str, port: int, error: OSError) -> str:
    """What to say when the address cannot be bound, with the option to change."""
    option = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"cannot listen on {address}: {error.strerror or error}; choose another with {option}"


# -- types for `add_argument` ---------------------------------------------------------------------


def checked(check: Callable[[str], str | None], *, is_secret: bool = False) -> Callable[[str], str]:
    """The text itself, unless `check` says what it must be. A secret is not repeated in the message."""

    def convert(text: str) -> str:
        if problem := check(text):
            raise argparse.ArgumentTypeError(problem if is_secret else f"{problem}, got {text!r}")
        return text

    return convert


nonempty: Final = checked(lambda text: None if text.strip() else "must not be empty")
model_name: Final = checked(
    lambda text: (
        None
        if text.strip() and text.isprintable() and len(text) <= NAME_LEN_MAX
        else f"must be a name of 1 to {NAME_LEN_MAX} characters"
    )
)


def port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) <= 65_535):
        raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, got {text!r}")
    return int(text)


def count(least: int, most: int = COUNT_MAX) -> Callable[[str], int]:
    """A whole number from `least` to `most`."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, got {text!r}")
        return value

    return convert


def number(what: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """A float for which `holds` is true, as it never is for NaN. `what` continues "must be a number"."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not holds(value):
            raise argparse.ArgumentTypeError(f"must be a number {what}, got {text!r}")
        return value

    return convert


def byte_count(text: str) -> int:
    """`512MiB`, `2GB`, `1.5g`: with an `i`, or without a `b`, units are powers of 1024, else of 1000."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a size such as 512MiB, 2GiB or 4GB, got {text!r}")
    digits, unit, binary = match.groups()
    decimal = unit and not binary and text.strip().lower().endswith("b")
    size = int(float(digits) * (1000 if decimal else 1024) ** _POWERS[unit.lower()])
    if not 1 << 20 <= size <= BYTES_MAX:
        raise argparse.ArgumentTypeError(f"must be 1MiB to {BYTES_MAX >> 40}TiB, got {text!r}")
    return size


def byte_count_or_0(text: str) -> int:
    return 0 if text.strip() == "0" else byte_count(text)
