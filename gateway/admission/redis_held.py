"""The store's own record of a reservation in Redis, and receivers of the answers for which nobody waits: they
cost less than a future and its callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from gateway.admission.quota import ReservationId, Subject
from gateway.admission.redis_link import Moved, RedisUnavailable, ScriptMissing
from gateway.admission.store_failures import failed
from gateway.admission.usage import Used
from shared.ids import TenantId

if TYPE_CHECKING:
    from gateway.admission.redis_store import RedisStore


class Held(Struct):
    """A reservation of this process's."""

    tenant: TenantId
    subjects: tuple[Subject, ...] = ()
    """The subjects whose limits count it. None where it was only noted."""
    granted: int = 0
    """Tokens that were granted to it, as far as its caller knows."""
    used: Used | None = None
    """The tokens to settle with; None while the request is in progress."""
    is_settling: bool = False
    """True while Redis is asked to settle it."""
    is_counted: bool = False
    """True if its tokens were granted by Redis, or it was noted there, as far as its caller knows."""


class Settling(Struct, eq=False):
    """The receiver of the answer to a settlement."""

    store: RedisStore
    reservation: ReservationId
    held: Held
    command: bytes

    def done(self) -> bool:
        return False

    def set_result(self, reply: object, /) -> None:
        self.store.settlement_over(self.reservation, self.held, None)

    def set_exception(self, error: RedisUnavailable, /) -> None:
        if isinstance(error, ScriptMissing | Moved):  # so nothing was done
            self.store.send_again(self)
        else:
            self.store.settlement_over(self.reservation, self.held, error)


class Noting(Struct, eq=False):
    """The receiver of the answer to the note of a request without limits."""

    store: RedisStore
    reservation: ReservationId
    held: Held
    command: bytes
    noted: Callable[[ReservationId], None]
    is_again: bool = False

    def done(self) -> bool:
        return False

    def set_result(self, reply: list[int], /) -> None:
        if self.held.used is None:  # else it was settled as one that is not counted there
            self.held.granted, self.held.is_counted = reply[1], True
            self.noted(self.reservation)

    def set_exception(self, error: RedisUnavailable, /) -> None:
        if isinstance(error, ScriptMissing) and not self.is_again and self.held.used is None:
            self.store.note_in_full(self)
        else:
            failed("note", error)
