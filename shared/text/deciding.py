"""The prompts of decisions, and the tokens by which a chat model decides: how a question about an input is
asked, so that its answer is the first token behind the prompt.

    <the template's beginning>  input  \\n\\n  | question, its options with labels  <the template's end>
    `------------- what all questions share ------------' `---------------- a question's own -------------'

Each option has a label, which is one token. The probability of an option is that of its label among the
labels of its question.

Rules

1. All that the input says stands in one turn of the user's, as evidence: the roles of a conversation are
   words there. So a prompt is the same in every template, no template refuses the order of turns, and nothing
   in the input speaks as the system. vLLM 0.33 puts the texts of an input into one turn, too; SGLang 0.5.23
   takes texts alone.
2. An answer's labels are the words that a model says by itself: Yes and No for a predicate (SGLang's; vLLM
   has letters there), the level's number for a score (SGLang's), capital letters for choices (both). Both
   have 26 choices at most; behind the letters come pairs of letters here, as far as a tokenizer has tokens
   for them, up to OpenAI's 255. A question with more choices than labels is refused.
3. A label must be one token behind the template's end, and another than its neighbours'. Where words are not,
   others are taken (`_PREDICATES`, `_LEVELS`).
4. The template is told not to think (`THINKS_NOT`). One that opens its reasoning all the same decides
   nothing, which the engine finds out (`engine.api.ask.model`).
5. The words are a part of the format: a change of them changes what models decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any, Final

from msgspec import Struct

from shared.apis.decisions import CHOICES_MAX
from shared.apis.prompt import AskedQuestion, QuestionKind

MARK: Final = "PENSTOCK-QUESTION"
"""Stands in a rendered chat where the question goes."""
THINKS_NOT: Final[Mapping[str, Any]] = {"enable_thinking": False, "thinking": False}
"""The variables by which templates are told not to think."""

_PREDICATES: Final = (("No", "Yes"), ("no", "yes"), ("N", "Y"), ("0", "1"))
_LEVELS: Final = (tuple(digits), tuple(ascii_uppercase[:10]))


def _choice_labels() -> Iterator[str]:
    """The labels that choices may have, in their order."""
    yield from ascii_uppercase
    yield from map("".join, product(ascii_uppercase, repeat=2))
    yield from map("".join, product(ascii_uppercase, ascii_lowercase))
    yield from ascii_lowercase
    yield from digits


class Labels(Struct, frozen=True):
    """The labels of one kind of question, and their tokens."""

    texts: tuple[str, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Deciding:
    """The way in which one model decides."""

    behind: str
    """The text that its template writes behind a question."""
    labels: Mapping[QuestionKind, Labels]

    @classmethod
    def of(cls, render: Callable[[str], str], encode: Callable[[str], list[int]]) -> Deciding:
        """`render` writes a chat in which a question, `MARK`, is asked about an input. Raises ValueError, in
        words for the operator."""
        _, mark, behind = render("x").rpartition(MARK)
        if not mark:
            raise ValueError("its chat template does not write a user's text as it is")
        before = encode(behind)

        def id_of(label: str) -> int | None:
            """The token that a label adds. None where it is not one."""
            ids = encode(f"{behind}{label}")
            return ids[-1] if ids[:-1] == before else None

        labels = {
            QuestionKind.PREDICATE: _first_of(_PREDICATES, id_of),
            QuestionKind.SCORE: _first_of(_LEVELS, id_of),
            QuestionKind.CHOICE: _all_of(_choice_labels(), id_of),
        }
        return cls(behind, labels)

    def text(self, asked: AskedQuestion) -> str:
        """A question's own part of its prompt."""
        return f"{_question(asked, self.labels[asked.kind].texts)}{self.behind}"

    def scored(self, asked: AskedQuestion) -> list[int]:
        """The tokens of its labels, in the order of its options; of a predicate those of No and Yes."""
        return list(self.labels[asked.kind].ids[: len(asked.options) or 2])


def _question(asked: AskedQuestion, labels: Sequence[str]) -> str:
    if asked.kind is QuestionKind.PREDICATE:
        no, yes = labels
        return f"Is the following true? {asked.instructions}\nAnswer with {yes} or {no} only."
    options = [
        f"{label}: {option.name} - {option.description}" if option.description else f"{label}: {option.name}"
        for label, option in zip(labels, asked.options, strict=False)
    ]
    of_one = "level" if asked.kind is QuestionKind.SCORE else "option"
    what = f"{'number' if labels[0].isdigit() else 'letter'} of one {of_one}"
    return "\n".join((f"Question: {asked.instructions}", *options, f"Answer with the {what} only."))


def _first_of(candidates: Sequence[Sequence[str]], id_of: Callable[[str], int | None]) -> Labels:
    """The first of several sets of labels that has a token for each."""
    for texts in candidates:
        ids = [id_of(text) for text in texts]
        known = [token_id for token_id in ids if token_id is not None]
        if len(known) == len(set(known)) == len(texts):
            return Labels(tuple(texts), tuple(known))
    raise ValueError(f"its tokenizer has no single tokens for {' and '.join(candidates[0])}")


def _all_of(texts: Iterator[str], id_of: Callable[[str], int | None]) -> Labels:
    """Labels, as many as there are tokens for."""
    found: dict[int, str] = {}
    for text in texts:
        token_id = id_of(text)
        if token_id is not None and token_id not in found:
            found[token_id] = text
        if len(found) == CHOICES_MAX:
            break
    if len(found) < 2:
        raise ValueError("its tokenizer has no single tokens for letters")
    return Labels(tuple(found.values()), tuple(found))
