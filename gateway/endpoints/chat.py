"""OpenAI's chat at the gateway."""

from __future__ import annotations

from typing import Final

from gateway.endpoints.endpoint import Endpoint
from gateway.endpoints.passing import EXTENSIONS, NESTED, OPENAI, shaped_prediction, shaped_tools
from shared.apis.chat import ChatChunk, ChatCompletion, ChatRequest
from shared.apis.generation import GenerationRequest

OPENAI_CHAT: Final = OPENAI | {
    *("messages", "audio", "function_call", "functions", "metadata", "modalities", "moderation"),
    *("parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "reasoning_effort", "response_format", "safety_identifier", "store"),
    *("tool_choice", "tools", "top_logprobs", "verbosity", "web_search_options"),
}
"""The fields of https://platform.openai.com/docs/api-reference/chat/create, the deprecated ones too."""
WITHHELD: Final = frozenset(
    {
        *("audio", "modalities", "moderation", "store", "web_search_options"),
        *("prompt_cache_options", "prompt_cache_retention"),
    }
)
"""Those of them that are not sent: they keep a request or send it elsewhere, or cost what nobody counts."""


class _Chat(Endpoint, frozen=True):
    def maximum_param(self, request: GenerationRequest, configured: str) -> str:
        return request.max_tokens_param if configured == "asked" else configured


CHAT: Final = _Chat(
    shape=ChatRequest,
    answer=ChatCompletion,
    summary="Answer a chat.",
    event=ChatChunk,
    passes=(OPENAI_CHAT - WITHHELD) | EXTENSIONS,
    nested=(("tools", shaped_tools), ("prediction", shaped_prediction), *NESTED),
)
