"""compose.yaml, read as Compose reads it: every service is limited, watched and confined, and every variable
has a default that .env.example shows."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config.whole import load
from gateway.identity.keys import hash_key
from helm.compose import first_token, start
from tests.ship.gateway_memory import container_max, size

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "compose.yaml").read_text()
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(TEXT)["services"]
OURS = {name for name in SERVICES if name.startswith(("gateway", "engine"))}
ENDS = {"first-token"}
"""What ends by itself, in the gateway's image."""
GATEWAY_FILES = sorted((ROOT / "helm/compose").glob("gateway*.toml"))


def value(text: str) -> str:
    """With each variable's default in its place."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(text))


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_limited_and_confined(name: str) -> None:
    service = SERVICES[name]
    assert re.fullmatch(r"\d+[mg]", value(service["mem_limit"]))
    assert float(value(service["cpus"])) > 0
    assert 0 < service["pids_limit"] <= 1024
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    assert service["logging"]["options"]["max-size"]
    if name not in OURS | ENDS:  # ours have a user of their own
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"])


@pytest.mark.parametrize("name", sorted(SERVICES.keys() - ENDS))
def test_every_service_is_watched(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    assert check["test"][0] == "CMD"
    assert {"interval", "timeout", "retries", "start_period"} <= check.keys()
    if name in OURS:
        assert check["test"][1:] == ["python", "-m", "shared.process.probe"]


@pytest.mark.parametrize("name", SERVICES)
def test_every_image_is_pinned(name: str) -> None:
    image = value(SERVICES[name]["image"])
    host, _, tag = image.rpartition(":")
    assert "/" in host, "a registry is named"
    assert tag not in ("", "latest")
    assert ("build" in SERVICES[name]) == (name in OURS)
    assert name in OURS | ENDS or re.search(r"\d+\.\d+\.\d+", tag)


def test_a_service_starts_after_what_it_needs() -> None:
    for service in SERVICES.values():
        for condition in service.get("depends_on", {}).values():
            assert condition == {"condition": "service_healthy"}
    assert SERVICES["gateway"]["depends_on"].keys() == {"redis"}


def test_ports_are_this_machines_unless_somebody_says_otherwise() -> None:
    for name, service in SERVICES.items():
        for port in service.get("ports", []):
            assert value(port).startswith("127.0.0.1:"), name
    assert "ports" not in SERVICES["redis"]


def test_nothing_is_written_where_it_may_not() -> None:
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            source, target, *mode = volume.split(":", 1)[0], *re.split(r":(?=/|ro$)", volume)[1:]
            assert not source.startswith("./") or mode == ["ro"], f"{name}: {target}"


def test_every_file_that_is_mounted_is_there() -> None:
    mounted = re.findall(r'"?(\./helm/[^:"]*)(?=:/)', value(TEXT))
    assert mounted
    for path in mounted:
        assert (ROOT / path).exists(), path


def test_every_variable_is_in_the_example_with_its_default() -> None:
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", TEXT))
    shown = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert shown == used
    assert len(re.findall(r"(?<!\$)\$\{", TEXT)) == len(re.findall(r"\$\{\w+:-", TEXT)), "all have a default"


@pytest.mark.parametrize("file", GATEWAY_FILES, ids=lambda path: path.name)
def test_the_gateways_files_fit_the_services(file: Path) -> None:
    config = load(file, {})
    assert not config.keys, "no key is the same for everybody"
    [model] = config.models
    for url in model.replicas:
        assert re.fullmatch(r"http://([\w-]+):8001", url)[1] in SERVICES  # type: ignore[index]
    assert config.listen.port == 8000
    assert config.admin.port == 9090
    grace_s = float(SERVICES["gateway"]["stop_grace_period"].removesuffix("s"))
    assert config.timeouts.drain_s < grace_s
    assert container_max(config) <= size(value(SERVICES["gateway"]["mem_limit"]))


def test_the_grace_of_a_stop_is_longer_than_the_drain() -> None:
    for name in OURS - {"gateway"}:
        drain_s = float(SERVICES[name]["environment"]["PENSTOCK_ENGINE_DRAIN_TIMEOUT_S"])
        assert drain_s < float(SERVICES[name]["stop_grace_period"].removesuffix("s"))


def test_the_first_start_makes_keys_and_the_next_has_the_same(tmp_path: Path) -> None:
    made = start.kept(tmp_path / "keys.json")
    assert start.kept(tmp_path / "keys.json") == made
    assert (tmp_path / "keys.json").stat().st_mode & 0o777 == 0o600
    for file in GATEWAY_FILES:
        config = load(file, start.variables(made))
        assert [key.hash for key in config.keys] == [hash_key(made["api"])]
        assert [key.hash for key in config.admin.keys] == [hash_key(made["admin"])]


def test_the_last_line_has_the_published_ports_and_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GATEWAY_PORT", "ADMIN_PORT", "GRAFANA_PORT"):
        monkeypatch.setenv(name, value(SERVICES["first-token"]["environment"][name]))
    *_, curl = first_token.told({"api": "sk_a", "admin": "sk_b"}, "demo").strip().splitlines()
    words = shlex.split(curl)
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    assert "Authorization: Bearer sk_a" in words
    assert json.loads(words[-1])["model"] == "demo"
