"""Reservations whose lease ran out, as of a gateway that was killed: what is known of them without it."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import unquote

from msgspec import Struct

from gateway.admission.quota import ReservationId
from gateway.admission.usage import Payer
from shared.process import logs
from shared.wire.ids import KeyId, TenantId

log = logs.get(__name__)


class Lapsed(Struct, frozen=True):
    """A reservation that nobody settled. All its tokens stay charged, and are counted as an estimate."""

    record: bytes
    """Its name and all else, as the store has it."""
    reservation: ReservationId
    payer: Payer
    tokens: int
    reserved_s: float
    """When they were reserved, in seconds of the wall clock."""

    @classmethod
    def of(cls, record: bytes) -> Lapsed:
        """`record`: "RESERVATION TOKENS RESERVED_MS USAGE ROW", see `quota.lua`. Raises ValueError."""
        reservation, tokens, reserved_ms, usage_key, row = record.decode().split(" ")
        tag = usage_key.rpartition("}")[0].rpartition("{")[2]
        key, _, model = row.partition("/")
        payer = Payer(TenantId(unquote(tag)), KeyId(unquote(key)), unquote(model))
        return cls(record, ReservationId(reservation), payer, int(tokens), int(reserved_ms) / 1000)


def lapsed_of(records: Iterable[bytes]) -> list[Lapsed]:
    """The reservations of these records. What is none, as of another version, is passed over, with a line in
    the log: it concerns nobody else."""
    found: list[Lapsed] = []
    for record in records:
        try:
            found.append(Lapsed.of(record))
        except ValueError as error:
            log.warning("quota.lapsed_unreadable", problem=str(error)[:200])
    return found
