"""Keys and tenants on the admin listener: `/admin/v1/keys` and `/admin/v1/tenants`.

What is shown has an `etag`; a change with that in `if-match` is refused with 412 when another one came first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Final

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from gateway.client.responses import json_response
from gateway.config.whole import KeyConfig, TenantConfig
from gateway.directory.accounts import Kind
from gateway.directory.entries import ENTRY_LEN_MAX, PAGE_MAX, KeyView, NoObject, decode_object
from gateway.directory.registry import (
    CREATABLE,
    PATCHABLE,
    MintedView,
    OperatorKeysView,
    Page,
    Registry,
    Shown,
)
from gateway.directory.rotation import Rotation
from gateway.operators.operations import (
    Asks,
    Operation,
    OperationBody,
    OperatorRequest,
)
from gateway.operators.versions import Versions, etag_of, is_known, unchanged
from shared.process.setting_values import ConfigError
from shared.wire.envelope import ErrorBody
from shared.wire.errors import (
    ApiError,
    Conflict,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    PreconditionRequired,
)
from shared.wire.request_body import read_body, send_continue

KEYS: Final = "/admin/v1/keys"
KEY: Final = "/admin/v1/keys/{id}"
TENANTS: Final = "/admin/v1/tenants"
TENANT: Final = "/admin/v1/tenants/{id}"
OPERATORS: Final = "/admin/v1/operators"
PAGE_LEN: Final = 100
"""Entries on a page, unless the operator says otherwise."""
BODY_S: Final = 10.0
"""From the headers of a request to the last byte of its body, in seconds."""
PLACE_LEN_MAX: Final = 160
_NEW_KEY: Final = OperationBody("NewKey", KeyConfig, CREATABLE, frozenset({"tenant"}))
_KEY_CHANGE: Final = OperationBody("KeyChange", KeyConfig, PATCHABLE)
_TENANT: Final = OperationBody(
    "TenantFields", TenantConfig, frozenset(one.name for one in fields(TenantConfig))
)
_ROTATION: Final = OperationBody("Rotation", Rotation, frozenset(one.name for one in fields(Rotation)))
_CHANGES: Final = (NotFound, Conflict, PreconditionFailed)
_Shows: Final = partial(Operation, errors=(NotFound,), is_versioned=True, is_watched=True, asks=Asks.ONE)
"""Shows an entry."""
_Changes: Final = partial(Operation, errors=_CHANGES, is_versioned=True, takes_version=True, asks=Asks.CHANGE)
"""Changes an entry."""


@dataclass(frozen=True, slots=True)
class TenantsQuery:
    """A page of tenants."""

    after: str = ""
    """What the page before told as `next`."""
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = PAGE_LEN
    """Entries at most."""


@dataclass(frozen=True, slots=True)
class KeysQuery(TenantsQuery):
    """A page of keys."""

    tenant: str | None = None
    """Only the keys of this one."""


class Problem(Struct, frozen=True):
    """One thing that is wrong with a change."""

    field: str
    """The field's name, such as limits.concurrent. Empty when it is none in particular."""
    problem: str


class Refused(Struct, frozen=True):
    """The answer to a change that was not made: OpenAI's envelope, and all that is wrong."""

    error: ErrorBody
    problems: list[Problem]


