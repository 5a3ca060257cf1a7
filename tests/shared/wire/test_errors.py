"""What an error tells beside its message: its headers, and how the log calls the end that it made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.wire import errors
from shared.wire.end_reason import EndReason, end_reason_of
from shared.wire.errors import ApiError, error_headers


def tree(root: type[ApiError] = ApiError) -> Iterator[type[ApiError]]:
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


@pytest.mark.parametrize(
    ("after_s", "seconds", "ms"),
    [
        (0.0, "1", "1"),
        (0.0001, "1", "1"),
        (0.4, "1", "400"),
        (1.0, "1", "1000"),
        (1.2, "2", "1200"),
        (59.6, "60", "59600"),
    ],
)
def test_a_client_that_waits_as_long_as_it_is_told_never_comes_too_early(
    after_s: float, seconds: str, ms: str
) -> None:
    headers = error_headers(errors.Overloaded("full", retry_after_s=after_s))
    assert headers == {"x-should-retry": "true", "retry-after": seconds, "retry-after-ms": ms}


def test_an_error_says_whether_a_retry_can_help_and_how_to_authenticate() -> None:
    assert error_headers(errors.InvalidRequest("no")) == {"x-should-retry": "false"}
    assert error_headers(errors.Unauthenticated("no")) == {
        "x-should-retry": "false",
        "www-authenticate": "Bearer",
    }


def test_an_error_of_the_services_own_is_never_called_a_refusal() -> None:
    """Except those that ask the caller to come again: full, not ready, and what derives from it."""
    refusals = {kind for kind in tree() if end_reason_of(kind("m")) is EndReason.REFUSED}
    own = {kind for kind in refusals if kind.status >= 500}
    directory = {errors.DirectoryUnavailable, errors.ChangeUnknown}
    stores = {errors.QuotaUnavailable, errors.IdentityUnavailable, errors.ResponsesUnavailable} | directory
    assert own == {ApiError, errors.Overloaded, errors.FirstTokenDeadline, errors.NotReady} | stores


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.TokenizerFailed("m"), EndReason.INTERNAL_ERROR),
        (errors.UpstreamLost("m"), EndReason.UPSTREAM_FAILED),
        (errors.GatewayStopped("m"), EndReason.DRAIN),
        (errors.ContextLengthExceeded("m"), EndReason.REFUSED),
        (errors.EngineFailed("m"), EndReason.ENGINE_FAILED),
    ],
)
def test_an_error_ends_a_request_for_the_reason_of_its_nearest_kin(
    error: ApiError, reason: EndReason
) -> None:
    assert end_reason_of(error) is reason
