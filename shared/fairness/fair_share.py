"""Fair shares of a bounded resource among tenants: dynamic thresholds.

    a tenant may hold up to ALPHA times what is free

After Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches" (1998). The
limit follows the load, and there is no setting per tenant:

    one greedy tenant                               3/4 of the capacity
    one that comes while k others hold theirs       3/4 of what they left, which is (1/4) ** k
    n greedy tenants, as they give back and take    ALPHA / (1 + n * ALPHA) each

Rules

1. All tenants together never hold more than the capacity, except for a caller that says it is alone (rule 3).
2. The empty name is no tenant's: it is bounded by the capacity alone, as for an engine without a gateway.
3. Where the caller says `alone=True`, a tenant that holds nothing may take any amount while the resource is
   not full, so that a request larger than every limit is not refused for ever. At most ALPHA / (1 + ALPHA)
   of the capacity is counted for one tenant, so the others keep their part.

Both services bound live requests, buffered bytes and queues by it.
"""

from __future__ import annotations

from typing import Final

ALPHA: Final = 3


def held_max(capacity: int, amount: int) -> int:
    """The most units that are ever held where no call asks for more than `amount`: by rule 3 (a tenant that
    holds nothing may take any amount) two tenants may pass the capacity by a call each, before it counts as
    full."""
    return capacity + 2 * amount


class FairShare:
    """The units of one resource that each tenant holds."""

    __slots__ = ("_counted", "_held", "_most", "capacity")

    def __init__(self, capacity: int) -> None:
        assert capacity >= 1
        self.capacity: Final = capacity
        self._most: Final = max(1, capacity * ALPHA // (1 + ALPHA))
        self._held: dict[str, int] = {}
        self._counted = 0
        """The sum over tenants of what each holds, counted up to `_most` for each."""

    @property
    def most(self) -> int:
        """The units that a tenant may hold while no other holds any."""
        return self._most

    @property
    def held(self) -> int:
        """The units that all tenants hold."""
        return sum(self._held.values())

    def held_by(self, tenant: str) -> int:
        return self._held.get(tenant, 0)

    def describe(self, tenant: str, amount: int) -> str:
        """A description of the shares for the operator, for when `amount` more were refused."""
        own = self._held.get(tenant, 0)
        return f"{self.held} held, {own} by the tenant, {amount} more, capacity {self.capacity}"

    def may_acquire(self, tenant: str, amount: int, *, alone: bool = False) -> bool:
        """True if `amount` more are within the tenant's limit."""
        own = self._held.get(tenant, 0)
        if alone and not own:
            return self._counted < self.capacity
        free = self.capacity - self._counted - amount
        return free >= 0 and (not tenant or own + amount <= max(ALPHA * free, 1))

    def acquire(self, tenant: str, amount: int, *, alone: bool = False) -> bool:
        """Acquire `amount` more units for the tenant if `may_acquire`. Returns whether it did."""
        own = self._held.get(tenant, 0) + amount
        if tenant and own <= self._most and own <= ALPHA * (self.capacity - self._counted - amount):
            self._held[tenant] = own  # the common case, with the same result as below
            self._counted += amount
            return True
        if not self.may_acquire(tenant, amount, alone=alone):
            return False
        self._set(tenant, self._held.get(tenant, 0) + amount)
        return True

    def release(self, tenant: str, amount: int) -> None:
        """Release `amount` of the tenant's units."""
        own = self._held.get(tenant, 0)
        left = own - amount
        assert left >= 0, "more was released than was acquired"
        if left and own <= self._most:  # the common case, as in `acquire`
            self._held[tenant] = left
            self._counted -= amount
        else:
            self._set(tenant, left)

    def _set(self, tenant: str, held: int) -> None:
        before = self._held.pop(tenant, 0)
        if held:
            self._held[tenant] = held
        most = self._most if tenant else self.capacity
        self._counted += min(held, most) - min(before, most)
