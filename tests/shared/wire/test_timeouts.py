from __future__ import annotations

import pytest

from shared.wire.errors import InvalidRequest
from shared.wire.timeouts import _DIGITS_MAX, TEXT_LEN_MAX, TIMEOUT_S_MAX, stated_timeout_ms, stated_timeout_s


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, None), ("5", 5.0), ("0.25", 0.25), ("86400", TIMEOUT_S_MAX), ("2.5e-1", 0.25), ("1E2", 100.0)],
)
def test_timeout_headers_are_in_seconds(value: str | None, expected: float | None) -> None:
    assert stated_timeout_s("x-request-timeout", value) == expected


@pytest.mark.parametrize(
    "value",
    [
        "",
        "soon",
        "0",
        "-1",
        "nan",
        "inf",
        "86401",
        "5s",
        "1" * 8000,
        "1." + "0" * TEXT_LEN_MAX,
        "\udcff",
        "1e300",
        "1_0",
        "\u0661",
        "1.",
        " 1",
    ],
)
def test_an_invalid_timeout_header_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        stated_timeout_s("x-request-timeout", value)
    assert refused.value.param == "x-request-timeout"


@pytest.mark.parametrize(
    "value", ["", "0", "1.5", "-1", "\u0661", "86400001", "0" * _DIGITS_MAX + "1", "1" * 5000]
)
def test_an_invalid_timeout_of_the_hop_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        stated_timeout_ms("x-penstock-deadline", value)
    assert refused.value.param == "x-penstock-deadline"


def test_timeouts_of_the_hop_are_in_milliseconds() -> None:
    assert stated_timeout_ms("x-penstock-deadline", "1500") == 1.5
    assert stated_timeout_ms("x-penstock-deadline", None) is None
