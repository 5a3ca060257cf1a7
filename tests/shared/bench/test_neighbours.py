"""What `python -m tests.bench neighbours` sends, and what it makes of what it sees."""

from __future__ import annotations

import tomllib

from gateway.config.whole import load
from shared.process.setting_values import to_toml
from tests.bench.client import TimedRequest
from tests.bench.gateway.attack import Law
from tests.bench.gateway.attackers import named
from tests.bench.gateway.attacks import ATTACKS, against
from tests.bench.gateway.neighbourhood import LIVE_MAX, REQUEST_MEMORY, gateway_config
from tests.bench.gateway.neighbours import _charged
from tests.bench.gateway.victim import Account, Cost
from tests.bench.memory_sums import core_memory_max, engine_memory_max, gateway_memory_max

DETAILS = b'"prompt_tokens_details": {"cached_tokens": %d}'
USAGE = b'{"usage": {"prompt_tokens": %d, ' + DETAILS + b', "completion_tokens": %d}}'


def test_every_attack_has_a_name_of_its_own_and_every_law_has_attacks() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    assert all(against(law) for law in Law)
    assert named(ATTACKS[-1].name) is ATTACKS[-1]


def test_the_gateways_file_is_a_configuration() -> None:
    config = load(tomllib.loads(to_toml(gateway_config(["http://127.0.0.1:1"]))), {})
    assert config == gateway_config(["http://127.0.0.1:1"])
    assert (config.limits.request_memory, config.limits.live_max) == (REQUEST_MEMORY, LIVE_MAX)


def test_charges_are_told_without_the_victims() -> None:
    victims = Account()
    stream = TimedRequest(0.0, event_times=[0.0], last_event=b"data: " + USAGE % (20, 16, 11))
    victims.add(stream, [TimedRequest(0.0, body=USAGE % (10, 0, 1))])
    assert victims.cost == Cost(31.0 + 11.0, 14.0 + 10.0)
    victims.merge(victims)
    assert _charged(Cost(684.0, 648.0).less(victims.cost)) == 1.0
    assert _charged(Cost(684.0, 48.0 + 199.0).less(victims.cost)) is None


def test_memory_grows_with_every_limit() -> None:
    least = gateway_memory_max(100, 10, 1, 5)
    assert least < gateway_memory_max(200, 10, 1, 5) < gateway_memory_max(200, 20, 1, 5)
    assert least < gateway_memory_max(100, 10, 1, 6)
    assert engine_memory_max(100, 10, 1) < engine_memory_max(100, 10, 2)
    least = core_memory_max(1000, 0, 1, 1, 2, 100)
    assert least < core_memory_max(1000, 1000, 1, 1, 2, 100)
    assert least < min(core_memory_max(1000, 0, 1, 1, 3, 100), core_memory_max(1000, 0, 1, 1, 2, 101))
