"""The callers that were let in of late, by what their `Authorization` headers hold.

They tell whose turn a connection takes before its request is read, and decide about nothing else: keys that
do not work any more may still be here. Kept are Python's own hashes of the headers, which tell nothing of a
key.
"""

from __future__ import annotations

from typing import Final

from gateway.identity.bounded import BoundedDict
from shared.wire.ids import TenantId

CALLERS_MAX: Final = 16_384
"""The headers that are kept. A tenant whose are not any more loses its own turns until its next request."""


class KnownCallers:
    __slots__ = ("_tenants",)

    def __init__(self) -> None:
        self._tenants: Final[BoundedDict[int, TenantId]] = BoundedDict(CALLERS_MAX)

    def note(self, authorization: str, tenant: TenantId) -> None:
        """Note that a caller with this header belongs to the tenant."""
        self._tenants.put(hash(authorization), tenant)

    def tenant_of(self, authorization: str) -> TenantId | None:
        """The tenant that a caller with this header belonged to. None where there was none of late."""
        return self._tenants.get(hash(authorization))
