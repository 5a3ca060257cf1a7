"""The input of a custom tool, read off the arguments of the function that stands for it.

The arguments are `{"input": "..."}`, which a grammar holds the model to where one can be made. So the text is
told as it comes: what is between the quotes, unescaped. Arguments of another form are read when they are
whole, and are the input as they stand where they have none.
"""

from __future__ import annotations

import json
import re
from typing import Final

_OPENING: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MAY_OPEN: Final = re.compile(r'\s*(?:\{\s*(?:"(?:i(?:n(?:p(?:u(?:t(?:"\s*(?::\s*)?)?)?)?)?)?)?)?)?')
"""The beginnings of an opening."""
_HEX: Final = "[0-9a-fA-F]"
_PAIR: Final = rf"u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"
_TEXT: Final = re.compile(
    rf'(?:[^"\\]++|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F]){_HEX}{{4}}|{_PAIR}))*', re.DOTALL
)
"""Characters and escapes that are whole."""
_BEGUN: Final = re.compile(
    rf"\\(?:u(?:{_HEX}{{0,3}}|[dD][89abAB]{_HEX}{{2}}(?:\\(?:u(?:[dD](?:[c-fC-F]{_HEX}?)?)?)?)?)?)?"
)
"""The beginnings of an escape."""
_BROKEN: Final = re.compile(rf"\\(?:u{_HEX}{{4}}|.)", re.DOTALL)
"""An escape that stands for no character."""
_NO_CHARACTER: Final = "\ufffd"


class CustomInput:
    """Reads the input of one call."""

    __slots__ = ("_held", "_is_closed", "_is_open", "_others")

    def __init__(self) -> None:
        self._held = ""
        """The arguments that were not read: what may open the text, or the beginning of an escape."""
        self._others: list[str] | None = None
        """All arguments, once they are known to be of another form."""
        self._is_open = self._is_closed = False

    def feed(self, arguments: str) -> str:
        """Take a piece of the arguments. Returns the text that is certain now."""
        if self._is_closed:
            return ""
        if self._others is not None:
            self._others.append(arguments)
            return ""
        held = self._held + arguments
        if self._is_open:
            return self._read(held)
        if (opening := _OPENING.match(held)) is not None:
            self._is_open = True
            return self._read(held[opening.end() :])
        if _MAY_OPEN.fullmatch(held) is None:
            self._others = [held]
        self._held = held
        return ""

    def _read(self, held: str) -> str:
        """The text that `held` begins with."""
        texts: list[str] = []
        at = 0
        while True:
            whole = _TEXT.match(held, at)
            assert whole is not None  # it matches the empty string
            texts.append(_unescaped(whole.group()))
            at = whole.end()
            if held[at : at + 1] in ("", '"') or _BEGUN.fullmatch(held, at) is not None:
                break
            broken = _BROKEN.match(held, at)
            assert broken is not None
            texts.append(_NO_CHARACTER)
            at = broken.end()
        self._is_closed = held.startswith('"', at)
        self._held = "" if self._is_closed else held[at:]
        return "".join(texts)

    def finish(self) -> str:
        """The text that is left where the arguments end. What is cut off within an escape is dropped."""
        if self._is_open:
            return ""
        arguments = self._held if self._others is None else "".join(self._others)
        try:
            given = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        if given == {}:
            return ""
        text = given.get("input") if isinstance(given, dict) else None
        return _sound(text) if isinstance(text, str) else arguments


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    value = json.loads(f'"{text}"', strict=False)
    assert isinstance(value, str)
    return value


def _sound(text: str) -> str:
    """The text without halves of pairs, which stand for no character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
