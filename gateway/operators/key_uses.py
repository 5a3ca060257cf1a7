"""`GET /admin/v1/key_uses`: when keys were used last, for operators who look for dead ones.

It is what the gateways remember since they began, of all that know each other the latest (`since` is the
beginning of the one that began last). A key that is not told was not used since then.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec
from aiohttp import web

from gateway.operators.operations import Asks, Merge, Operation, OperatorRequest
from gateway.operators.versions import Versions
from gateway.request.key_uses import KeyUses
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.wire.silence import Silent

KEY_USES: Final = "/admin/v1/key_uses"


@dataclass(frozen=True, slots=True)
class KeyUsesQuery:
    """Whose keys they are."""

    tenant: str | None = None
    """Only the keys of this one."""


class KeyUsesView(Silent, frozen=True):
    """When keys were used last."""

    since: datetime
    """Since when it is known."""
    data: dict[str, datetime]
    """By the key's id the end of the last request with it, to the second."""


class KeyUsesApi:
    """The handler."""

    def __init__(self, uses: KeyUses, clock: Clock = SYSTEM_CLOCK) -> None:
        self._uses: Final = uses
        self._versions: Final = Versions()
        self._since: Final = _second(datetime.fromtimestamp(clock.wall(), UTC))

    @Operation(
        f"GET {KEY_USES}",
        "Tell when keys were used last.",
        KeyUsesView,
        KeyUsesQuery,
        is_of_all=True,
        is_watched=True,
        asks=Asks.EVERY,
        merges={"since": Merge.MOST, "data": Merge.LATEST},
    )
    async def _answer(self, asked: OperatorRequest) -> web.Response:
        found = self._uses.of(asked.query.tenant)
        view = KeyUsesView(self._since, {key: _second(at) for key, at in found})
        return self._versions.told(asked.request, msgspec.json.encode(view))


def _second(at: datetime) -> datetime:
    """Texts of moments are compared, so all have the same length."""
    return at.replace(microsecond=0)
