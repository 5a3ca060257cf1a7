"""Which environment variables are settings, which are somebody else's, and which are mistakes."""

from __future__ import annotations

import argparse

import pytest

from shared.arguments import Parser, count
from shared.environment import apply_environment, settings_in

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


def parser() -> Parser:
    made = Parser(prog="prog")
    made.add_argument("--port", type=count(0), default=1)
    made.add_argument("--name", required=True)
    made.add_argument("--size", type=int, choices=(16, 32), default=16)
    made.add_argument("--no-cache", dest="cache", action="store_false")
    made.add_argument("--eager", action="store_true")
    made.add_argument("--overlap", action=argparse.BooleanOptionalAction)
    return made


def parsed(argv: list[str], **env: str) -> argparse.Namespace:
    made = parser()
    apply_environment(made, {PREFIX + name: value for name, value in env.items()}, PREFIX)
    return made.parse_args(argv)


@pytest.mark.parametrize("variable", SERVICE_LINKS)
def test_a_service_link_is_no_setting(variable: str) -> None:
    assert settings_in({variable: SERVICE_LINKS[variable]}, PREFIX) == {}


def test_what_only_resembles_a_service_link_is_a_setting() -> None:
    given = {"PORT": "8001", "PORT_RANGE": "1", "SERVICE": "x", "HOST": "tcp://10.0.0.1:8001"}
    assert settings_in({PREFIX + name: value for name, value in given.items()}, PREFIX) == given


def test_an_empty_variable_is_unset() -> None:
    assert settings_in({PREFIX + "NAME": ""}, PREFIX) == {}
    assert parsed(["--name", "n"], PORT="", CACHE="").port == 1


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
        (
            {"CACHE": "1", "NO_CACHE": "0"},
            "PENSTOCK_ENGINE_CACHE and PENSTOCK_ENGINE_NO_CACHE set the same option",
        ),
    ],
)
def test_a_mistake_is_named_as_a_wrong_option_is(
    env: dict[str, str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parsed(["--name", "n"], **env)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


def test_all_variables_that_set_nothing_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(["--name", "n"], PROT="1", NAEM="2")
    told = capsys.readouterr().err
    assert "PENSTOCK_ENGINE_PORT?" in told
    assert "PENSTOCK_ENGINE_NAME?" in told
