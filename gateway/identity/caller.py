"""A caller before it is named, and the seam behind which it is named."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Mapping
from typing import Final, Protocol

from msgspec import Struct

from gateway.config.quotas import ModelLimits, QuotaLimits
from gateway.config.whole import ALL_ENDPOINTS, Tier
from shared.wire.ids import KeyId, TenantId

V6_NETWORK_LEN: Final = 8
"""Bytes of an IPv6 address that tell the network."""
Revoked = frozenset[tuple[bytes, int]]
"""Certificates that are revoked: their issuers' names in DER, and their serial numbers."""


def authorization_of(headers: Mapping[str, str]) -> str | None:
    """What the headers of a request show of its caller: `Authorization`, or an `x-api-key` as the same. Where
    both are sent the first one counts."""
    shown = headers.get("authorization")
    if shown is None and (key := headers.get("x-api-key")) is not None:
        return f"Bearer {key}"
    return shown


class Caller(Struct, frozen=True):
    """One request's claims about who sends it."""

    authorization: str | None
    """What `authorization_of` its headers is; None without any."""
    transport: asyncio.BaseTransport | None
    """The connection; None where it is broken already."""
    served: str = ""
    """The tenant whose request the connection served last; empty where there was none."""

    def whose(self) -> str:
        """The name under which a caller that is not identified yet has its share: the tenant that its
        connection served last, else its address."""
        peer = None if self.transport is None else self.transport.get_extra_info("peername")
        return self.served or network_of(str(peer[0]) if isinstance(peer, tuple) else "")

    @property
    def certificate(self) -> bytes | None:
        """The client's certificate in DER, which the handshake has verified; None where there is none."""
        if self.transport is None:
            return None
        tls: ssl.SSLObject | None = self.transport.get_extra_info("ssl_object")
        return None if tls is None else tls.getpeercert(binary_form=True)


class Principal(Struct, frozen=True, eq=False, gc=False):
    """Who calls. Equal to itself alone: what is worked out for one is not another's, though they share a
    key.

    The garbage collector passes it over, since nothing in it leads back to it: to walk through those of
    100,000 keys would hold up every stream.
    """

    key: KeyId
    tenant: TenantId
    models: tuple[str, ...]
    """The names of the tenant's models that the key may use; `*` is all."""
    limits: QuotaLimits
    """The key's own, beside its tenant's."""
    service_tier: Tier | None = None
    """The highest tier of its requests, where it is below the tenant's; None leaves the tenant's."""
    endpoints: tuple[str, ...] = ALL_ENDPOINTS
    """The endpoints (`gateway.endpoints.routes.SCOPES`) that it may use; `*` is all."""
    model_limits: tuple[ModelLimits, ...] = ()
    """The key's own limits for single models."""


class Identity(Protocol):
    """Names callers: by a table of keys, by tokens that somebody else has signed, by certificates."""

    def identify(self, caller: Caller, now_s: float) -> Awaitable[Principal]:
        """`now_s`: seconds of the wall clock. Where there is nothing to wait for the answer is a
        `shield.Done`; any other is bounded in time by the caller of this. Raises Unauthenticated."""
        ...


def network_of(host: str) -> str:
    """A name of the address of whoever connects, unlike any tenant's: of IPv6 the network of 64 bits, which
    one caller may have to itself."""
    if ":" in host and not host.startswith("::ffff:"):
        host = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:V6_NETWORK_LEN].hex()
    return f"from {host}"
