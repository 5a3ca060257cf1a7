"""The routes of the public API: one table, from which follow what the edge answers, the endpoints to which a
key can be restricted, and the API's description.

A route that is proxied to engines is an entry of `gateway.endpoints`. Any other is an entry here, and has its
handler in `gateway.request.edge`. The probes have a table of their own (`shared.process.probes`), for every
port.

Rules:

1. An id may hold slashes, as models' names do, and is not empty. Of two routes that take a path the first
   counts, and one without an id before any other.
2. `HEAD` is answered where `GET` is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct, structs

from gateway.endpoints.dialect import CHUNKS, Dialect
from gateway.endpoints.endpoint import Endpoint
from gateway.endpoints.messages import MESSAGE_EVENTS
from gateway.endpoints.table import ENDPOINTS
from shared.apis.models import Model, ModelList
from shared.apis.requests import AbortResponse
from shared.apis.responses.answer import ResponseObject
from shared.apis.responses.stored import DeletedResponse, InputItemList, ItemsQuery, RetrieveQuery
from shared.wire.errors import (
    ApiError,
    ModelNotFound,
    NotFound,
    RateLimited,
    ResponsesUnavailable,
    RouteNotFound,
)
from shared.wire.paths import no_such_path

_ID: Final = "{id}"


class Route(Struct, frozen=True, eq=False, kw_only=True):
    """A method of a path."""

    method: str
    path: str
    """The path, in which `{id}` stands for an id."""
    summary: str
    """A sentence for the API's description."""
    answer: type[Struct] | None
    """The shape of its answers. None for a document."""
    of_id: str = ""
    """What the id is, for the API's description. Empty where there is none."""
    query: type[Struct] | None = None
    """The shape of its query. None without one."""
    errors: tuple[type[ApiError], ...] = ()
    """Errors that not every route has."""
    is_open: bool = False
    """True if it is answered without a key."""
    endpoint: Endpoint | None = None
    """What is proxied to engines. None where the gateway answers by itself."""

    @property
    def scope(self) -> str:
        """The endpoint to which a key can be restricted: the path up to an id."""
        return self.path.partition(f"/{_ID}")[0]


class Resource(Struct, frozen=True, eq=False):
    """What is served at a path."""

    path: str
    """The routes' path, for logs and metrics: one of a few constants."""
    routes: Mapping[str, Route]
    """The routes by method."""
    pattern: re.Pattern[str]
    endpoint: Endpoint | None = None
    """The endpoint that engines serve here. None for any other path."""
    is_open: bool = False
    """True if it is answered without a key."""
    dialect: Dialect = CHUNKS
    """How its answers look beside their content."""
    anthropics: Resource | None = None
    """What is served here to a request that names the version of Anthropic's API, in that API's dialect. None
    where an API has the path."""

    def id_of(self, path: str) -> str:
        """The id in a path that is one of this resource's. Empty where there is none."""
        found = self.pattern.fullmatch(path)
        return "".join(found.groups()) if found is not None else ""


def proxied(endpoint: Endpoint) -> Route:
    """The route of what engines serve."""
    return Route(
        method="POST",
        path=endpoint.path,
        summary=endpoint.summary,
        answer=endpoint.answer,
        endpoint=endpoint,
    )


LIST_MODELS: Final = Route(
    method="GET",
    path="/v1/models",
    summary="List the models that the caller may use.",
    answer=ModelList,
)
SHOW_MODEL: Final = Route(
    method="GET",
    path="/v1/models/{id}",
    of_id="A model's name or one of its aliases.",
    summary="Describe a model.",
    answer=Model,
    errors=(ModelNotFound,),
)
END_REQUESTS: Final = Route(
    method="DELETE",
    path="/v1/requests/{id}",
    of_id="The x-request-id of the requests.",
    summary="End the caller's requests that carry this id.",
    answer=AbortResponse,
)
DESCRIBE: Final = Route(
    method="GET", path="/openapi.json", summary="Describe the API.", answer=None, is_open=True
)


