"""Calls that a shared store of quotas did not answer, counted."""

from __future__ import annotations

from typing import Final

from shared.process import logs
from shared.process.metrics import Counter

FAILURES: Final = Counter(
    "penstock_gateway_quota_store_failures", "Calls that the quota store did not answer.", ["call"]
)

log = logs.get(__name__)


def failed(call: str, error: Exception) -> None:
    """Count a call that failed."""
    FAILURES.inc(call)
    log.debug("quota.store_failed", call=call, error=str(error)[:200])
