"""A rank's place, from the variables that torchrun sets."""

from __future__ import annotations

import pytest

from engine.runtime.parallel.rendezvous import Rendezvous, rendezvous_in
from shared.process.setting_values import ConfigError

TORCHRUN = {
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "node-0.models",
    "MASTER_PORT": "29500",
}


def test_what_torchrun_sets() -> None:
    place = Rendezvous(9, 16, 1, 8, "node-0.models", 29500)
    assert rendezvous_in(TORCHRUN, 16) == place
    agents = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert rendezvous_in(agents, 16) == Rendezvous(9, 16, 1, 8, "node-0.models", 29500, True, 2)


def test_one_rank_per_machine_where_nothing_else_is_said() -> None:
    without = {name: value for name, value in TORCHRUN.items() if not name.startswith("LOCAL")}
    assert rendezvous_in(without, 16) == Rendezvous(9, 16, 0, 1, "node-0.models", 29500)


@pytest.mark.parametrize(
    "env", [{}, {"RANK": "", "WORLD_SIZE": ""}, {"MASTER_ADDR": "a"}, {"RANK": "0", "WORLD_SIZE": "1"}]
)
def test_no_place_among_others(env: dict[str, str]) -> None:
    assert rendezvous_in(env, 1) is None


@pytest.mark.parametrize(
    ("wrong", "problems"),
    [
        ({"RANK": ""}, ["RANK: must be set, as RANK and WORLD_SIZE must be together"]),
        ({"WORLD_SIZE": ""}, ["WORLD_SIZE: must be set, as RANK and WORLD_SIZE must be together"]),
        ({"MASTER_PORT": ""}, ["MASTER_PORT: must be set, where WORLD_SIZE is more than 1"]),
        ({"MASTER_ADDR": ""}, ["MASTER_ADDR: must be set, to the host of rank 0"]),
        ({"MASTER_ADDR": "a\nb"}, ["MASTER_ADDR: must be a host's name or number, got 'a\\nb'"]),
        ({"MASTER_PORT": "70000"}, ["MASTER_PORT: must be at most 65535, got 70000"]),
        ({"MASTER_PORT": "0"}, ["MASTER_PORT: must be a whole number from 1, got '0'"]),
        (
            {"RANK": "-1", "LOCAL_RANK": "one"},
            [
                "RANK: must be a whole number from 0, got '-1'",
                "LOCAL_RANK: must be a whole number from 0, got 'one'",
            ],
        ),
        ({"RANK": "16"}, ["RANK: must be below WORLD_SIZE, which is 16, got 16"]),
        ({"WORLD_SIZE": "12"}, ["WORLD_SIZE: must be --tensor-parallel-size, which is 16, got 12"]),
        ({"WORLD_SIZE": "9" * 30}, ["WORLD_SIZE: must be a whole number from 1, got '" + "9" * 30 + "'"]),
        ({"LOCAL_WORLD_SIZE": "17"}, ["LOCAL_WORLD_SIZE: must be at most WORLD_SIZE, which is 16, got 17"]),
        ({"LOCAL_RANK": "8"}, ["LOCAL_RANK: must be below LOCAL_WORLD_SIZE, which is 8, got 8"]),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "", "LOCAL_WORLD_SIZE": ""},
            ["WORLD_SIZE: must be --tensor-parallel-size, which is 16, got 1"],
        ),
    ],
    ids=str,
)
def test_a_wrong_variable_is_named(wrong: dict[str, str], problems: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        rendezvous_in({**TORCHRUN, **wrong}, 16)
    assert raised.value.problems == problems
