"""The terminal, or the files in its place: text in, text out, and no control characters.

Rules:

1. A model's text is shown without its control characters, whose sequences could retitle the window, clear
   the screen or make a terminal type, and without those that turn the direction of what follows, or end a
   line. Newlines and tabs stay; others appear as a symbol.
2. Input is text in the terminal's encoding, or an error in words.
"""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Final

MESSAGE_LEN_MAX: Final = 8 * 1024 * 1024
"""Characters of one message, which is one line."""

_LAYOUT: Final = (0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Unicode's line and paragraph separators, and what embeds, overrides or isolates a direction of text."""
_SYMBOLS: Final = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **dict.fromkeys((*range(0x80, 0xA0), *_LAYOUT), "\ufffd"),
}
"""The replacement of each control character but newline and tab, and of `_LAYOUT`: Unicode's picture of it,
or U+FFFD."""


class UnusableInput(Exception):
    """The error of input that cannot be sent. The message says why."""


def harmless(text: str) -> str:
    """The text with control characters replaced, so that it can be shown in a terminal."""
    return text.replace("\r\n", "\n").translate(_SYMBOLS)


def text_problem(text: str) -> str | None:
    """Why the text cannot be sent; None when it can. Bytes that did not decode are lone surrogates in
    Python."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "must be text in the terminal's encoding"
    return None


def prepare() -> None:
    """Set up the standard streams so that what cannot be decoded or encoded raises no exception."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def show(text: str) -> None:
    """Print the text at once, without a newline."""
    sys.stdout.write(harmless(text))
    sys.stdout.flush()


def read_message() -> str | None:
    """The next line that is not empty, as it was typed or piped in. None at the end of the input.

    Ctrl-C at the prompt begins the line anew. Raises UnusableInput.
    """
    if sys.stdin is None:
        raise UnusableInput("standard input is closed; say something with -m")
    read = _prompted if sys.stdin.isatty() else _piped
    while (line := read()) is not None:
        if problem := text_problem(line):
            raise UnusableInput(f"a message {problem}")
        if line.strip():
            return line.strip()
    return None


def _prompted() -> str | None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives `input` its line editing

    while True:
        try:
            return input("\n> ")
        except EOFError:
            print()  # the shell's own prompt comes next
            return None
        except KeyboardInterrupt:
            continue


def _piped() -> str | None:
    line = sys.stdin.readline(MESSAGE_LEN_MAX + 1)
    if len(line) > MESSAGE_LEN_MAX:
        raise UnusableInput(f"a message must have at most {MESSAGE_LEN_MAX} characters")
    return line or None
