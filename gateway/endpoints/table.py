"""The endpoints by path, made ready before the first request. A further API is a module beside this one, and
a line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Final

from gateway.endpoints.chat import CHAT
from gateway.endpoints.completions import COMPLETIONS
from gateway.endpoints.decisions import DECISIONS
from gateway.endpoints.embeddings import EMBEDDINGS
from gateway.endpoints.endpoint import Endpoint
from gateway.endpoints.messages import COUNT_TOKENS, MESSAGES
from gateway.endpoints.rerank import RERANK
from gateway.endpoints.responses import INPUT_TOKENS, RESPONSES
from gateway.endpoints.tokenize import DETOKENIZE, TOKENIZE
from shared.apis.request import Request
from shared.apis.validation import parse
from shared.wire.errors import InvalidRequest

ENDPOINTS: Final[Mapping[str, Endpoint]] = {
    endpoint.path: endpoint
    for endpoint in (
        *(CHAT, COMPLETIONS, RESPONSES, INPUT_TOKENS, MESSAGES, COUNT_TOKENS),
        *(EMBEDDINGS, TOKENIZE, DETOKENIZE),
        *(*RERANK, DECISIONS),
    )
}


def warm(types: Iterable[type[Request]]) -> None:
    """Build the decoders of these types. The first one takes some 20 ms, which no request should wait for."""
    for type_ in types:
        with contextlib.suppress(InvalidRequest):
            parse(b"{}", type_)
