"""Requests that schemathesis draws from an API's description, and the checks of the answers against it."""

from __future__ import annotations

import contextlib
from http import HTTPStatus
from typing import Any, Final

import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.core.result import Ok
from schemathesis.specs.openapi import checks

from tests.effort import drawn
from tests.gateway.conftest import PATIENCE_S

EXAMPLES: Final = drawn(2, whole=400)
"""Requests of each operation, of those that the description allows and of those that it does not, each. The
checks send about as many again."""


def rejects_bad_data(
    context: Any, response: schemathesis.Response, case: schemathesis.Case[Any]
) -> bool | None:
    """The check that what the description forbids is refused. 413 is a refusal, too, of a body too long."""
    if response.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return True
    refused: bool | None = checks.negative_data_rejection(context, response, case)
    return refused


CHECKS: Final = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    rejects_bad_data,
    checks.ignored_auth,
    checks.unsupported_method,
]


def asked_of(
    document: dict[str, Any], url: str, key: str, mode: schemathesis.GenerationMode, examples: int = EXAMPLES
) -> int:
    """Send requests that schemathesis draws from the description, and check each answer against it. Returns
    the number of requests.

    `key` is sent as a bearer."""
    count, headers = 0, {"Authorization": f"Bearer {key}"}
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        assert isinstance(found, Ok)
        strategy = found.ok().as_strategy(generation_mode=mode)

        @settings(
            max_examples=examples,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=strategy)
        def check(case: schemathesis.Case[Any]) -> None:
            nonlocal count
            count += 1
            got = case.call(base_url=url, headers=headers, timeout=PATIENCE_S)
            case.validate_response(got, checks=CHECKS, headers=headers)

        with contextlib.suppress(Unsatisfiable):
            check()
    return count
