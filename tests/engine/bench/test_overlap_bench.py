"""The bench's device that only takes time, under a clock that moves only when it is read or waited for;
steps with and without a record."""

from __future__ import annotations

import pytest

from engine.api.told.steps import StepRing
from engine.contract.messages import Plan, Want
from engine.core.step.results import StepBook
from tests.bench.engine import overlap, recording
from tests.bench.engine.overlap import DEVICE_STEP_S, DRAFT_S, OUTPUT_LEN, Device, repeating

HOST_S = DEVICE_STEP_S / 5


class Time:
    """A clock on which the host has worked for `HOST_S` whenever it is read."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now += HOST_S
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


@pytest.mark.parametrize(("overlapped", "idle_s_each"), [(False, HOST_S), (True, 0.0)])
def test_the_device_waits_for_the_host_only_where_steps_do_not_overlap(
    overlapped: bool, idle_s_each: float
) -> None:
    time = Time()
    device = Device(overlap.info(4), now=time.now, sleep=time.sleep)
    overlap.serve(device, 4, overlap=overlapped)
    assert device.steps == OUTPUT_LEN, "one prefills, and brings the first token"
    assert device.idle_s == pytest.approx(idle_s_each * (device.steps - 1))
    assert device.idle_share == pytest.approx(device.idle_s / (device.idle_s + DEVICE_STEP_S * OUTPUT_LEN))


def test_a_draft_takes_its_time_and_has_a_token() -> None:
    time = Time()
    device = Device(overlap.info(1), repeating(0.0), time.now, time.sleep)
    plan = Plan(0, [], [], [], [0], [64], [3], [Want.SAMPLE], drafts=[[5, 6]])
    assert device.launch(plan).collect().tokens == [1, 2, 3]
    assert device.busy_until == pytest.approx(HOST_S + DEVICE_STEP_S + 2 * DRAFT_S)


def test_a_round_of_each_is_measured_in_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[int] = []
    monkeypatch.setattr(recording, "PAIRS", 2)
    monkeypatch.setattr(recording, "STEPS", 5)
    monkeypatch.setattr(StepRing, "push", lambda _, step: pushed.append(step.number))
    with_us, without_us = recording.host_us(3)
    assert len(with_us) == len(without_us) == 2
    assert min(*with_us, *without_us) > 0
    assert pushed == [*range(1, 26)] * 2, "of the rounds with a book alone"
    assert issubclass(recording.NoBook, StepBook)
