"""Declared settings, and what `penstock settings` makes of the services' own."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from engine.config import EngineConfig
from gateway.config.whole import GatewayConfig
from shared import cli
from shared.cli.service import CONFIGS
from shared.cli.settings import text_of
from shared.process.setting_values import load, to_toml
from shared.process.settings import Kind, Port, Rule, Text, Unit, problems_of, settings_of, walk
from shared.process.sizes import parse_size, show_size

ROOT = Path(__file__).parents[3]
SERVICES: dict[str, type] = {"gateway": GatewayConfig, "engine": EngineConfig}


@dataclass(frozen=True, slots=True)
class Inner:
    deadline_s: Annotated[float, Meta(gt=0.0, le=9.0)] = 2.5
    """How long
    it takes."""
    cache: bool = True


@dataclass(frozen=True, slots=True)
class Config:
    name: Text
    """A name."""
    inner: Inner = Inner()
    many: tuple[Inner, ...] = ()
    memory: Annotated[int, Meta(ge=1 << 20)] = 1 << 20


@dataclass(frozen=True, slots=True)
class Narrower(Inner):
    deadline_s: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0


def test_a_field_says_everything_about_its_setting() -> None:
    deadline, cache = settings_of(Inner, "inner")
    assert (deadline.path, deadline.name, deadline.default) == ("inner.deadline_s", "deadline_s", 2.5)
    assert (deadline.help, deadline.kind.unit) == ("How long it takes.", "seconds")
    assert deadline.kind.requirement == "be a number of seconds above 0 and at most 9"
    assert deadline.variable("APP_") == "APP_INNER__DEADLINE_S"
    assert cache.denial("APP_") == "APP_INNER__NO_CACHE"
    assert [setting.is_required for setting in settings_of(Config)] == [True, False, False, False]


def test_a_narrower_field_keeps_the_help() -> None:
    setting, _ = settings_of(Narrower)
    assert (setting.help, setting.kind.bounds) == ("How long it takes.", "above 0 and at most 1")


def test_sections_and_lists_are_walked_into() -> None:
    paths = [setting.path for setting in walk(Config)]
    assert paths == [
        *("name", "inner", "inner.deadline_s", "inner.cache"),
        *("many", "many[].deadline_s", "many[].cache", "memory"),
    ]
    assert [setting.path for setting in walk(Config) if setting.variable("APP_") is None] == paths[5:7]


@pytest.mark.parametrize(
    ("type_", "requirement"),
    [
        (Port, "be a port from 0 to 65535"),
        (bool | None, "be true or false"),
        (Literal[16, 32], "be one of 16, 32"),
        (Annotated[int, Meta(ge=3)] | None, "be a whole number of at least 3"),
        (Annotated[int, Unit("bytes"), Meta(ge=1 << 20, le=3 << 30)], "be a size from 1MiB to 3GiB"),
        (Annotated[str, Meta(pattern="^a$")], "be a text that matches ^a$"),
        (Annotated[str, Meta(max_length=3)], "be a text of at most 3 characters"),
        (Annotated[tuple[str, ...], Meta(min_length=2)], "be a list of at least 2 entries"),
        (Annotated[int, Rule("be even", lambda number: number % 2 == 0)], "be even"),
        (Inner | None, "be a table"),
    ],
)
def test_what_a_value_must_be_is_said_in_words(type_: Any, requirement: str) -> None:
    assert Kind.of(type_).requirement.startswith(requirement)


@pytest.mark.parametrize(
    ("type_", "text", "value"),
    [
        (float, ".5", 0.5),
        (float, "inf", float("inf")),
        (Literal[16, 32], "32", 32),
        (bool, "True", True),
        (Annotated[int, Unit("bytes")], "1.5KiB", 1536),
        (tuple[str, ...], '["a", "b"]', ("a", "b")),
        (str, "1", "1"),
    ],
)
def test_a_text_is_read_as_its_setting_is_declared(type_: Any, text: str, value: Any) -> None:
    kind = Kind.of(type_)
    assert kind.convert(kind.parse(text)) == value


def test_a_rule_holds_for_values_and_not_for_their_absence() -> None:
    kind = Kind.of(Annotated[int, Rule("be even", lambda number: number % 2 == 0)] | None)
    assert (kind.convert(None), kind.convert(2)) == (None, 2)
    with pytest.raises(ValueError, match="must be even"):
        kind.convert(3)


@pytest.mark.parametrize(("size", "shown"), [(1 << 50, "1024TiB"), (512 << 20, "512MiB"), (999, "999")])
def test_a_size_is_shown_as_it_can_be_written(size: int, shown: str) -> None:
    assert show_size(size) == shown
    assert parse_size(shown) == size


def test_values_that_were_made_in_code_are_checked_too() -> None:
    assert problems_of(Inner()) == []
    wrong = Inner(deadline_s=99.0, cache=1)  # type: ignore[arg-type]
    assert problems_of(wrong) == [
        "deadline_s: must be a number of seconds above 0 and at most 9",
        "cache: must be true or false",
    ]


def test_what_is_written_as_toml_is_read_again() -> None:
    config = Config('a "quoted"\\\x7f\nname', Inner(0.5), (Inner(1.0), Inner(cache=False)), 3 << 20)
    assert load(Config, tomllib.loads(to_toml(config)), {}, "APP_") == config
    assert to_toml(Config("n")) == 'name = "n"\n', "defaults are left out"


# -- the services' own ----------------------------------------------------------------------------


@pytest.mark.parametrize("service", CONFIGS)
def test_every_setting_has_a_help_that_says_a_sentence(service: str) -> None:
    for setting in walk(SERVICES[service]):
        assert setting.help.endswith("."), setting.path
        assert setting.default is not None or setting.kind.is_optional, setting.path


@pytest.mark.parametrize("service", CONFIGS)
def test_the_example_shows_every_setting_with_its_default(service: str) -> None:
    lines = [line for line in text_of(service, "toml").splitlines() if not line.startswith("##")]
    assert all(not line or line.startswith("# ") for line in lines), "nothing is set"
    settled = "\n".join(line[2:] for line in lines if not line.endswith("= ..."))
    open_ones = [line for line in lines if line.endswith("= ...")]
    shown = dict(values_of(tomllib.loads(settled)))
    values = [s for s in walk(SERVICES[service]) if s.kind.section is None and not is_list_of_tables(s.kind)]
    told = {s.path: s.default for s in values if not s.is_required and s.default is not None}
    assert shown == {path: list(told[path]) if isinstance(told[path], tuple) else told[path] for path in told}
    assert len(open_ones) == len(values) - len(told)


def is_list_of_tables(kind: Kind) -> bool:
    return kind.item is not None and kind.item.section is not None


def values_of(table: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        match value:
            case dict():
                yield from values_of(value, f"{path}{name}.")
            case [dict() as only]:
                yield from values_of(only, f"{path}{name}[].")
            case _:
                yield f"{path}{name}", value


@pytest.mark.parametrize("service", CONFIGS)
def test_the_schema_has_every_setting_with_its_bounds(service: str) -> None:
    schema = json.loads(text_of(service, "json-schema"))
    for setting in walk(SERVICES[service]):
        at: Any = schema
        for name in re.findall(r"\w+|\[\]", setting.path):
            at = next((option for option in at.get("anyOf", []) if option["type"] == "object"), at)
            at = at["items"] if name == "[]" else at["properties"][name]
        assert at["description"] == setting.help, setting.path
        options = at.get("anyOf", [at])
        limits = {name: limit for option in options for name, limit in option.items()}
        assert limits.get("minimum") == setting.kind.meta.ge, setting.path
        assert limits.get("exclusiveMinimum") == setting.kind.meta.gt, setting.path
        assert limits.get("maximum") == setting.kind.meta.le, setting.path
        assert set(limits.get("enum", ())) == set(setting.kind.choices), setting.path
    assert schema["additionalProperties"] is False


def test_the_command_prints_each_format(capsys: pytest.CaptureFixture[str]) -> None:
    for form in ("table", "json-schema", "toml"):
        assert cli.main(["settings", "engine", "--format", form]) == 0
        assert capsys.readouterr().out == text_of("engine", form)
    assert msgspec.json.decode(text_of("gateway", "json-schema"))["required"] == ["models"]
