"""The session that a request belongs to, by the key that its caller gives.

Agents send many requests for one task, and say which belong together: in a header that every request of the
session has, or in the field `prompt_cache_key`. Rules:

1. A key is a name and no identity: nobody is let in, charged or limited by it. Tenants that give the same
   key have different sessions.
2. A session is told, to operators and to engines, by a hash of tenant and key: a key is the caller's own
   text, and may hold an address or a name. Who knows the tenant and guesses the key can check the guess.
3. Of several keys the header's counts, in the order of `SESSION_HEADERS`, then the field's: applications
   give one `prompt_cache_key` to many conversations, agents' headers are of one session each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.routing.maglev import key_of
from shared.apis.generation import GenerationRequest
from shared.wire.ids import SessionId

SESSION_HEADERS: Final = (
    "x-session-affinity",  # opencode
    "session-id",  # Codex
    "x-claude-code-session-id",
    "x-session-id",
)
KEY_LEN_MAX: Final = 1024
"""Characters of a key that count. Those that agents send have 30 to 40."""


def session_of(headers: Mapping[str, str], request: GenerationRequest, tenant: str) -> SessionId | None:
    """The session of a tenant's request. None where the caller gives no key."""
    key: str | None
    for name in SESSION_HEADERS:
        if name in headers and (key := headers[name]):
            break
    else:
        if not (key := request.prompt_cache_key):
            return None
    return session_id(tenant, key)


def session_id(tenant: str, key: str) -> SessionId:
    """The hash of the session that a tenant names by this key."""
    text = key[:KEY_LEN_MAX].encode(errors="surrogateescape")  # of a header that is not UTF-8
    return SessionId(f"{key_of(tenant.encode(), text):016x}")