class DirectoryRoutes:
    """The handlers of keys and tenants."""

    def __init__(self, registry: Registry, refresh: Callable[[], Awaitable[None]]) -> None:
        """`refresh` makes a change count in this gateway at once."""
        self._registry: Final = registry
        self._versions: Final = Versions()
        self._refresh: Final = refresh

    @Operation(
        f"GET {KEYS}",
        "List keys, by their tenants.",
        Page[KeyView],
        KeysQuery,
        is_watched=True,
        asks=Asks.ONE,
    )
    async def _list_keys(self, asked: OperatorRequest) -> web.Response:
        return await self._page(asked, "keys", asked.query.tenant)

    @Operation(
        f"GET {OPERATORS}",
        "List operators' keys. They are changed in the file alone.",
        OperatorKeysView,
        asks=Asks.ONE,
    )
    async def _list_operators(self, asked: OperatorRequest) -> web.Response:
        return json_response(HTTPStatus.OK, msgspec.json.encode(await self._registry.operators()), {})

    @Operation(
        f"GET {TENANTS}",
        "List tenants, by their ids.",
        Page[TenantConfig],
        TenantsQuery,
        is_watched=True,
        asks=Asks.ONE,
    )
    async def _list_tenants(self, asked: OperatorRequest) -> web.Response:
        return await self._page(asked, "tenants", None)

    async def _page(self, asked: OperatorRequest, kind: Kind, tenant: str | None) -> web.Response:
        query: TenantsQuery = asked.query
        page = await self._registry.page(kind, tenant, query.after[:PLACE_LEN_MAX], query.limit)
        return self._versions.told(asked.request, msgspec.json.encode(page))

    @Operation(
        f"POST {KEYS}",
        "Create a key. Only this answer has its secret.",
        MintedView,
        body=_NEW_KEY,
        errors=_CHANGES,
        asks=Asks.CHANGE,
    )
    async def _create_key(self, asked: OperatorRequest) -> web.Response:
        return await self._minted(self._registry.create_key(await _body(asked), asked.operator.key))

    @Operation(
        f"POST {KEY}/rotate",
        "Replace a key's secret.",
        MintedView,
        body=_ROTATION,
        errors=_CHANGES,
        takes_version=True,
        asks=Asks.CHANGE,
    )
    async def _rotate_key(self, asked: OperatorRequest) -> web.Response:
        body = await _body(asked)
        return await self._minted(
            self._registry.rotate_key(asked.id, body, asked.operator.key, _if_match(asked))
        )

    @_Shows(f"GET {KEY}", "Show a key.", KeyView)
    async def _key(self, asked: OperatorRequest) -> web.Response:
        return _answer(await self._registry.get("keys", asked.id), asked.request)

    @_Shows(f"GET {TENANT}", "Show a tenant.", TenantConfig)
    async def _tenant(self, asked: OperatorRequest) -> web.Response:
        return _answer(await self._registry.get("tenants", asked.id), asked.request)

    @_Changes(f"PATCH {KEY}", "Change fields of a key.", KeyView, body=_KEY_CHANGE)
    async def _patch_key(self, asked: OperatorRequest) -> web.Response:
        body = await _body(asked)
        return await self._changed(
            self._registry.patch_key(asked.id, body, asked.operator.key, _if_match(asked))
        )

    @_Changes(f"DELETE {KEY}", "Delete a key.", KeyView)
    async def _delete_key(self, asked: OperatorRequest) -> web.Response:
        return await self._changed(self._registry.delete_key(asked.id, asked.operator.key, _if_match(asked)))

    @_Changes(
        f"PUT {TENANT}",
        "Create a tenant, or replace it.",
        TenantConfig,
        body=_TENANT,
        errors=(*_CHANGES, PreconditionRequired),
        takes_absence=True,
    )
    async def _put_tenant(self, asked: OperatorRequest) -> web.Response:
        body = await _body(asked)
        return await self._changed(
            self._registry.put_tenant(
                asked.id, body, asked.operator.key, _if_match(asked), _etags(asked, "if-none-match")
            )
        )

    @_Changes(f"DELETE {TENANT}", "Delete a tenant.", TenantConfig)
    async def _delete_tenant(self, asked: OperatorRequest) -> web.Response:
        return await self._changed(
            self._registry.delete_tenant(asked.id, asked.operator.key, _if_match(asked))
        )

    async def _minted(self, change: Awaitable[MintedView]) -> web.Response:
        minted = await change
        await self._refresh()
        headers = {"cache-control": "no-store"}
        return json_response(HTTPStatus.OK, msgspec.json.encode(minted), headers)

    async def _changed(self, change: Awaitable[Shown]) -> web.Response:
        shown = await change
        await self._refresh()
        return _answer(shown)


def refusal(error: ConfigError) -> web.Response:
    """The answer to a change with mistakes."""
    is_of_fields = not isinstance(error, NoObject)
    problems = [_problem(text) if is_of_fields else Problem("", text) for text in error.problems]
    told = InvalidRequest(
        f"Nothing was changed. {'; '.join(error.problems)}"[:ENTRY_LEN_MAX],
        param=problems[0].field or None if problems else None,
    )
    body = ErrorBody(message=told.message, type=told.type, param=told.param, code=told.code)
    return json_response(told.status, msgspec.json.encode(Refused(body, problems)), {})


def _problem(text: str) -> Problem:
    """The problem that a text names, behind its field where it has one."""
    field, colon, problem = text.partition(": ")
    return Problem(field, problem) if colon else Problem("", text)


def _answer(shown: Shown, request: web.BaseRequest | None = None) -> web.Response:
    """What is shown now, or to `request` that it knows that."""
    if request is not None and is_known(request, f'"{shown.etag}"'):
        return unchanged(etag_of(shown.etag))
    return json_response(HTTPStatus.OK, msgspec.json.encode(shown.view), {"etag": f'"{shown.etag}"'})


def _if_match(asked: OperatorRequest) -> str | None:
    return _etags(asked, "if-match")


def _etags(asked: OperatorRequest, name: str) -> str | None:
    """The etags in a header, however many lines it has. None without it."""
    return ", ".join(asked.request.headers.getall(name, ())) or None


async def _body(asked: OperatorRequest) -> Mapping[str, Any]:
    """The fields of a request's body; none for an empty one. Raises ApiError, ConfigError."""
    body = await read_operator_body(asked.request)
    return decode_object(body) if body else {}


async def read_operator_body(request: web.BaseRequest, within_s: float | None = None) -> bytes:
    """The body of a request on the admin listener, which may take `within_s`, with None `BODY_S`. Raises
    ApiError."""

    try:
        return await read_body(
            request.headers,
            request.content.readany,
            partial(send_continue, request.writer),
            len_max=ENTRY_LEN_MAX,
            deadline_s=BODY_S if within_s is None else within_s,
            hold=lambda _: None,
        )
    except (ApiError, ConnectionError):
        raise
    except Exception as error:
        detail = type(error).__name__
        raise InvalidRequest("The request body is not framed as its headers say.", detail=detail) from None
