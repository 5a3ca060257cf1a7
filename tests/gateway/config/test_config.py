"""The configuration, and reading keys and tenants again."""

from __future__ import annotations

import asyncio
import io
import os
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.config.accounting import DAYS_MAX
from gateway.config.edge import AUDIENCES_MAX, ISSUERS_MAX, LABEL_LEN_MAX, LABELS_MAX
from gateway.config.quotas import BUDGET_MAX, MODEL_LIMITS_MAX, QUOTA_MAX
from gateway.config.timeouts import TimeoutsConfig
from gateway.config.whole import ENV_PREFIX, FALLBACKS_MAX, GONE, PASSED_MAX, WORKERS_MAX, load, timeouts_of
from gateway.directory.accounts import POLL_S, SETTLED_POLLS, AccountsReader
from gateway.identity.caller import Principal
from gateway.identity.keys import KeyTable, hash_key
from shared.process import logs
from shared.process.setting_values import ConfigError
from shared.process.settings import NAME_LEN_MAX, variable_of
from shared.wire.errors import Unauthenticated
from shared.wire.shapes import BODY_LEN_MAX
from tests.fakes import VirtualClock
from tests.gateway.conftest import settings, until

FULL = f"""
[listen]
host = "0.0.0.0"
port = 8080
tls = {{ cert = "cert.pem", key = "key.pem" }}

[timeouts]
first_token_s = 5

[[models]]
name = "tiny"
aliases = ["small", "*"]
replicas = ["http://engine-0:8001", "http://engine-1:8001/base"]
upstream_model = "demo"
timeouts = {{ first_token_s = 300, total_s = 3600 }}

[[tenants]]
id = "acme"
models = ["tiny"]
limits = {{ requests_per_min = 60, tokens_per_min = 10_000, concurrent = 4, token_budget = 1_000_000 }}
timeouts = {{ total_s = 60, slow_client_s = 5 }}

[[keys]]
id = "k1"
hash = "{hash_key("x")}"
tenant = "acme"
expires = 2030-01-31T00:00:00Z
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_whole_file(tmp_path: Path) -> None:
    config = load(write(tmp_path / "gateway.toml", FULL), {"PENSTOCK_GATEWAY_LISTEN__PORT": "9000"})
    assert config.listen.port == 9000
    assert config.listen.tls is not None
    assert config.timeouts.first_token_s == 5
    assert config.models[0].aliases == ("small", "*")
    assert config.tenants[0].limits.tokens_per_min == 10_000
    assert config.keys[0].expires is not None
    assert "sha256" not in repr(config)


def test_timeouts_of_tenant_and_model_win_over_everybodys(tmp_path: Path) -> None:
    config = load(write(tmp_path / "gateway.toml", FULL), {})
    [model], [tenant] = config.models, config.tenants
    assert timeouts_of(config.timeouts, model) == TimeoutsConfig(first_token_s=300, total_s=3600)
    theirs = TimeoutsConfig(first_token_s=300, total_s=60, slow_client_s=5)
    assert timeouts_of(config.timeouts, model, tenant) == theirs


def test_everything_that_is_wrong_is_told_at_once() -> None:
    bad = settings(
        "http://a:1",
        listen={"port": 70_000},
        timeouts={"total_s": 0, "nonsense": 1},
        keys=[{"id": "bad id", "hash": "sha256:zz", "tenant": "acme"}],
        admission={"unknown_fields": "perhaps"},
        model={"timeouts": {"connect_s": -1}},
        tenant={"timeouts": {"first_token_s": "soon", "drain_s": 5}},
    )
    with pytest.raises(ConfigError) as caught:
        load(bad, {})
    told = "\n".join(caught.value.problems)
    for path in ("listen.port", "timeouts.total_s", "timeouts.nonsense", "keys[0].id", "keys[0].hash"):
        assert path in told
    assert "admission.unknown_fields" in told
    assert "models[0].timeouts.connect_s" in told
    assert "tenants[0].timeouts.first_token_s" in told
    assert "tenants[0].timeouts.drain_s: there is no such setting" in told, "it is no request's"


def test_a_setting_that_is_gone_says_what_became_of_it() -> None:
    sections = settings("http://a:1")
    for path, told in GONE.items():
        document: Any = 1
        for name in reversed(path.split(".")):
            document = {name.removesuffix("[]"): [document] if name.endswith("[]") else document}
        with pytest.raises(ConfigError, match=f": this setting is {re.escape(told)}"):
            load({**sections, **document}, {})
        if "[]" not in path:
            with pytest.raises(ConfigError, match=re.escape(told)):
                load(sections, {variable_of(path, ENV_PREFIX): "1"})


@pytest.mark.parametrize("name", ["two\nlines", "a\rb", "tab\t", " ", "\x7f"])
def test_a_models_name_fits_a_header(name: str) -> None:
    """That of a fallback is in its answers."""
    with pytest.raises(ConfigError) as caught:
        load(settings("http://a:1", model={"name": name}), {})
    assert [*caught.value.problems] == ["models[0].name: must be a name of 1 to 256 printable characters"]


@pytest.mark.parametrize("expires", ["2030-01-01T00:00:00", datetime(2030, 1, 1)])
def test_a_moment_without_a_zone_is_none(expires: object) -> None:
    key = {"id": "k", "hash": hash_key("x"), "tenant": "t", "expires": expires}
    with pytest.raises(ConfigError, match=r"keys\[0\]\.expires: must be a moment with its zone"):
        load(settings("http://a:1", keys=[key]), {})


def test_contradictions_are_told_at_once() -> None:
    key = {"id": "k", "hash": hash_key("x"), "tenant": "nobody", "models": ["ghost"]}
    bad = settings(
        "ftp://a",
        models=[
            {"name": "a", "replicas": ["ftp://a"], "aliases": ["b"]},
            {"name": "b", "replicas": ["http://user@host"]},
        ],
        tenants=[{"id": "t"}, {"id": "t", "models": ["ghost"]}],
        keys=[key, key, {"id": "twin", "hash": hash_key("x"), "tenant": "t"}],
    )
    with pytest.raises(ConfigError) as caught:
        load(bad, {})
    assert sorted(caught.value.problems) == sorted(
        [
            "models: 'b' is given 2 times",
            "tenants: 't' is given 2 times",
            "keys: 'k' is given 2 times",
            "keys: 'k' and 'twin' have the same secret",
            "models.a: 'ftp://a' is no base URL like http://host:port",
            "models.b: 'http://user@host' is no base URL like http://host:port",
            "tenants.t.models: there is no model 'ghost'",
            "keys.k.models: there is no model 'ghost'",
            "keys.k.tenant: there is no tenant 'nobody'",
            "keys.k.models: there is no model 'ghost'",
            "keys.k.tenant: there is no tenant 'nobody'",
        ]
    )


@pytest.mark.parametrize(
    "url", ["", "a:1", "http://", "http://a:b", "http://a:0", "http://[::1", "http://a?q"]
)
def test_what_is_no_base_url_is_told(url: str) -> None:
    with pytest.raises(ConfigError, match="is no base URL"):
        load(settings(url), {})


@pytest.mark.parametrize("url", ["http://a:1/v1", "https://a/v1/", "http://[::1]:1/sub/v1"])
def test_a_base_url_with_the_beginning_of_the_paths_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="leave out the /v1"):
        load(settings(url), {})
    load(settings(f"{url.rstrip('/')}/account"), {})


def named(reader: AccountsReader, authorization: str, now_s: float) -> Principal:
    identity = reader.now.identity
    assert isinstance(identity, KeyTable)
    return identity.authenticate(authorization, now_s)


async def test_a_revoked_key_is_refused_within_five_seconds(tmp_path: Path) -> None:
    path = write(tmp_path / "gateway.toml", FULL)
    clock = VirtualClock()
    reader = AccountsReader(load(path, {}), path, clock)
    assert named(reader, "Bearer x", 0).key == "k1"
    watching = asyncio.create_task(reader.watch())
    write(tmp_path / "new", FULL.replace('id = "k1"', 'id = "k1"\ndisabled = true')).replace(path)
    before = reader.now
    await until(lambda: clock.sleeping == 1)
    assert POLL_S <= 5
    clock.advance(POLL_S)
    await until(lambda: reader.now is not before)
    with pytest.raises(Unauthenticated, match="revoked"):
        named(reader, "Bearer x", 0)
    watching.cancel()


async def test_a_file_that_is_written_in_place_is_never_taken_in_its_half(tmp_path: Path) -> None:
    path = write(tmp_path / "gateway.toml", FULL)
    clock = VirtualClock()
    reader = AccountsReader(load(path, {}), path, clock)
    watching = asyncio.create_task(reader.watch())
    extra = f'[[keys]]\nid = "k2"\nhash = "{hash_key("y")}"\ntenant = "acme"\n'
    before = reader.now

    async def polled() -> None:
        await until(lambda: clock.sleeping == 1)
        clock.advance(POLL_S)
        await until(lambda: clock.sleeping == 1)

    for written in ("[[models]]\n", FULL, FULL + extra):
        write(path, written)
        for _ in range(SETTLED_POLLS):
            await polled()
            assert reader.now is before
    await polled()
    assert named(reader, "Bearer y", 0).key == "k2"
    watching.cancel()


@pytest.mark.parametrize("kind", ["device", "fifo", "directory"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "gateway.toml"
    match kind:
        case "device":
            path.symlink_to(os.devnull)
        case "fifo":
            os.mkfifo(path)
        case _:
            path.mkdir()
    with pytest.raises(ConfigError, match=f"{path}: not a regular file"):
        load(path, {})


@pytest.mark.parametrize("text", ["not toml [", FULL.replace("sha256:", "md5:"), None], ids=range(3))
async def test_a_file_that_is_wrong_changes_nothing(tmp_path: Path, text: str | None) -> None:
    path = write(tmp_path / "gateway.toml", FULL)
    reader = AccountsReader(load(path, {}), path, VirtualClock())
    before = reader.now
    if text is None:
        os.unlink(path)
    else:
        write(path, text)
    await reader.reload()
    assert reader.now is before


async def test_keys_and_tenants_alone_are_read_again(tmp_path: Path, log: io.StringIO) -> None:
    path = write(tmp_path / "gateway.toml", FULL)
    reader = AccountsReader(load(path, {}), path, VirtualClock())
    higher = 'id = "acme"\nservice_tier = "priority"\nqueue_timeout_s = 3600'
    write(path, FULL.replace('id = "acme"', higher, 1))
    await reader.reload()
    tenant = reader.now.tenants.tenant(named(reader, "Bearer x", 0))
    assert (tenant.service_tier, tenant.queue_timeout_s) == ("priority", 3600)
    extra = f'[[keys]]\nid = "k2"\nhash = "{hash_key("y")}"\ntenant = "acme"\n'
    write(path, FULL.replace('name = "tiny"', 'name = "tiny"\n') + extra)
    await reader.reload()
    assert named(reader, "Bearer y", 0).key == "k2"
    principal = named(reader, "Bearer x", 0)
    assert reader.now.tenants.resolve(principal, "small").upstream_model == "demo"
    assert msgspec.json.encode(reader.config.models)
    write(path, FULL.replace("first_token_s = 5", "first_token_s = 6"))
    await reader.reload()
    assert reader.config.timeouts.first_token_s == 5
    logs.close()
    lines = [msgspec.json.decode(line) for line in log.getvalue().splitlines()]
    events = [line["event"] for line in lines if line["event"].startswith("config.")]
    assert events == ["config.reloaded", "config.reloaded", "config.restart_needed", "config.reloaded"]
    [line] = [line for line in lines if line["event"] == "config.restart_needed"]
    assert line["settings"] == ["timeouts.first_token_s"]


async def test_a_variable_wins_over_the_file_when_it_is_read_again_too(tmp_path: Path) -> None:
    path, env = write(tmp_path / "gateway.toml", FULL), {"PENSTOCK_GATEWAY_KEYS": "[]"}
    reader = AccountsReader(load(path, env), path, VirtualClock(), env=env)
    assert await reader.reload() == []
    assert reader.config == load(path, env) != load(path, {})


async def test_what_takes_a_restart_is_named(tmp_path: Path, log: io.StringIO) -> None:
    path = write(tmp_path / "gateway.toml", FULL)
    reader = AccountsReader(load(path, {}), path, VirtualClock())
    text = FULL.replace('upstream_model = "demo"', "").replace("port = 8080", "port = 9")
    write(
        path, text.replace('"key.pem"', '"other.pem"') + '[[models]]\nname = "new"\nreplicas = ["http://a:1"]'
    )
    await reader.reload()
    logs.close()
    [line] = [line for line in map(msgspec.json.decode, log.getvalue().splitlines()) if "settings" in line]
    assert line["settings"] == ["models.tiny", "models.new", "listen.port", "listen.tls.key"]


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"hop": {"cert": "chain.pem"}}, "cert and key belong together"),
        ({"limits": {"request_memory": 2**20}}, "request_memory must be at least"),
        ({"accounting": {"file": "f", "webhook": "https://a:b", "webhook_secret": "env:X"}}, "https URL"),
        ({"accounting": {"file": "f", "webhook": "http://a", "webhook_secret": "env:X"}}, "https URL"),
        ({"accounting": {"webhook": "https://a", "webhook_secret": "env:X"}}, "webhook needs file"),
        ({"directory": {"store": "redis"}}, "needs url in"),
        ({"keys": [{"id": "k", "hash": hash_key("x"), "tenant": "gone"}]}, "there is no tenant 'gone'"),
    ],
)
def test_settings_that_do_not_go_together_are_told(section: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(settings("http://a:1") | section, {})
    assert told in str(caught.value)


ISSUER = {
    "id": "idp",
    "issuer": "https://idp",
    "audiences": ["a"],
    "algorithms": ["RS256"],
    "jwks_file": "keys.json",
}


def an_issuer(**fields: Any) -> dict[str, Any]:
    return {"issuers": [{**ISSUER, **fields}]}


def names(count: int) -> list[str]:
    return [f"n{number}" for number in range(count)]


BEYOND: dict[str, dict[str, Any]] = {
    "issuers": {"issuers": [{**ISSUER, "id": name} for name in names(ISSUERS_MAX + 1)]},
    "issuers[0].audiences": an_issuer(audiences=names(AUDIENCES_MAX + 1)),
    "keys[0].labels": {"keys": [{"labels": names(LABELS_MAX + 1)}]},
    "keys[0].labels[0]": {"keys": [{"labels": ["x" * (LABEL_LEN_MAX + 1)]}]},
    "tenants[0].limits.requests_per_min": {"tenant": {"limits": {"requests_per_min": QUOTA_MAX + 1}}},
    "tenants[0].limits.token_budget": {"tenant": {"limits": {"token_budget": BUDGET_MAX + 1}}},
    "tenants[0].model_limits": {"tenant": {"model_limits": [{"model": "tiny"}] * (MODEL_LIMITS_MAX + 1)}},
    "models[0].fallback": {"model": {"fallback": names(FALLBACKS_MAX + 1)}},
    "models[0].pass_fields": {"model": {"pass_fields": names(PASSED_MAX + 1)}},
    "models[0].name": {"model": {"name": "x" * (NAME_LEN_MAX + 1)}},
    "workers": {"workers": WORKERS_MAX + 1},
    "accounting.days": {"accounting": {"days": DAYS_MAX + 1}},
    "limits.body_len_max": {"limits": {"body_len_max": BODY_LEN_MAX + 1}},
}


@pytest.mark.parametrize("field", BEYOND)
def test_what_is_beyond_a_settings_bound_is_refused_by_its_name(field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(settings("http://a:1", **BEYOND[field]), {})
    assert [problem for problem in caught.value.problems if problem.startswith(f"{field}: must ")]
