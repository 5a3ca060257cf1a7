from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

from shared.process.setting_values import ConfigError, load

Port = Annotated[int, Meta(ge=1, le=65_535)]


@dataclass(frozen=True, slots=True)
class Tls:
    cert: str


@dataclass(frozen=True, slots=True)
class Listen:
    host: str = "127.0.0.1"
    port: Port = 8000
    tls: Tls | None = None


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    replicas: Annotated[tuple[str, ...], Meta(min_length=1)]
    expires: datetime | None = None


@dataclass(frozen=True, slots=True)
class Config:
    models: Annotated[tuple[Model, ...], Meta(min_length=1, max_length=2)]
    listen: Listen = Listen()
    unknown: Literal["ignore", "refuse"] = "ignore"
    ratio: float = 0.5
    on: bool = False


MODELS = [{"name": "m", "replicas": ["http://a"]}]


def read(document: Mapping[str, Any], **env: str) -> Config:
    return load(Config, document, {"OTHER_PORT": "x", **env}, "APP_")


def problems(document: Mapping[str, Any], **env: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(document, **env)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def test_defaults_and_sections(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        """
        on = true
        ratio = 1
        [listen]
        port = 81
        tls = {cert = "c.pem"}
        [[models]]
        name = "m"
        replicas = ["http://a", "http://b"]
        expires = 2027-01-01T00:00:00Z
        """
    )
    assert load(Config, file, {}, "APP_") == Config(
        models=(Model("m", ("http://a", "http://b"), datetime(2027, 1, 1, tzinfo=UTC)),),
        listen=Listen(port=81, tls=Tls("c.pem")),
        on=True,
        ratio=1.0,
    )


def test_the_environment_wins_over_the_file() -> None:
    config = read(
        {"models": MODELS, "listen": {"port": 1, "host": "a"}},
        APP_LISTEN__PORT="99",
        APP_LISTEN__TLS__CERT="123",
        APP_ON="true",
        APP_UNKNOWN="refuse",
    )
    assert config.listen == Listen("a", 99, Tls("123"))
    assert (config.on, config.unknown) == (True, "refuse")


def test_the_environment_can_say_everything() -> None:
    config = read({}, APP_MODELS='[{name = "m", replicas = ["http://a"]}]')
    assert config.models == (Model("m", ("http://a",)),)


def test_every_bad_value_is_reported_at_once() -> None:
    found = problems(
        {
            "models": [{"name": 1, "replicas": []}, {"nmae": "m"}],
            "listen": {"port": 0, "hots": "x"},
            "unknown": "maybe",
            "extra": 1,
        },
        APP_RATIO="much",
        APP_LISTEN__PROT="1",
        APP_NOPE="1",
    )
    assert [problem.partition(":")[0] for problem in found] == [
        "extra",
        "models[0].name",
        "models[0].replicas",
        "models[1].nmae",
        "models[1].name",
        "models[1].replicas",
        "listen.hots",
        "listen.port",
        "unknown",
        "APP_RATIO",
        "APP_LISTEN__PROT",
        "APP_NOPE",
    ]
    assert "listen.port: must be a whole number from 1 to 65535" in found
    assert "models[1].name: is required" in found
    assert "listen.hots: there is no such setting; did you mean listen.host?" in found


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({}, "models: is required"),
        ({"models": []}, "models: must be a list of 1 to 2 entries"),
        ({"models": MODELS * 3}, "models: must be a list of 1 to 2 entries"),
        ({"models": MODELS, "listen": 1}, "listen: must be a table"),
        ({"models": 1}, "models: must be a list of 1 to 2 entries"),
        ({"models": [1]}, "models[0]: must be a table"),
        ({"models": MODELS, "on": 1}, "on: must be true or false"),
        ({"models": [{"name": "m", "replicas": ["a", 1]}]}, "models[0].replicas[1]: must be a text"),
    ],
)
def test_a_problem_says_where_and_what(document: Mapping[str, Any], problem: str) -> None:
    assert problems(document) == [problem]


@pytest.mark.parametrize("content", [b"a = ", b"\xff", b"x = " + b"[" * 100_000, None])
def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "c.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"c\.toml: "):
        load(Config, file, {}, "APP_")


def test_nothing_of_the_values_is_shown() -> None:
    """A configuration holds secrets."""
    assert "hunter2" not in str(problems({"models": MODELS, "listen": {"port": "hunter2"}, "unknown": 5}))


def test_a_misspelt_variable_is_answered_with_the_one_that_is_meant() -> None:
    told = problems({"models": MODELS}, APP_LISTEN__PROT="1", APP_LISTEN__TLS__CRET="x", APP_MODLES="[]")
    assert "APP_LISTEN__PROT: there is no such setting; did you mean APP_LISTEN__PORT?" in told
    assert "APP_LISTEN__TLS__CRET: there is no such setting; did you mean APP_LISTEN__TLS__CERT?" in told
    assert "APP_MODLES: there is no such setting; did you mean APP_MODELS?" in told


def test_an_empty_variable_counts_as_unset() -> None:
    assert read({"models": MODELS}, APP_LISTEN__HOST="", APP_RATIO="") == read({"models": MODELS})


def test_kubernetes_service_links_set_nothing() -> None:
    links = {"APP_SERVICE_HOST": "10.0.0.1", "APP_PORT": "tcp://10.0.0.1:80", "APP_PORT_80_TCP_PORT": "80"}
    assert read({"models": MODELS}, **links) == read({"models": MODELS})


# -- what the whole says beside what its parts say ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checked:
    listen: Listen = Listen()
    names: tuple[str, ...] = ()
    default: str | None = None
    ratio: float = 0.5

    def __post_init__(self) -> None:
        found = []
        if self.default is not None and self.default not in self.names:
            found.append(f"default: {self.default!r} is none of names")
        if self.listen.tls is None and self.ratio > 1:
            found.append("ratio: above 1 needs tls")
        if found:
            raise ConfigError(found)


def checked_problems(document: Mapping[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(Checked, document, {}, "APP_")
    return [problem.partition(":")[0] for problem in caught.value.problems]


def test_what_parts_contradict_is_told_beside_what_is_wrong_within_them() -> None:
    document = {"listen": {"port": 0}, "names": ["a"], "default": "b", "ratio": 2}
    assert checked_problems(document) == ["listen.port", "default", "ratio"]


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"names": "a", "default": "b"}, ["names"]),
        ({"nmes": ["b"], "default": "b"}, ["nmes"]),
        ({"listen": {"tls": {}}, "ratio": 2}, ["listen.tls.cert"]),
    ],
)
def test_what_is_only_missing_since_it_is_wrong_is_not_told(
    document: dict[str, Any], told: list[str]
) -> None:
    assert checked_problems(document) == told
