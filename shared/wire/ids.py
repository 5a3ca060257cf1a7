"""Identifiers, and the headers that carry them over the hop.

A `RequestId` is minted at the edge (or accepted from the caller when it is well formed) and joins
the logs of both services. It is a name for people and logs: nothing trusts it to be unique.
"""

from __future__ import annotations

import random
import re
import secrets
from typing import Final, NewType

RequestId = NewType("RequestId", str)
TenantId = NewType("TenantId", str)
KeyId = NewType("KeyId", str)
ReplicaId = NewType("ReplicaId", str)
SessionId = NewType("SessionId", str)
"""A hash that stands for a session of a tenant's: 16 hexadecimal digits."""

REQUEST_ID_HEADER: Final = "x-request-id"
TENANT_HEADER: Final = "x-penstock-tenant"
SERVICE_TIER_HEADER: Final = "x-penstock-service-tier"
"""The highest service tier that the tenant may have; the engine takes the lower of this and what is asked."""
SESSION_HEADER: Final = "x-penstock-session"
"""The `SessionId` of the session that the request belongs to. Absent where the caller names none."""
REQUEST_TIMEOUT_HEADER: Final = "x-request-timeout"
"""The caller's own bound on the whole request, in seconds."""
QUEUE_TIMEOUT_HEADER: Final = "x-queue-timeout"
"""The caller's own bound on waiting for the engine to begin, in seconds."""
FIRST_TOKEN_TIMEOUT_HEADER: Final = "x-penstock-first-token-timeout-ms"  # noqa: S105 -- a header, not a secret
"""The time after which the gateway gives up waiting for the first token, in whole milliseconds."""
TOKENIZER_HEADER: Final = "x-penstock-tokenizer"
"""The hash of the tokenizer that the engine serves with, in every answer of it."""
FALLBACK_HEADER: Final = "x-penstock-fallback"
"""The model that answered in place of the one that was asked for, in an answer."""
IGNORED_FIELDS_HEADER: Final = "x-penstock-ignored-fields"
RETRY_HEADER: Final = "x-stainless-retry-count"
"""The number of tries of the same request before this one, as OpenAI's and Anthropic's SDKs count them."""
IDEMPOTENCY_HEADER: Final = "idempotency-key"
"""The header that all tries of a request have in common, where its caller sends one."""
TRACEPARENT_HEADER: Final = "traceparent"
TRACESTATE_HEADER: Final = "tracestate"

_WELL_FORMED: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


random_bits: Final = random.Random(secrets.randbits(256)).getrandbits
"""A source of random bits for ids that need to differ, not to be secret; asking the kernel for each costs
three times as much."""


def mint_request_id() -> RequestId:
    """A new id: `req_` and 128 random bits."""
    return RequestId(f"req_{random_bits(128):032x}")


def is_id(text: str) -> bool:
    """True if the text may be an id of a request, a tenant or a key: 1 to 64 of `A-Za-z0-9._-`."""
    return _WELL_FORMED.fullmatch(text) is not None


def accept_request_id(value: str | None) -> RequestId:
    """The caller's id when it is well formed, else a new one."""
    if value is not None and _WELL_FORMED.fullmatch(value):
        return RequestId(value)
    return mint_request_id()
