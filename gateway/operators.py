"""A request of an operator's on the admin listener, and the table of those that are answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from msgspec import Struct

from gateway.identity.caller import Principal


class Asked(Struct, frozen=True):
    """A request of an operator's."""

    request: web.BaseRequest
    operator: Principal
    id: str
    """The id in its path. Empty where the path has none."""


Handler = Callable[[Asked], Awaitable[web.Response]]
"""Answers an operator. Raises ApiError and ConfigError."""
Methods = Mapping[str, Handler]
"""The handlers of a path, by method."""
Table = Mapping[str, Methods]
"""The methods by path, in which `{id}` stands for an id, and `{replica}` for a replica's."""
