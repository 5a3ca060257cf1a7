"""The list of models, as OpenAI has it, and as Anthropic has it for who names its API's version in a header.

What clients read beside a name has several names among them: the context's length is `max_model_len` to
vLLM's and `context_length` to OpenRouter's.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, Literal, Self

from msgspec import UNSET, Struct, UnsetType

from shared.apis.embeddings import EmbeddingsRequest
from shared.apis.generation import GenerationRequest
from shared.wire.errors import PathNotServed
from shared.wire.room import Room

_CREATED_END: Final = 253_402_300_800
"""The first second of the year 10,000."""
VERSION_HEADER: Final = "anthropic-version"
"""The header of a request that is to be answered as Anthropic does."""


class Capabilities(Struct, frozen=True):
    """The abilities of a model, as its engine knows them."""

    tools: bool
    """True if it can call tools."""
    reasoning: bool
    """True if it marks its reasoning, which is then told apart."""
    structured_output: bool
    """True if answers can be held to a schema."""
    effort: bool = False
    """True if its chat template reads `reasoning_effort`."""
    embeddings: bool = False
    """True if it makes vectors of texts."""
    generation: bool = True
    """True if it generates."""
    reranking: bool = False
    """True if it ranks documents by their relevance to a query."""
    decisions: bool = False
    """True if it decides questions about an input."""

    def check(self, request: GenerationRequest) -> None:
        """Raises PathNotServed for a request of an API that the model does not serve."""
        if not getattr(self, request.ability):
            raise PathNotServed(_LACKS[request.ability])


_LACKS: Final[Mapping[str, str]] = {
    "generation": f"This model makes vectors of texts, at {EmbeddingsRequest.path}, alone.",
    "embeddings": "This model computes no embeddings.",
    "decisions": "This model decides nothing: it has no chat template, no labels, or reasons first.",
    "reranking": "This model is no reranker: it ranks no documents.",
}
"""The words for the lack of each ability that an API needs."""


class Model(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "penstock"
    max_model_len: int | None = None
    """The most tokens that a prompt and its answer may have together."""
    context_length: int | None = None
    """`max_model_len` by another name."""
    context_len: int | UnsetType = UNSET
    """The tokens that the model's context holds, where the engine's KV cache holds fewer. Left out where
    `max_model_len` is that number."""
    capabilities: Capabilities | UnsetType = UNSET
    """The abilities of the model. Left out where they are not known."""

    @classmethod
    def of(cls, name: str, created: int, room: Room | None, capabilities: Capabilities | None = None) -> Self:
        """The model as it is listed. `room` is None while that is unknown, and so are `capabilities`."""
        told = UNSET if capabilities is None else capabilities
        if room is None:
            return cls(id=name, created=created, capabilities=told)
        most = room.most
        return cls(
            id=name,
            created=created,
            max_model_len=most,
            context_length=most,
            context_len=room.context_len if most < room.context_len else UNSET,
            capabilities=told,
        )


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


# -- Anthropic's ----------------------------------------------------------------------------------


class ModelInfo(Struct, tag_field="type", tag="model", kw_only=True):
    """A model, as Anthropic describes one."""

    id: str
    display_name: str
    created_at: str
    """RFC 3339."""
    max_input_tokens: int | None
    max_tokens: int | None
    capabilities: dict[str, object] | None
    """The abilities of the model, each with `supported`. None where they are not known."""
    lifecycle: Literal["active"] = "active"
    deprecated_at: None = None
    retires_at: None = None
    line: None = None

    @classmethod
    def of(cls, model: Model) -> Self:
        is_date = 0 <= model.created < _CREATED_END  # an engine of another make may tell any number
        at = datetime.fromtimestamp(model.created if is_date else 0, UTC).isoformat(timespec="seconds")
        told = model.capabilities
        return cls(
            id=model.id,
            display_name=model.id,
            created_at=at.replace("+00:00", "Z"),
            max_input_tokens=model.max_model_len,
            max_tokens=model.max_model_len,
            capabilities=None if isinstance(told, UnsetType) else _abilities(told),
        )


def _abilities(told: Capabilities) -> dict[str, object]:
    no, thinks = _support(False), _support(told.reasoning)
    edits = "clear_thinking_20251015", "clear_tool_uses_20250919", "compact_20260112"
    thinking = {"adaptive": thinks, "between_tools": no, "disabled": _support(True), "enabled": thinks}
    efforts = dict.fromkeys(("low", "medium", "high", "xhigh", "max"), _support(told.effort))
    return {
        **dict.fromkeys(("batch", "citations", "code_execution", "image_input", "pdf_input"), no),
        "context_management": no | dict.fromkeys(edits, no),
        "effort": _support(told.effort) | efforts,
        "server_tools": no | dict.fromkeys(("code_execution", "web_search"), no),
        "structured_outputs": _support(told.structured_output),
        "thinking": thinks | {"types": thinking},
    }


def _support(is_supported: bool) -> dict[str, object]:
    return {"supported": is_supported}


class ModelInfoList(Struct, kw_only=True):
    """All models, in one page."""

    data: list[ModelInfo]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None

    @classmethod
    def of(cls, models: list[Model]) -> Self:
        ids: list[str | None] = [model.id for model in models]
        ids = ids or [None]
        return cls(data=[*map(ModelInfo.of, models)], first_id=ids[0], last_id=ids[-1])
