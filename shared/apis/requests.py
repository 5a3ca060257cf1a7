"""The answer of `DELETE /v1/requests/{id}`."""

from __future__ import annotations

from msgspec import Struct


class AbortResponse(Struct):
    id: str
    aborted: int
    """The number of live requests that had this id. 0 is no error: an abort is idempotent."""
