"""Keys and tenants on the admin listener: `/admin/v1/keys` and `/admin/v1/tenants`.

    GET /admin/v1/keys?tenant=&after=&limit=    a page of keys
    POST /admin/v1/keys                         create one; its secret is in this answer alone
    GET PATCH DELETE /admin/v1/keys/{id}        show it, change fields of it, delete it
    POST /admin/v1/keys/{id}/rotate             replace its secret
    GET /admin/v1/tenants?after=&limit=         a page of tenants
    GET PUT DELETE /admin/v1/tenants/{id}       show one, create or replace it, delete it

What is shown has an `etag`; a change with that in `if-match` is refused with 412 when another one came first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from aiohttp import web
from msgspec import Struct

from gateway.accounts import Kind
from gateway.client.responses import json_response
from gateway.directory.entries import ENTRY_LEN_MAX, PAGE_MAX, decode_object
from gateway.directory.registry import MintedView, Registry, Shown
from gateway.operators import Asked, Table
from shared.config import ConfigError
from shared.errors import ApiError, InvalidRequest
from shared.openai import ErrorBody
from shared.request_body import CONTINUE, read_body

KEYS: Final = "/admin/v1/keys"
TENANTS: Final = "/admin/v1/tenants"
PAGE_LEN: Final = 100
"""Entries on a page, unless the operator says otherwise."""
BODY_S: Final = 10.0
"""From the headers of a request to the last byte of its body, in seconds."""
PLACE_LEN_MAX: Final = 160


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
        self._refresh: Final = refresh

    @property
    def table(self) -> Table:
        """The handlers."""
        return {
            KEYS: {"GET": self._list_keys, "POST": self._create_key},
            f"{KEYS}/{{id}}": {"GET": self._key, "PATCH": self._patch_key, "DELETE": self._delete_key},
            f"{KEYS}/{{id}}/rotate": {"POST": self._rotate_key},
            TENANTS: {"GET": self._list_tenants},
            f"{TENANTS}/{{id}}": {
                "GET": self._tenant,
                "PUT": self._put_tenant,
                "DELETE": self._delete_tenant,
            },
        }

    async def _list_keys(self, asked: Asked) -> web.Response:
        return await self._page(asked, "keys")

    async def _list_tenants(self, asked: Asked) -> web.Response:
        return await self._page(asked, "tenants")

    async def _page(self, asked: Asked, kind: Kind) -> web.Response:
        query = asked.request.query
        tenant = query.get("tenant") if kind == "keys" else None
        page = await self._registry.page(
            kind, tenant, query.get("after", "")[:PLACE_LEN_MAX], _limit(query.get("limit"))
        )
        return json_response(HTTPStatus.OK, msgspec.json.encode(page), {})

    async def _create_key(self, asked: Asked) -> web.Response:
        return await self._minted(self._registry.create_key(await _body(asked), asked.operator.key))

    async def _rotate_key(self, asked: Asked) -> web.Response:
        body = await _body(asked)
        return await self._minted(
            self._registry.rotate_key(asked.id, body, asked.operator.key, _if_match(asked))
        )

    async def _key(self, asked: Asked) -> web.Response:
        return _answer(await self._registry.get("keys", asked.id))

    async def _tenant(self, asked: Asked) -> web.Response:
        return _answer(await self._registry.get("tenants", asked.id))

    async def _patch_key(self, asked: Asked) -> web.Response:
        body = await _body(asked)
        return await self._changed(
            self._registry.patch_key(asked.id, body, asked.operator.key, _if_match(asked))
        )

    async def _delete_key(self, asked: Asked) -> web.Response:
        return await self._changed(self._registry.delete_key(asked.id, asked.operator.key, _if_match(asked)))

    async def _put_tenant(self, asked: Asked) -> web.Response:
        body = await _body(asked)
        return await self._changed(
            self._registry.put_tenant(asked.id, body, asked.operator.key, _if_match(asked))
        )

    async def _delete_tenant(self, asked: Asked) -> web.Response:
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
    problems = []
    for text in error.problems:
        field, colon, problem = text.partition(": ")
        problems.append(Problem(field, problem) if colon else Problem("", text))
    told = InvalidRequest(
        f"Nothing was changed. {'; '.join(error.problems)}"[:ENTRY_LEN_MAX],
        param=problems[0].field or None if problems else None,
    )
    body = ErrorBody(message=told.message, type=told.type, param=told.param, code=told.code)
    return json_response(told.status, msgspec.json.encode(Refused(body, problems)), {})


def _answer(shown: Shown) -> web.Response:
    return json_response(HTTPStatus.OK, msgspec.json.encode(shown.view), {"etag": f'"{shown.etag}"'})


def _if_match(asked: Asked) -> str | None:
    return asked.request.headers.get("if-match")


def _limit(text: str | None) -> int:
    """Raises InvalidRequest."""
    if text is None:
        return PAGE_LEN
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= PAGE_MAX):
        raise InvalidRequest(f"limit must be a whole number from 1 to {PAGE_MAX}.", param="limit")
    return int(text)


async def _body(asked: Asked) -> Mapping[str, Any]:
    """The fields of a request's body; none for an empty one. Raises ApiError, ConfigError."""
    body = await read_operator_body(asked.request)
    return decode_object(body) if body else {}


async def read_operator_body(request: web.BaseRequest) -> bytes:
    """The body of a request on the admin listener. Raises ApiError."""

    async def go_on() -> None:
        await request.writer.write(CONTINUE)
        request.writer.output_size = 0

    try:
        return await read_body(
            request.headers,
            request.content.readany,
            go_on,
            len_max=ENTRY_LEN_MAX,
            deadline_s=BODY_S,
            hold=lambda _: None,
        )
    except (ApiError, ConnectionError):
        raise
    except Exception as error:
        detail = type(error).__name__
        raise InvalidRequest("The request body is not framed as its headers say.", detail=detail) from None
