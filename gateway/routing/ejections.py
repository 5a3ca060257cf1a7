"""Ejections as operators see them: a log line for each, and for each return, and counters."""

from __future__ import annotations

from typing import Final

from gateway.routing.health import Ejection
from shared.process import logs
from shared.process.metrics import Counter
from shared.wire.ids import ReplicaId

EJECTIONS: Final = Counter(
    "penstock_gateway_ejections", "Replicas that were left alone for a time, by the reason.", ("reason",)
)
RETURNS: Final = Counter("penstock_gateway_ejections_ended", "Ejected replicas that work again.")

log = logs.get(__name__)


def observe_ejection(replica: ReplicaId, ejection: Ejection) -> None:
    EJECTIONS.inc(ejection.reason.value)
    log.warning(
        "replica.ejected",
        replica=replica,
        reason=ejection.reason.value,
        outcome=ejection.outcome.value,
        for_ms=ejection.length_ms,
    )


def observe_return(replica: ReplicaId, away_ms: int) -> None:
    RETURNS.inc()
    log.info("replica.returned", replica=replica, away_ms=away_ms)
