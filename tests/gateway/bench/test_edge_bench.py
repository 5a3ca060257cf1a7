"""The benches of the public listener and of faults: what they measure, and their statistics."""

from __future__ import annotations

import random
from dataclasses import replace
from http import HTTPStatus

import pytest

from tests.bench.client import TimedRequest
from tests.bench.figures import Figure
from tests.bench.gateway import edge, faults, revoking, rotation
from tests.bench.gateway.mutations import mutations
from tests.bench.gateway.revoking import Took
from tests.bench.gateway.rotation import IN_HASTE, IN_TURN, KEYS, Asked, Plan
from tests.bench.gateway.subjects import gateway, paced_engine


@pytest.mark.nightly
async def test_mutated_requests_are_sent_over_sockets() -> None:
    async with paced_engine(2.0) as engine, gateway(engine) as subject:
        told = await mutations(subject, 500, patience_s=2.0)  # enough on a machine that does much else
    figures = {figure.name.partition(": ")[2]: figure for figure in told}
    assert [figures[f"answered with {what}"].value for what in ("5xx", "what is no HTTP")] == [0, 0]
    assert min(figures[f"answered with {what}"].value or 0 for what in ("2xx", "4xx")) > 20, "both happen"


def test_welchs_t_tells_a_difference_from_noise() -> None:
    draw = random.Random(7)
    one, same, other = ([round(draw.gauss(mean, 50)) for _ in range(20_000)] for mean in (900, 900, 905))
    assert abs(edge.welch_t(one, same)) < 4.5
    assert abs(edge.welch_t(one, other)) > 4.5


REFUSED = ("rotation: false 401", "rotation: not served")


def by_name(figures: list[Figure]) -> dict[str, float | None]:
    return {figure.name: figure.value for figure in figures}


@pytest.mark.nightly
async def test_whoever_rotates_refuses_nobody() -> None:
    plan = Plan(50, 0.5, 3.0, in_turn_s=(0.5,), in_haste_s=(0.5, 2.0), keys_every_s=0.2, overlap_s=0.5)
    plan = replace(plan, made_up_rate=10, flooded_s=2.0, flooded_turns_s=(0.5,))
    async with paced_engine(2.0) as engine:
        figures = by_name(await rotation.rotation(engine, plan))
    assert [figures[name] for name in REFUSED] == [0, 0]
    assert figures["rotation beside made-up keys: not served"] == 0
    assert (figures["rotation beside made-up keys: made up, refused"] or 0) > 0


def test_false_refusals_are_told_from_other_failures() -> None:
    def asked(kind: str, status: int, taken_s: float = 0.001) -> Asked:
        return Asked(kind, TimedRequest(0.0, status=status, ended_at=taken_s))

    served = [asked(KEYS, HTTPStatus.OK)] * 3
    refused = [(IN_HASTE, 503), (IN_HASTE, 401), (IN_TURN, 503), (KEYS, 0), (KEYS, 401)]
    beside = [asked(KEYS, HTTPStatus.OK, 0.002), *(asked(*one) for one in refused)]
    figures = by_name(rotation.figures_of(served, beside, Plan(rate=3, beside_s=2.0)))
    assert figures["rotation: requests/s"] == 3
    assert [figures[name] for name in REFUSED] == [2, 5]
    assert figures["rotation: p99, beside / alone"] == 2


def test_the_longest_of_all_times_counts_and_a_stream_without_a_reason_is_found() -> None:
    took = [Took(0.1, 2.0, 0.3, is_named=True), Took(1.0, 0.2, 6.0, is_named=False)]
    figures = revoking.figures_of(took)
    assert [figure.value for figure in figures] == [1.0, 2.0, 6.0, 0.5]
    assert [figure.ok for figure in figures] == [True, True, False, False]


def test_the_time_to_recover_is_when_slow_first_events_end() -> None:
    before = [(-i / 100, 0.05) for i in range(1, 300)]
    well = [(i / 100, 0.06) for i in range(900)]
    assert faults.recovered_s([*before, *well]) == 0.0
    slow = [(i / 100, 3.0 if i < 150 else 0.06) for i in range(900)]
    assert faults.recovered_s([*before, *slow]) == pytest.approx(1.5)
    never = [(i / 100, 3.0) for i in range(900)]
    assert faults.recovered_s([*before, *never]) >= 8.5
    assert faults.recovered_s(slow) == pytest.approx(1.5), "a fault from the beginning on"
