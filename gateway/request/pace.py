"""A bound on how often each tenant may do what no quota counts, and others pay for as well. No I/O."""

from __future__ import annotations

from typing import Final

from gateway.identity.bounded import BoundedDict
from shared.wire.ids import TenantId

TENANTS_MAX: Final = 4096
"""Tenants that are remembered."""


class Pace:
    """So many at once, and after that so many each second. Times are seconds on the monotonic clock."""

    def __init__(self, per_s: float, at_once: int) -> None:
        self._each_s: Final = 1.0 / per_s
        self._ahead_s: Final = at_once / per_s
        self._free_at_s: Final[BoundedDict[TenantId, float]] = BoundedDict(TENANTS_MAX)
        """When all that a tenant has done is past, at the pace of `per_s`."""

    def wait_s(self, tenant: TenantId, now_s: float) -> float:
        """The time until the tenant may do it once more; 0.0 where it may now, which is counted."""
        free_at_s = max(now_s, self._free_at_s.get(tenant, 0.0)) + self._each_s
        if (late_s := free_at_s - now_s - self._ahead_s) > 1e-9:
            return late_s
        self._free_at_s.put(tenant, free_at_s)
        return 0.0
