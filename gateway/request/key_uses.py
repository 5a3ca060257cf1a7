"""When keys were used last, as far as this process knows: the ends of their latest requests.

It is kept in memory, of `USES_MAX` keys at most, those that were used last: what is older is forgotten, as is
all at a restart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from datetime import datetime
from typing import Final

USES_MAX: Final = 16_384


class KeyUses:
    """The last uses."""

    def __init__(self) -> None:
        self._uses: Final[OrderedDict[str, tuple[datetime, str | None]]] = OrderedDict()

    def note(self, key: str, tenant: str | None, at: datetime) -> None:
        """Note that a request with this key ended at this time."""
        uses = self._uses
        uses[key] = at, tenant
        uses.move_to_end(key)
        if len(uses) > USES_MAX:
            uses.popitem(last=False)

    def of(self, tenant: str | None) -> Iterator[tuple[str, datetime]]:
        """The keys of a tenant, or with None all, with the time at which each was used last."""
        for key, (at, whose) in self._uses.items():
            if tenant is None or whose == tenant:
                yield key, at
