"""The ranking of documents by their relevance to a query, as Jina and Cohere have it and vLLM answers it:
`/v1/rerank`, and the same at `/rerank` and at `/v2/rerank`. Nothing is generated: a request costs the tokens
of its query, once, and of its documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from shared.apis.generation import GenerationRequest, PromptTokensDetails
from shared.apis.nothing import EMPTY, LOOKED_INTO, NONE, Nothing
from shared.apis.prompt import RerankPrompt
from shared.apis.validation import surplus_fields
from shared.wire.errors import InvalidRequest
from shared.wire.shapes import TOKENS_MAX, Unshown

DOCUMENTS_MAX: Final = 2048
"""The most documents of a request, as Jina has it."""
_items: Final = msgspec.json.Decoder(list[Raw]).decode


class GivenDocument(Unshown):
    text: str


class RerankRequest(GenerationRequest, kw_only=True):
    path: ClassVar[str] = "/v1/rerank"
    operation: ClassVar[str] = "rerank"
    prompt_param: ClassVar[str] = "documents"
    prompt_beside: ClassVar[frozenset[str]] = frozenset({"query", "instruction"})
    answers: ClassVar[bool] = False
    ability: ClassVar[str] = "reranking"
    nothing: ClassVar[Mapping[str, Nothing]] = {
        **dict.fromkeys(("rank_fields", "max_chunks_per_doc", "instruct", "truncate"), NONE),
        **dict.fromkeys(("chat_template_kwargs", "mm_processor_kwargs"), EMPTY),
        **dict.fromkeys(("use_activation", "activation"), (True,)),
        "max_tokens_per_query": (0,),
        "documents": LOOKED_INTO,
    }
    instead: ClassVar[Mapping[str, str]] = {
        "instruct": "instruction",
        "max_chunks_per_doc": "max_tokens_per_doc",
        "truncate": "truncate_prompt_tokens",
    }

    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[str | GivenDocument], Meta(min_length=1, max_length=DOCUMENTS_MAX)]
    """Texts, or objects with a `text`."""
    top_n: Annotated[int, Meta(ge=0, le=TOKENS_MAX)] | None = None
    """The number of documents that are answered, the most relevant ones; 0 for all."""
    return_documents: bool | None = None
    """False to leave the documents out of the answer."""
    instruction: Annotated[str, Meta(min_length=1)] | None = None
    """vLLM's: what makes a document relevant."""
    max_tokens_per_doc: Annotated[int, Meta(ge=0, le=TOKENS_MAX)] | None = None
    """The tokens that each document is cut to; 0 for none that is cut."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=TOKENS_MAX)] | None = None
    """vLLM's: the tokens that each prompt, a query with its document, is cut to at the document's end; -1 for
    as many as the model takes. Without it, one that is too long is an error."""
    user: str | None = None

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]

    @property
    def prompt_form(self) -> RerankPrompt:
        return RerankPrompt(
            self.query,
            self.texts,
            self.instruction,
            self.max_tokens_per_doc or None,
            self.truncate_prompt_tokens,
        )

    def check(self, fields: Mapping[str, Raw]) -> None:
        if self.stream:
            raise InvalidRequest("A ranking is not streamed.", param="stream")
        if self.truncate_prompt_tokens == 0:
            param = "truncate_prompt_tokens"
            raise InvalidRequest(f"{param} must be -1, or at least 1.", param=param)
        for index, text in enumerate(self.texts):
            if not text:
                raise InvalidRequest(f"documents[{index}] must not be empty.", param=f"documents[{index}]")

    def unknown_within(self, fields: Mapping[str, Raw]) -> list[str]:
        found: dict[str, None] = {}
        for index, (one, raw) in enumerate(zip(self.documents, _items(fields["documents"]), strict=True)):
            if isinstance(one, GivenDocument):
                found |= dict.fromkeys(surplus_fields(one, raw, f"documents[{index}]", "documents"))
        return [*found]


class RootRerankRequest(RerankRequest, kw_only=True):
    path: ClassVar[str] = "/rerank"


class RerankV2Request(RerankRequest, kw_only=True):
    path: ClassVar[str] = "/v2/rerank"


RERANKING: Final = (RerankRequest, RootRerankRequest, RerankV2Request)
"""One API at several paths."""


class RankedDocument(Unshown):
    text: str


class RerankResult(Unshown):
    index: int
    """The place of the document in the request."""
    relevance_score: float
    """From 0 to 1."""
    document: RankedDocument | UnsetType = UNSET


class RerankUsage(Struct):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class RerankAnswer(Unshown):
    id: str
    model: str
    results: list[RerankResult]
    """The most relevant document first."""
    usage: RerankUsage
