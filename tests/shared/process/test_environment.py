"""Which environment variables are settings, which are somebody else's, and which are mistakes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from msgspec import Meta

from shared.process.arguments import Parser, add_settings
from shared.process.environment import OTHERS, settings_in, unread_in
from shared.process.setting_values import ConfigError, load
from shared.process.settings import Text

PREFIX = "PENSTOCK_ENGINE_"
SERVICE_LINKS = {
    "PENSTOCK_ENGINE_SERVICE_HOST": "10.0.0.1",
    "PENSTOCK_ENGINE_SERVICE_PORT": "8001",
    "PENSTOCK_ENGINE_SERVICE_PORT_HTTP": "8001",
    "PENSTOCK_ENGINE_PORT": "tcp://10.0.0.1:8001",
    "PENSTOCK_ENGINE_PORT_8001_TCP": "tcp://10.0.0.1:8001",
    "PENSTOCK_ENGINE_PORT_8001_TCP_PROTO": "tcp",
    "PENSTOCK_ENGINE_PORT_8001_TCP_PORT": "8001",
    "PENSTOCK_ENGINE_PORT_8001_TCP_ADDR": "10.0.0.1",
    "PENSTOCK_ENGINE_QWEN3_8B_SERVICE_HOST": "10.0.0.2",  # a Service called penstock-engine-qwen3-8b
    "PENSTOCK_ENGINE_QWEN3_8B_PORT": "udp://10.0.0.2:53",
    "PENSTOCK_ENGINE_QWEN3_8B_PORT_53_UDP_ADDR": "10.0.0.2",
}
"""What Kubernetes gives every container of a namespace with Services of such names."""


@dataclass(frozen=True, slots=True)
class Config:
    name: Text
    port: Annotated[int, Meta(ge=0, le=1 << 30)] = 1
    size: Literal[16, 32] = 16
    cache: bool = True
    eager: bool = False
    overlap: bool | None = None


def parsed(argv: list[str], **env: str) -> Config:
    parser = Parser(prog="prog")
    add_settings(parser, Config, {})
    variables = {PREFIX + name: value for name, value in env.items()}
    return load(Config, {}, variables, PREFIX, vars(parser.parse_args(argv)))


@pytest.mark.parametrize("variable", SERVICE_LINKS)
def test_a_service_link_is_no_setting(variable: str) -> None:
    assert settings_in({variable: SERVICE_LINKS[variable]}, PREFIX) == {}


def test_what_only_resembles_a_service_link_is_a_setting() -> None:
    given = {"PORT": "8001", "PORT_RANGE": "1", "SERVICE": "x", "HOST": "tcp://10.0.0.1:8001"}
    assert settings_in({PREFIX + name: value for name, value in given.items()}, PREFIX) == given


def test_an_empty_variable_is_unset() -> None:
    assert settings_in({PREFIX + "NAME": ""}, PREFIX) == {}
    assert parsed(["--name", "n"], PORT="", CACHE="").port == 1


def test_a_variable_that_nothing_reads_is_named() -> None:
    read = {"PENSTOCK_GATEWAY_X": "1", "PENSTOCK_ENGINE_X": "1", "PENSTOCK_MINE": "1", "PORT": "1"}
    links = {name.replace("_ENGINE", ""): value for name, value in SERVICE_LINKS.items()}
    unread = dict.fromkeys(("PENSTOCK_UP_PORT", "PENSTOCK_PORT", "PENSTOCK_ENGNE_X", "PENSTOCK_ENGINEX"), "1")
    env = {**read, **links, **dict.fromkeys(OTHERS, "1"), "PENSTOCK_EMPTY": ""}
    assert unread_in(env, ["PENSTOCK_MINE", None]) == []
    assert unread_in({**env, **unread}, ["PENSTOCK_MINE"]) == sorted(unread)


def test_variables_set_what_the_command_line_leaves_open() -> None:
    assert parsed([], NAME="env", PORT="7", SIZE="32") == parsed(
        ["--name", "env", "--port", "7", "--size", "32"]
    )
    assert parsed(["--name", "argv"], NAME="env").name == "argv"


@pytest.mark.parametrize(
    ("variable", "value", "cache"),
    [
        ("CACHE", "false", False),
        ("CACHE", "1", True),
        ("NO_CACHE", "1", False),
        ("NO_CACHE", "True", False),
        ("NO_CACHE", "0", True),
    ],
)
def test_a_switch_has_the_name_of_its_option_and_of_its_setting(
    variable: str, value: str, cache: bool
) -> None:
    assert parsed(["--name", "n"], **{variable: value}).cache is cache


def test_either_name_of_a_switch_that_can_be_turned_off() -> None:
    assert parsed(["--name", "n"]).overlap is None
    assert parsed(["--name", "n"], OVERLAP="1").overlap is True
    assert parsed(["--name", "n"], NO_OVERLAP="1").overlap is False
    assert parsed(["--name", "n", "--overlap"], NO_OVERLAP="1").overlap is True
    assert parsed(["--name", "n"], EAGER="true").eager is True


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"PROT": "1"}, "PENSTOCK_ENGINE_PROT: there is no such setting; did you mean PENSTOCK_ENGINE_PORT?"),
        ({"HELP": "1"}, "PENSTOCK_ENGINE_HELP: there is no such setting"),
        ({"NO_EAGER": "1"}, "PENSTOCK_ENGINE_NO_EAGER: there is no such setting"),
        ({"PORT": "x"}, "PENSTOCK_ENGINE_PORT: must be a whole number from 0 to 1073741824, got 'x'"),
        ({"SIZE": "24"}, "PENSTOCK_ENGINE_SIZE: must be one of 16, 32, got '24'"),
        ({"SIZE": "x"}, "PENSTOCK_ENGINE_SIZE: must be one of 16, 32, got 'x'"),
        ({"CACHE": "maybe"}, "PENSTOCK_ENGINE_CACHE: must be true or false, got 'maybe'"),
        ({"CACHE": "1", "NO_CACHE": "0"}, "PENSTOCK_ENGINE_CACHE and PENSTOCK_ENGINE_NO_CACHE"),
    ],
)
def test_a_mistake_is_named_as_a_wrong_option_is(env: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(["--name", "n"], **env)
    assert any(problem.startswith(says) for problem in caught.value.problems)


def test_all_mistakes_are_named_together_each_by_what_it_was_given_in() -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(["--size", "x"], PROT="1", NAEM="2", PORT="x")
    assert caught.value.problems == [
        "--name: is required",
        f"{PREFIX}PORT: must be a whole number from 0 to 1073741824, got 'x'",
        "--size: must be one of 16, 32, got 'x'",
        f"{PREFIX}PROT: there is no such setting; did you mean {PREFIX}PORT?",
        f"{PREFIX}NAEM: there is no such setting; did you mean {PREFIX}NAME?",
    ]
