"""Rankings' answers: the documents in the order of their relevance, with the probability of each that it is
relevant."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from msgspec import UNSET, Raw, Struct

from engine.api.answer.encoder import Answered, Heading, Unstreamed, Vocabulary, encode, filled
from engine.api.answer.outputs import Delta
from shared.apis.generation import PromptTokensDetails, Usage
from shared.apis.rerank import RankedDocument, RerankAnswer, RerankRequest, RerankResult, RerankUsage

TEXT_COPIES = 3
"""The copies of a document's text that an answer holds: as it is held, as JSON, and in the piece that is
written."""
RESULT_LEN = 128
"""Bytes of a result beside its document."""


class RankedRequest(Struct, frozen=True):
    """The part of a request that its answer needs."""

    documents: Sequence[str] | None
    """None where they are not answered."""
    first: int | None
    """The number of documents that are answered. None for all."""
    held_len: int

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


def ranked(request: RerankRequest, _fields: Mapping[str, Raw]) -> RankedRequest:
    texts = None if request.return_documents is False else request.texts
    text_len = sum(4 * len(text) for text in texts or ())
    held_len = TEXT_COPIES * text_len + RESULT_LEN * len(request.documents)
    return RankedRequest(texts, request.top_n or None, held_len)


class RerankEncoder(Unstreamed):
    def __init__(self, heading: Heading, vocabulary: Vocabulary, answered: Answered) -> None:
        assert isinstance(answered.repeated, RankedRequest)
        self._id, self._model = heading.id, heading.model
        self._outputs, self._asked = answered.scored, answered.repeated

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> Iterator[bytes]:
        relevance = [relevance_of(output.scores) for output in self._outputs]
        order = sorted(range(len(relevance)), key=lambda index: -relevance[index])
        told = RerankUsage(
            usage.prompt_tokens,
            usage.prompt_tokens,
            PromptTokensDetails(usage.prompt_tokens_details.cached_tokens),
        )
        answer = RerankAnswer(self._id, self._model, [], told)
        results = ([self._result(index, relevance[index])] for index in order[: self._asked.first])
        return filled(answer, b'"results":[', results)

    def _result(self, index: int, relevance: float) -> bytes:
        documents = self._asked.documents
        document = UNSET if documents is None else RankedDocument(documents[index])
        return encode(RerankResult(index, relevance, document))


def relevance_of(scores: Sequence[float]) -> float:
    """The probability of yes, of the two, from the log-probabilities of no and yes."""
    no, yes = scores
    return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))
