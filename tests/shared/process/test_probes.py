"""What each probe answers in each phase of a service."""

from __future__ import annotations

import msgspec
import pytest

from shared.process.lifecycle import Lifecycle, Phase
from shared.process.probes import Health, Probe, answer_probe

WAYS = {
    "starting": (),
    "ready": (Phase.READY,),
    "draining": (Phase.READY, Phase.DRAINING),
    "stopped": (Phase.READY, Phase.DRAINING, Phase.STOPPED),
    "failed": (Phase.READY, Phase.FAILED),
    "failed at the start": (Phase.FAILED,),
}
ANSWERS = {  # livez, readyz, startupz
    "starting": (200, 503, 503),
    "ready": (200, 200, 200),
    "draining": (200, 503, 200),
    "stopped": (200, 503, 200),
    "failed": (500, 503, 503),
    "failed at the start": (500, 503, 503),
}


def health_after(*way: Phase, problems: tuple[str, ...] = ()) -> Health:
    lifecycle = Lifecycle()
    for phase in way:
        lifecycle.to(phase)
    return Health(lifecycle, lambda: list(problems))


@pytest.mark.parametrize("way", WAYS)
def test_the_answers_follow_the_phase(way: str) -> None:
    health = health_after(*WAYS[way])
    for path, expected in zip(("/livez", "/readyz", "/startupz"), ANSWERS[way], strict=True):
        status, body = answer_probe(path, health, tells_problems=True)
        probe = msgspec.json.decode(body, type=Probe)
        assert (status, probe.ok, probe.phase) == (expected, expected == 200, way.split()[0]), path


def test_a_service_with_a_problem_lives_and_takes_no_requests() -> None:
    health = health_after(Phase.READY, problems=("quota store",))
    assert answer_probe("/livez", health, tells_problems=False)[0] == 200
    assert answer_probe("/readyz", health, tells_problems=False) == (503, b'{"phase":"ready","ok":false}')
    assert answer_probe("/readyz", health, tells_problems=True) == (
        503,
        b'{"phase":"ready","ok":false,"problems":["quota store"]}',
    )
