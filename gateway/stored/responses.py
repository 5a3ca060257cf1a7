"""A response that is kept, and what keeps them (`memory`, `redis`): the same for each, and tested as one.

Rules

1. A response is kept for its tenant, and found by that tenant's callers alone: the tenant is part of where it
   is, so that an id of another's is one that there is not.
2. What is kept of it is its own: the input that came with it, and its output. The conversation before it is
   that of the response that it goes on with (`previous`), so a long one is kept once, and a response that is
   deleted is gone, behind others too.
3. It is kept for so long since it was put, or since another was that goes on with it, however far behind.
4. A tenant's are bounded in bytes. Where there is no room for one more, those go that were used longest ago:
   its own, and never another tenant's.
5. Nothing is half kept: an operation is done whole, or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from msgspec import Struct

from gateway.config.responses import ResponsesConfig
from shared.process.metrics import Counter
from shared.wire.errors import ResponsesUnavailable
from shared.wire.ids import TenantId

OVERHEAD_LEN: Final = 1024
"""Bytes that a response takes beside its text, at most."""
LINKS_MAX: Final = 512
"""Responses that one may go on with, one behind the other."""
PAGE_LEN: Final = 1024 * 1024
"""Bytes of a page of a conversation: as many, and the rest of the response in which they are reached."""
FORGOTTEN_AT_ONCE: Final = 256
"""Responses that one call deletes."""

EVICTED: Final = Counter(
    "penstock_gateway_responses_evicted",
    "Responses that were kept, and went before their time because their tenant had no room for another.",
)


class _Unshown(Struct, frozen=True):
    """A base of what holds text of prompts and answers: none of it is in their `repr`."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


class KeptResponse(_Unshown, frozen=True):
    """A response that is kept, each part as JSON."""

    id: str
    previous: str
    """The id of the response that it goes on with. Empty for none."""
    head: bytes
    """The response without its output."""
    output: bytes
    """The items that it answered with."""
    items: bytes
    """The items of its own input."""
    last_number: int = 0
    """The number of the last event of its stream. 0 for one that was no stream."""

    @property
    def size(self) -> int:
        """Bytes that it counts as."""
        return len(self.head) + len(self.output) + len(self.items) + OVERHEAD_LEN

    @property
    def response(self) -> bytes:
        """The response as it was answered."""
        return b'%b,"output":%b}' % (self.head[:-1], self.output)


class KeptTurn(_Unshown, frozen=True):
    """A response's part of a conversation: items as JSON."""

    id: str
    items: bytes
    output: bytes


class TurnsPage(_Unshown, frozen=True):
    """A part of a conversation, its latest turn first."""

    turns: Sequence[KeptTurn]
    before: str = ""
    """The response where it goes on. Empty where it began, or where the next is not kept any more."""
    lost: str = ""
    """The response that is not kept any more. Empty where none is missing."""


class NoRoom(Exception):
    """There is no room for the response, and nothing of its tenant's that could go."""


class ResponseStore(Protocol):
    """What keeps responses. Every call raises ResponsesUnavailable where that cannot be asked."""

    async def put(self, tenant: TenantId, kept: KeptResponse) -> None:
        """Keep a response, in place of one of its id. Raises NoRoom."""
        ...

    async def get(self, tenant: TenantId, id_: str) -> KeptResponse | None: ...

    async def turns(self, tenant: TenantId, id_: str) -> TurnsPage:
        """The conversation that ends with a response, about `PAGE_LEN` bytes of it."""
        ...

    async def delete(self, tenant: TenantId, id_: str) -> bool:
        """Delete a response. Returns whether it was there."""
        ...

    async def forget(self, tenant: TenantId) -> int:
        """Delete all of a tenant's responses. Returns how many there were."""
        ...

    async def begin(self) -> None:
        """Connect, if that can be done. Before this, every call may raise ResponsesUnavailable."""
        ...

    async def watch(self) -> None:
        """Do what there is to do beside calls, until cancelled."""
        ...

    async def aclose(self) -> None: ...


def unavailable(detail: str) -> ResponsesUnavailable:
    message = "Responses that are kept cannot be asked for at the moment."
    return ResponsesUnavailable(message, detail=detail, retry_after_s=1.0)


class KeepingBounds(Struct, frozen=True):
    """How much is kept, and for how long."""

    ttl_ms: int
    tenant_len_max: int

    @classmethod
    def of(cls, config: ResponsesConfig) -> KeepingBounds:
        # a response of the greatest length is kept with what it takes beside its text
        room = max(config.tenant_len_max, config.response_len_max + OVERHEAD_LEN)
        return cls(round(config.ttl_s * 1000), room)
