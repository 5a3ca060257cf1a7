"""The ranking of documents at the gateway, as Jina and Cohere have it."""

from __future__ import annotations

from typing import Final

from gateway.endpoints.endpoint import Endpoint
from shared.apis.rerank import RERANKING, RerankAnswer

_PASSES: Final = frozenset(
    {
        *(
            "model",
            "query",
            "documents",
            "top_n",
            "return_documents",
            "max_tokens_per_doc",
        ),  # Jina's, Cohere's
        *("truncate_prompt_tokens", "instruction", "user"),  # vLLM's
    }
)

RERANK: Final = tuple(
    Endpoint(
        shape=shape,
        answer=RerankAnswer,
        summary="Rank documents by their relevance to a query.",
        passes=_PASSES,
        is_optional=True,
        maxima=(),
        nested=(),
    )
    for shape in RERANKING
)
"""The endpoint at each of its paths."""
