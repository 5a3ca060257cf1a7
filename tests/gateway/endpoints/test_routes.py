"""The table of public routes: what the edge answers, what keys are restricted to and what is described follow
from it."""

from __future__ import annotations

import json
from typing import Final

import pytest

from gateway.endpoints.routes import NOTHING, RESOURCES, ROUTES, SCOPES, find
from gateway.endpoints.table import ENDPOINTS
from gateway.openapi import public
from shared.process.probes import PROBES
from tests.gateway.conftest import House, error_of

UNKNOWN: Final = NOTHING.path
pytestmark = pytest.mark.hop("http2")


@pytest.mark.parametrize(
    ("path", "at", "id_"),
    [
        ("/v1/models", "/v1/models", ""),
        ("/v1/models/", UNKNOWN, ""),
        ("/v1/models/org/model", "/v1/models/{id}", "org/model"),
        ("/v1/models/a/", "/v1/models/{id}", "a/"),
        ("/v1/models/{id}", "/v1/models/{id}", "{id}"),
        ("/v1/modelsx", UNKNOWN, ""),
        ("/v1/requests", UNKNOWN, ""),
        ("/v1/requests/r.1", "/v1/requests/{id}", "r.1"),
        ("/v1/responses/input_tokens", "/v1/responses/input_tokens", ""),
        ("/v1/responses/resp_1", "/v1/responses/{id}", "resp_1"),
        ("/v1/responses/resp_1/input_items", "/v1/responses/{id}/input_items", "resp_1"),
        ("/v1/responses/resp_1/cancel", "/v1/responses/{id}/cancel", "resp_1"),
        ("/v1/responses/", UNKNOWN, ""),
        ("/v1/chat/completions", "/v1/chat/completions", ""),
        ("/v1/chat/completions/", UNKNOWN, ""),
        ("/openapi-json", UNKNOWN, ""),
        ("x/v1/models/a", UNKNOWN, ""),
        ("*", UNKNOWN, ""),
        ("", UNKNOWN, ""),
    ],
)
def test_a_path_is_that_of_one_route_or_of_none(path: str, at: str, id_: str) -> None:
    resource = find(path)
    assert (resource.path, resource.id_of(path)) == (at, id_)


async def test_each_route_is_served_as_the_table_says(house: House) -> None:
    paths = [path.replace("{id}", "tiny") for path in RESOURCES]
    for path in paths:
        resource = find(path)
        async with house.client.request("PATCH", house.url + path) as answer:
            assert answer.status == (405 if resource.is_open else 401), path
        async with house.client.request("PATCH", house.url + path, headers=house.headers) as answer:
            assert answer.status == 405
            assert answer.headers["allow"] == ", ".join(resource.routes)
            assert (await error_of(answer))["code"] == "method_not_allowed"
        if "GET" in resource.routes:
            status = 404 if path.startswith("/v1/responses/") else 200  # none is kept
            async with house.client.head(house.url + path, headers=house.headers) as answer:
                assert (answer.status, answer.content_type) == (status, "application/json")
        async with house.client.post(f"{house.url}/v2{path}/", headers=house.headers) as answer:
            assert answer.status == 404
    labels = {line["endpoint"] for line in await house.lines(3 * len(paths) + 5)}
    assert labels == {UNKNOWN, *RESOURCES}


async def test_each_route_that_needs_no_engine_has_a_handler(house: House) -> None:
    handlers = house.gateway._edge._handlers
    assert handlers.keys() == {route for route in ROUTES if route.endpoint is None}


def test_scopes_and_the_description_are_those_of_the_table() -> None:
    assert (*ENDPOINTS, "/v1/models", "/v1/requests") == SCOPES
    paths = json.loads(public.document())["paths"]
    described = {
        (method.upper(), path) for path, at in paths.items() for method in at if method != "parameters"
    }
    assert described == {(r.method, r.path) for r in ROUTES} | {("GET", path) for path in PROBES}
    is_open = {path for path, at in paths.items() if at.get("get", {}).get("security") == []}
    assert is_open == {route.path for route in ROUTES if route.is_open} | set(PROBES)