def _of_response(
    method: str, below: str, summary: str, answer: type[Struct], query: type[Struct] | None = None
) -> Route:
    """The route of a response that is kept, or of what lies below it."""
    return Route(
        method=method,
        path=f"/v1/responses/{_ID}{below}",
        of_id="The id of a response that is kept.",
        summary=summary,
        answer=answer,
        query=query,
        errors=(NotFound, ResponsesUnavailable, RateLimited),
    )


CANCEL_RESPONSE: Final = _of_response(
    "POST", "/cancel", "End a response that is still streamed.", ResponseObject
)
LIST_INPUT_ITEMS: Final = _of_response(
    "GET",
    "/input_items",
    "List the items of a response's input, and of the conversation before it.",
    InputItemList,
    ItemsQuery,
)
SHOW_RESPONSE: Final = _of_response("GET", "", "Tell a response that is kept.", ResponseObject, RetrieveQuery)
DELETE_RESPONSE: Final = _of_response("DELETE", "", "Delete a response that is kept.", DeletedResponse)
ROUTES: Final = (
    *map(proxied, ENDPOINTS.values()),
    *(LIST_MODELS, SHOW_MODEL, END_REQUESTS, DESCRIBE),
    *(CANCEL_RESPONSE, LIST_INPUT_ITEMS, SHOW_RESPONSE, DELETE_RESPONSE),
)
"""The table."""
SCOPES: Final = tuple(dict.fromkeys(route.scope for route in ROUTES if not route.is_open))
"""The endpoints to which a key can be restricted."""


class Resources(dict[str, Resource]):
    """What is served, by the routes' path, and at any other path. No other path is kept."""

    def __missing__(self, path: str) -> Resource:
        found = next((resource for resource in _WITH_IDS if resource.pattern.fullmatch(path)), None)
        return found or next((nothing for above, nothing in _BELOW if path.startswith(above)), NOTHING)


def resources(table: Iterable[Route]) -> Resources:
    """What is served by the routes of a table, by path."""
    by_path: dict[str, dict[str, Route]] = {}
    for route in table:
        routes = by_path.setdefault(route.path, {})
        assert route.method not in routes, f"{route.method} {route.path} is there twice"
        assert all(other.is_open is route.is_open for other in routes.values())
        routes[route.method] = route
        if route.method == "GET":
            routes["HEAD"] = route
    return Resources((path, _resource(path, routes)) for path, routes in by_path.items())


def _resource(path: str, routes: Mapping[str, Route]) -> Resource:
    pattern = re.compile(re.escape(path).replace(re.escape(_ID), "(.+)"), re.DOTALL)
    endpoints = [route.endpoint for route in routes.values() if route.endpoint is not None]
    if endpoints:
        return Resource(path, routes, pattern, endpoints[0], dialect=endpoints[0].dialect)
    above = ENDPOINTS.get(path.partition(f"/{_ID}")[0])
    if above is not None:
        return Resource(path, routes, pattern, dialect=above.dialect)
    return _of_no_api(Resource(path, routes, pattern, is_open=any(one.is_open for one in routes.values())))


def _of_no_api(resource: Resource) -> Resource:
    return structs.replace(resource, anthropics=structs.replace(resource, dialect=MESSAGE_EVENTS))


NOTHING: Final = _of_no_api(Resource("unknown", {}, re.compile("(?!)")))
"""What is at a path where nothing is served."""


RESOURCES: Final = resources(ROUTES)
"""What is served, by the routes' path."""
_WITH_IDS: Final = tuple(resource for path, resource in RESOURCES.items() if _ID in path)


_BELOW: Final = tuple(
    (f"{path}/", structs.replace(NOTHING, dialect=endpoint.dialect, anthropics=None))
    for path, endpoint in ENDPOINTS.items()
    if endpoint.dialect is not CHUNKS
)
"""The paths below those of an API with a dialect of its own: nothing is there either, which is said in it."""


def missing(path: str) -> ApiError:
    """The error of a path at which nothing is served."""
    return RouteNotFound(no_such_path(path, lambda other: bool(find(other).routes)))


find: Final = RESOURCES.__getitem__
"""Finds what is served at a path."""
