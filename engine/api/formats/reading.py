"""Which format a model's answers have: the operator's choice, else the checkpoint's own, else its family's.

Rules

1. What the operator names and cannot be read is an error at start, which names the key.
2. A checkpoint's own `response_template` that cannot be read is passed over with a warning where the family's
   format is known; where it is not, it is an error at start: else the model would serve without tools, and
   nobody would know why. `--answer-format none` starts it all the same.
3. A checkpoint's own format cannot say whether a call ends reasoning, and states no white space: both are
   taken from the family where that has the same markers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from engine.api.formats.families import FAMILIES, FormatFamily, family_named, family_of
from engine.api.formats.format import AnswerFormat
from engine.api.formats.response_template import BadFormat, compiled
from engine.api.formats.source import MARKS_MAX
from shared.process import files, logs

AUTO: Final = "auto"
NO_FORMAT: Final = "none"
OWN_KEY: Final = "response_template"
FILE_LEN_MAX: Final = 64 * 1024
_TOKEN_LEN_MIN: Final = 3
"""The fewest characters of a token that can be a marker by itself: brackets and line ends are tokens of other
texts, too."""

log = logs.get(__name__)


def read_format(
    choice: str,
    *,
    own: object,
    chat_template: str | None,
    token_ids: Mapping[str, int],
) -> AnswerFormat | None:
    """The format of a model's answers; None where it is not known, or not wanted.

    `choice` is the operator's: `auto`, `none`, a family's name, or the path of a file. `own` is the
    checkpoint's `response_template`, None without one; `token_ids` has the ids of the tokenizer's added
    tokens by their texts. Raises BadFormat.
    """
    if choice == NO_FORMAT:
        return None
    if choice != AUTO:
        return _with_tokens(_chosen(choice), token_ids)
    family = family_of(chat_template or "")
    format_ = None if family is None else _of_family(family)
    if own is not None:
        format_ = _own(own, format_)
    return None if format_ is None else _with_tokens(format_, token_ids)


def _chosen(choice: str) -> AnswerFormat:
    family = family_named(choice)
    if family is not None:
        return _of_family(family)
    names = ", ".join(family.name for family in FAMILIES)
    try:
        data = json.loads(files.read_text(Path(choice), FILE_LEN_MAX))
    except FileNotFoundError:
        raise BadFormat(f"--answer-format: {choice} is no file, and none of {names}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadFormat(f"--answer-format: {choice} cannot be read: {error}") from error
    try:
        return compiled(data, Path(choice).stem, is_ours=True)
    except BadFormat as error:
        raise BadFormat(f"{choice}: {error}") from error


def _own(own: object, family: AnswerFormat | None) -> AnswerFormat:
    """The checkpoint's own format; its family's, if that has the same markers or the own one is bad."""
    try:
        format_ = compiled(own, "checkpoint", is_ours=False)
    except BadFormat as error:
        if family is None:
            raise BadFormat(
                f"{OWN_KEY}.{error} (tokenizer_config.json). Give the format by --answer-format, or none."
            ) from error
        log.warning("engine.response_template_unread", problem=str(error), format=family.name)
        return family
    if family is None:
        return format_
    if set(_bare_texts(format_)) <= set(_bare_texts(family)):
        return family
    return replace(format_, call_ends_reasoning=family.call_ends_reasoning)


def _bare_texts(format_: AnswerFormat) -> Iterator[tuple[str, ...]]:
    return (piece for text in format_.texts() if (piece := tuple(text.split())))


def _of_family(family: FormatFamily) -> AnswerFormat:
    return compiled(family.data, family.name, is_ours=True)


def _with_tokens(format_: AnswerFormat, token_ids: Mapping[str, int]) -> AnswerFormat:
    """The format with the ids of the tokens that its texts hold."""
    texts = list(format_.texts())
    found: dict[str, int] = {
        token: token_id
        for token, token_id in token_ids.items()
        if len(token.strip()) >= _TOKEN_LEN_MIN and any(token in text for text in texts)
    }
    if len(found) > MARKS_MAX:
        raise BadFormat(f"more than {MARKS_MAX} tokens of the tokenizer are markers")
    return replace(format_, token_ids=found)
