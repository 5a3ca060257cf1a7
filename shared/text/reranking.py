"""The prompts of models that rank documents by their relevance to a query, and the tokens by which they do.

A model is asked whether a document meets a query, and says yes or no: the document's relevance is the
probability of yes, of the two. All prompts of a request begin alike, with the instruction and the query; what
follows is the document, and what ends the question.

Rules:

1. The ids of a prompt are those of the beginning, of the document and of the end, one behind the other. The
   document begins with the space that stands before it, so they are the ids of the whole text as well:
   tokenizers of the families below cut there.
2. Which format a model has is said by its operator or its files (`engine.api.ask.rerankers`). It travels with
   the tokenizer, so that both services write the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

JUDGE: Final = 'Note that the answer can only be "yes" or "no".'
"""Words by which a chat template of such a model is known."""


@dataclass(frozen=True, slots=True)
class RerankFormat:
    """The words around instruction, query and document."""

    before: str
    default_instruction: str
    behind: str
    false: str
    """The token that says that a document is not relevant."""
    true: str

    def beginning(self, instruction: str | None, query: str) -> str:
        """The text with which all prompts of a request begin."""
        asked = self.default_instruction if instruction is None else instruction
        return f"{self.before}<Instruct>: {asked}\n<Query>: {query}\n<Document>:"


FORMATS: Final[Mapping[str, RerankFormat]] = {
    "qwen3": RerankFormat(
        before="<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
        f"the Instruct provided. {JUDGE}<|im_end|>\n<|im_start|>user\n",
        default_instruction="Given a web search query, retrieve relevant passages that answer the query",
        behind="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        false="no",
        true="yes",
    ),
}
"""The formats by their names, as https://huggingface.co/Qwen/Qwen3-Reranker-0.6B states its own."""


@dataclass(frozen=True, slots=True)
class Reranking:
    """A format in the tokens of one model."""

    format: RerankFormat
    behind: list[int]
    """The ids behind a document."""
    scored: list[int]
    """The tokens that say no and yes."""

    @classmethod
    def of(
        cls, name: str, id_of: Callable[[str], int | None], encode: Callable[[str], list[int]]
    ) -> Reranking:
        """Raises ValueError where there is no such format, or the tokenizer lacks a token of it."""
        format_ = FORMATS.get(name)
        if format_ is None:
            raise ValueError(f"there is no format {name!r} of rerankers")
        ids = {text: id_of(text) for text in (format_.false, format_.true)}
        scored = [token_id for token_id in ids.values() if token_id is not None]
        if len(scored) < len(ids):
            raise ValueError(f"it has no tokens for {' and '.join(ids)}, by which a reranker answers")
        return cls(format_, encode(format_.behind), scored)
