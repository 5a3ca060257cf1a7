"""The budget of retries. Pure.

A replica that fails makes its requests go elsewhere. When all fail at once, retries would multiply the load
just when there is too little to carry it. So at most a part of a model's requests in progress may be retries
at a time; the floor lets a model with few requests retry at all.

A retry holds its place until its answer begins, or it fails. Asking another replica after one that was sent
nothing is no repetition and needs no place: no engine has worked for it, and each replica is tried once.

A tenant that loses many requests with a replica may have all places, and holds them while these wait at
another one. The only request of another tenant must not be lost for that: so a tenant that has no place may
have one beyond them, and there are as many of those again.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

PART_PERCENT: Final = 20
FLOOR: Final = 3


class RetryBudget:
    """The retries of one model at one worker."""

    __slots__ = ("_of_tenant", "active", "retrying")

    def __init__(self) -> None:
        self.active = 0
        """The requests that are sent or answered."""
        self.retrying = 0
        """Those of them that are retries, and whose answers have not begun."""
        self._of_tenant = Counter[str]()
        """Theirs, by tenant."""

    @property
    def most(self) -> int:
        """The retries that there may be at a time, but for the first of tenants that have none."""
        return max(FLOOR, self.active * PART_PERCENT // 100)

    def take(self, tenant: str) -> bool:
        """Take a place for a retry, if one is left that the tenant may have. `give_back` must follow."""
        most = self.most if self._of_tenant[tenant] else 2 * self.most
        if self.retrying >= most:
            return False
        self.retrying += 1
        self._of_tenant[tenant] += 1
        return True

    def give_back(self, tenant: str) -> None:
        self.retrying -= 1
        self._of_tenant[tenant] -= 1
        assert min(self.retrying, self._of_tenant[tenant]) >= 0
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]
