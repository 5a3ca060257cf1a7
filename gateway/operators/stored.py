"""`DELETE /admin/v1/tenants/{id}/responses`: a tenant's responses that are kept, all at once, for operators.

A tenant that is deleted leaves what was kept for it until its time is over, so it need not be there.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import msgspec
from aiohttp import web
from msgspec import Struct

from gateway.client.responses import json_response
from gateway.operators.operations import Asks, Operation, OperatorRequest
from gateway.stored.responses import ResponseStore
from shared.process import logs
from shared.wire.errors import NotFound, ResponsesUnavailable
from shared.wire.ids import TenantId

RESPONSES: Final = "/admin/v1/tenants/{id}/responses"


class ForgottenResponses(Struct, frozen=True):
    """The responses that were deleted."""

    tenant: str
    deleted: int


class StoredApi:
    """The handler."""

    def __init__(self, store: ResponseStore | None) -> None:
        """`store` is None where none are kept."""
        self._store: Final = store

    @Operation(
        f"DELETE {RESPONSES}",
        "Delete all responses that are kept for a tenant.",
        ForgottenResponses,
        errors=(NotFound, ResponsesUnavailable),
        asks=Asks.ONE,
    )
    async def _forget(self, asked: OperatorRequest) -> web.Response:
        """Raises NotFound where none are kept, and ResponsesUnavailable."""
        if self._store is None:
            raise NotFound("No responses are kept here.")
        told = ForgottenResponses(asked.id, await self._store.forget(TenantId(asked.id)))
        fields = {"logger": __name__, "operator": asked.operator.key, "action": "responses.delete"}
        logs.audit("admin.change", {**fields, "tenant": told.tenant, "deleted": told.deleted})
        return json_response(HTTPStatus.OK, msgspec.json.encode(told), {})
