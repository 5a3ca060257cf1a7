"""The probes of a service: `/livez`, `/readyz` and `/startupz`.

| probe       | asks whether                              | if not |
|-------------|-------------------------------------------|--------|
| `/livez`    | a restart would not help                  | 500    |
| `/readyz`   | new requests are welcome                  | 503    |
| `/startupz` | the start is over, and did not fail       | 503    |

The status of a yes is 200. The body is the same for all: `{"phase": "ready", "ok": true}`, with `problems`
where there are any and the port is for operators: the gateway's admin port, and the engine's own. The
gateway's public port does not show them.

`HEAD` and `OPTIONS` are answered as `GET` is: by `OPTIONS` asks the check of HAProxy, unless it is told
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final

import msgspec
from msgspec import Struct

from shared.process.lifecycle import Lifecycle

METHODS: Final = ("GET", "HEAD", "OPTIONS")
"""The methods by which a probe may be asked for."""


class Health:
    """The health of a service."""

    __slots__ = ("lifecycle", "problems")

    def __init__(self, lifecycle: Lifecycle, problems: Callable[[], list[str]]) -> None:
        """`problems` returns sentences or names for operators, for all that keeps a ready service from
        serving."""
        self.lifecycle: Final = lifecycle
        self.problems: Final = problems


class Probe(Struct, frozen=True, omit_defaults=True):
    """The body of a probe's answer."""

    phase: str
    """The service's `shared.process.lifecycle.Phase`."""
    ok: bool
    """True if the answer's status is 200."""
    problems: list[str] = []


class _Question(Struct, frozen=True):
    holds: Callable[[Lifecycle, list[str]], bool]
    status_of_no: HTTPStatus


PROBES: Final[Mapping[str, _Question]] = {
    "/livez": _Question(lambda life, _: life.is_live, HTTPStatus.INTERNAL_SERVER_ERROR),
    "/readyz": _Question(
        lambda life, problems: life.is_ready and not problems, HTTPStatus.SERVICE_UNAVAILABLE
    ),
    "/startupz": _Question(
        lambda life, _: life.is_started and life.is_live,
        HTTPStatus.SERVICE_UNAVAILABLE,
    ),
}
"""The question of each probe, by path."""


def answer_probe(path: str, health: Health, *, tells_problems: bool) -> tuple[int, bytes]:
    """The status and the JSON of the answer to the probe at `path`, one of `PROBES`."""
    question, problems = PROBES[path], health.problems()
    ok = question.holds(health.lifecycle, problems)
    probe = Probe(health.lifecycle.phase.value, ok, problems if tells_problems else [])
    return HTTPStatus.OK if ok else question.status_of_no, msgspec.json.encode(probe)
