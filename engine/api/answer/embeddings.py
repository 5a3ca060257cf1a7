"""Embeddings' answers: a vector for each input, as numbers or in base64."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Sequence

from engine.api.answer.encoder import Answered, Heading, Unstreamed, Vocabulary, encode, filled
from engine.api.answer.outputs import Delta
from shared.apis.embeddings import Embedding, Embeddings, EmbeddingsUsage
from shared.apis.generation import Usage


class EmbeddingsEncoder(Unstreamed):
    def __init__(self, heading: Heading, vocabulary: Vocabulary, answered: Answered) -> None:
        self._model = heading.model
        self._outputs = answered.scored
        self._in_base64 = answered.in_base64

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> Iterator[bytes]:
        told = Embeddings([], self._model, EmbeddingsUsage(usage.prompt_tokens, usage.total_tokens))
        return filled(told, b'"data":[', ([encode(self._item(delta.index))] for delta in deltas))

    def _item(self, index: int) -> Embedding:
        return Embedding(index, self._told(self._outputs[index].vector))

    def _told(self, vector: bytes) -> list[float] | str:
        if self._in_base64:
            return base64.b64encode(vector).decode()
        return list(struct.unpack(f"<{len(vector) // 4}f", vector))
