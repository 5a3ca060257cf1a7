"""The APIs by which requests come. A further one is a module beside this one, and a line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from shared.apis.chat import ChatRequest
from shared.apis.completions import CompletionRequest
from shared.apis.generation import GenerationRequest
from shared.apis.request import Request
from shared.apis.tokenize import DetokenizeRequest, TokenizeRequest

GENERATING: Final[tuple[type[GenerationRequest], ...]] = (ChatRequest, CompletionRequest)
"""Those whose requests generate tokens."""
REQUESTS: Final[tuple[type[Request], ...]] = (*GENERATING, TokenizeRequest, DetokenizeRequest)
"""The requests that the gateway passes on to engines."""
OPERATIONS: Final[Mapping[str, str]] = {kind.path: kind.operation for kind in GENERATING}
"""The operation of each path that generates, as spans name it."""
