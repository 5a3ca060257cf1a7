"""OpenAI's completions at the gateway."""

from __future__ import annotations

from typing import Final

from gateway.endpoints.endpoint import Endpoint
from gateway.endpoints.passing import EXTENSIONS, OPENAI
from shared.apis.completions import Completion, CompletionRequest

OPENAI_COMPLETION: Final = OPENAI | {"prompt", "best_of", "echo", "suffix"}
"""The fields of https://platform.openai.com/docs/api-reference/completions/create."""

COMPLETIONS: Final = Endpoint(
    shape=CompletionRequest,
    answer=Completion,
    summary="Complete prompts.",
    event=Completion,
    passes=OPENAI_COMPLETION | EXTENSIONS,
)
