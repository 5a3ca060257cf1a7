"""The endpoints by path. A further API is a module beside this one, and a line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.endpoints.chat import CHAT
from gateway.endpoints.completions import COMPLETIONS
from gateway.endpoints.endpoint import Endpoint
from gateway.endpoints.tokenize import DETOKENIZE, TOKENIZE

ENDPOINTS: Final[Mapping[str, Endpoint]] = {
    endpoint.path: endpoint for endpoint in (CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE)
}
