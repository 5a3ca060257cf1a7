"""Bodies of attacks, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.bench.gateway.attack import (
    CHAT_HEAD,
    CHATS,
    COMPLETION_HEAD,
    COMPLETIONS,
    MODEL,
    Body,
    padded,
    text,
    with_fields,
)

SHAPES: Final[Mapping[str, tuple[str, Body]]] = {
    "700,000 fields": (CHATS, with_fields(f"{CHAT_HEAD},", 700_000, "0", "}")),
    "metadata of 600,000 fields": (
        CHATS,
        with_fields(f'{CHAT_HEAD}, "metadata": {{', 600_000, '"x"', "}}"),
    ),
    "4,000,000 tools": (CHATS, padded(f'{CHAT_HEAD}, "tools": [', "1", "]}")),
    "2,000,000 stop strings": (CHATS, padded(f'{CHAT_HEAD}, "stop": [', '"a"', "]}")),
    "2,000,000 prompts": (COMPLETIONS, padded(f'{COMPLETION_HEAD}, "prompt": [', "[1]", "]}")),
    "4,000,000 ids": (COMPLETIONS, padded(f'{COMPLETION_HEAD}, "prompt": [', "1", "]}")),
    "4,000,000 ids to detokenize": ("/detokenize", padded(f'{{"model": "{MODEL}", "tokens": [', "1", "]}")),
    "4,000,000 brackets": (COMPLETIONS, padded(f'{COMPLETION_HEAD}, "zzz": ', "[", "", between="")),
    "an integer of 8 MB": (COMPLETIONS, padded(f'{COMPLETION_HEAD}, "seed": ', "9", "}", between="")),
    "1,300,000 lone surrogates": (COMPLETIONS, text(r"\ud800")),
    "1,300,000 escapes that end too early": (
        COMPLETIONS,
        padded(f'{COMPLETION_HEAD}, "prompt": "', r"\u0041", '"', between=""),
    ),
    "40,000 log-biases": (
        CHATS,
        with_fields(f'{CHAT_HEAD}, "logit_bias": {{', 40_000, "1", "}}"),
    ),
}
"""Path and body, by name: JSON that costs more to decode than to send. All of it is refused."""

TAKEN_APART: Final = padded(
    f'{{"model": "{MODEL}", "max_tokens": 1, "messages": [{{"role": "user", "content": "Go on."}}, '
    '{"role": "assistant", "content": "',
    "ab</think>",
    '"}, {"role": "user", "content": "Go on."}]}',
    between="",
)
"""A chat of 8 MiB, which the model's template splits at each of 800,000 places. The prompt is short."""
TAKES_APART: Final = {"its template takes apart": CHATS, "is taken apart, to tokenize": "/tokenize"}
"""The paths of attacks with it, by the ends of their names: rendered by the gateway, and by the engine."""

TEXTS: Final[Mapping[str, Body]] = {
    "digits": text("7"),
    "spaces and line ends": text(r" \n"),
    "combining marks": text("e\u0301"),
    "line ends": text(r"\n"),
    "letters": text("a"),
    "spaces": text(" "),
    "words": text("word "),
    "emoji": text("\U0001f600"),
}
"""Prompts of 8 MiB, by name. None of them fits into the context."""
