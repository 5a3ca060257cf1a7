"""Gateways with quotas in Redis, as clients and operators meet them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.config.redis import RedisConfig
from gateway.config.whole import load
from gateway.identity.keys import hash_key
from shared.process.setting_values import ConfigError
from tests.gateway.conftest import KEY, OTHER_KEY, House, Open, error_of, settings, until
from tests.gateway.fake_engine import unary
from tests.gateway.redis_cluster import formed_cluster
from tests.gateway.redis_server import PATIENT_S, RedisServer, as_words, redis_server, tls_options

OTHER = {"headers": {"authorization": f"Bearer {OTHER_KEY}"}}
PASSWORD = "correct-horse-battery"
pytestmark = pytest.mark.hop("http2")


def in_redis(url: str, *, gateways: int = 1, **more: Any) -> dict[str, Any]:
    """The sections of a gateway that counts there, with keys that no other test has. `more`: of `[redis]`."""
    redis = {"url": url, "timeout_s": PATIENT_S, "key_prefix": f"test-{uuid.uuid4().hex}", **more}
    return {"redis": redis, "quotas": {"store": "redis", "gateways": gateways}}


async def opened(open_house: Open, sections: dict[str, Any], *tenants: dict[str, Any], **more: Any) -> House:
    house: House = await open_house(tenants=list(tenants), **sections, **more)
    house.engine.script = unary()
    return house


ACME = {"id": "acme", "limits": {"requests_per_min": 3, "tokens_per_min": 100_000}}
LOCAL = {"id": "other", "limits": {"requests_per_min": 4}, "quota_fail": "local"}


async def test_two_gateways_count_together(open_house: Open, redis: RedisServer) -> None:
    sections = in_redis(redis.url)
    houses = [await opened(open_house, sections, ACME, LOCAL) for _ in range(2)]
    statuses = []
    for i in range(5):
        async with houses[i % 2].chat(max_tokens=10) as answer:
            statuses.append(answer.status)
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
    assert statuses == [200, 200, 200, 429, 429]
    line = (await houses[0].lines(5))[0]  # of both: they write into one log
    assert line["settled_tokens"] == line["prompt_tokens"] + line["completion_tokens"]
    keys = redis.admin.keys(f"{sections['redis']['key_prefix']}*reservations")
    assert keys == [], "all is settled"


async def test_each_tenant_has_its_fail_mode_while_redis_is_down_and_the_gateway_recovers_by_itself(
    open_house: Open, own: RedisServer
) -> None:
    sections = in_redis(own.url, gateways=2)
    house = await opened(open_house, sections, ACME, LOCAL, admin={"port": 0})
    async with house.chat() as answer:
        assert answer.status == 200
    own.kill()
    async with house.chat() as answer:
        assert answer.status == 503
        assert (await error_of(answer))["code"] == "quota_unavailable"
        assert answer.headers["retry-after"] == "1"
    statuses = []
    for _ in range(3):
        async with house.chat(**OTHER) as answer:
            statuses.append(answer.status)
    assert statuses == [200, 200, 429], "two of the four requests a minute are this gateway's"
    metrics = f"http://127.0.0.1:{house.gateway.admin_port}/metrics"
    async with house.client.get(metrics) as answer:
        text = await answer.text()
    assert "penstock_gateway_quota_store_up 0.0" in text
    assert 'penstock_gateway_quota_without_store_total{fail="local"}' in text
    own.start()
    await until(lambda: house.store_is_well)
    async with house.chat() as answer:
        assert answer.status == 200


async def test_a_gateway_that_starts_without_its_redis_is_not_ready_until_it_is_there(
    open_house: Open, own: RedisServer
) -> None:
    own.kill()
    house = await opened(open_house, in_redis(own.url), ACME, {**LOCAL, "quota_fail": "closed"})
    async with house.client.get(f"{house.url}/readyz") as probe:
        assert probe.status == 503
    own.start()
    await until(lambda: house.store_is_well)
    async with house.client.get(f"{house.url}/readyz") as probe:
        assert probe.status == 200


async def test_a_cluster_that_is_partly_down_is_served_by_gateways_that_stay_ready(open_house: Open) -> None:
    """A node is down for all gateways: were they not ready then, nobody would be for the other tenants."""
    async with formed_cluster() as cluster:
        dead, served, _ = cluster.tenants
        tenants = [{"id": name, "limits": {"concurrent": 9}} for name in (dead, served)]
        keys = [{"id": "k1", "hash": hash_key(KEY), "tenant": dead}]
        keys += [{"id": "k2", "hash": hash_key(OTHER_KEY), "tenant": served}]
        sections = in_redis(cluster.url, cluster=True)
        house = await opened(open_house, sections, *tenants, keys=keys, admin={"port": 0})
        guarded = house.gateway._guarded
        assert guarded is not None
        assert guarded.is_well
        cluster.nodes[0].kill()
        async with house.chat() as answer:
            assert answer.status == 503
        async with house.chat(**OTHER) as answer:
            assert answer.status == 200
        async with house.client.get(f"{house.url}/readyz") as probe:
            assert probe.status == 200
        metrics = f"http://127.0.0.1:{house.gateway.admin_port}/metrics"
        async with house.client.get(metrics) as answer:
            assert "penstock_gateway_quota_store_up 0.0" in await answer.text(), "operators are told"
        for node in cluster.nodes[1:]:
            node.kill()
        await until(lambda: not guarded.is_partly_well)
        async with house.client.get(f"{house.url}/readyz") as probe:
            assert probe.status == 503


async def test_an_acl_user_that_may_use_its_own_keys_alone_is_enough(
    open_house: Open, own: RedisServer, tmp_path: Path
) -> None:
    sections = in_redis(own.url, username="penstock", password=f"file:{tmp_path / 'password'}")
    (tmp_path / "password").write_text(PASSWORD + "\n")
    own.admin.acl_setuser(
        "penstock",
        enabled=True,
        passwords=[f"+{PASSWORD}"],
        keys=[f"{sections['redis']['key_prefix']}:*"],
        categories=["+@read", "+@write", "+@scripting", "-@dangerous"],
        commands=["+time", "+client|setname"],
    )
    own.admin.acl_setuser("default", enabled=False)
    house = await opened(open_house, sections, ACME, LOCAL)
    async with house.chat() as answer:
        assert answer.status == 200
    assert PASSWORD not in house.log.getvalue()


@contextmanager
def redis_with_tls(directory: Path, *, asks_clients: bool) -> Iterator[RedisServer]:
    """A server with the files of `tls_options`."""
    options = {**tls_options(directory), "tls-auth-clients": "yes" if asks_clients else "no"}
    with redis_server(*as_words(options), tls=True) as server:
        yield server


async def test_redis_over_tls(open_house: Open, tmp_path: Path) -> None:
    with redis_with_tls(tmp_path, asks_clients=False) as own:
        url = own.url.replace("redis:", "rediss:")
        house = await opened(open_house, in_redis(url, ca=str(tmp_path / "ca.pem")), ACME, LOCAL)
        async with house.chat() as answer:
            assert answer.status == 200
        strangers = await opened(open_house, in_redis(url), ACME, LOCAL)
        async with strangers.chat() as answer:
            assert answer.status == 503, "its certificate is not of an authority that the system trusts"


async def test_a_redis_that_asks_for_a_client_certificate(open_house: Open, tmp_path: Path) -> None:
    with redis_with_tls(tmp_path, asks_clients=True) as server:
        url, ca, own = (
            server.url.replace("redis:", "rediss:"),
            str(tmp_path / "ca.pem"),
            str(tmp_path / "own.pem"),
        )
        house = await opened(open_house, in_redis(url, ca=ca, cert=own, key=own), ACME, LOCAL)
        async with house.chat() as answer:
            assert answer.status == 200
        strangers = await opened(open_house, in_redis(url, ca=ca), ACME, LOCAL)
        async with strangers.chat() as answer:
            assert answer.status == 503, "it shows no certificate"


def test_an_own_certificate_that_cannot_be_used_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "own.pem").write_text("no certificate")
    own = str(tmp_path / "own.pem")
    sections = in_redis("rediss://host", cert=own, key=own)
    with pytest.raises(ConfigError, match=r"redis: cannot use .*own\.pem"):
        Gateway(load(settings("http://engine", **sections), {}), env={})


@pytest.mark.parametrize(
    ("redis", "problem"),
    [
        ({"url": "redis://user:secret@host"}, "redis: url: user and password are no part of it"),
        ({"url": "http://host"}, "redis: url: must be like redis://host:6379/0"),
        ({"url": "redis://a:1,b:2"}, "redis: url: several hosts are Sentinels"),
        ({"url": "redis://a:0"}, "redis: url: each host must be like"),
        ({"url": "redis://a:x"}, "redis: url: "),
        ({"sentinel": "m", "cluster": True}, "redis: cluster and sentinel exclude each other"),
        ({"password_env": "A"}, 'redis.password_env: this setting is password = "env:NAME" now'),
        ({"password": "secret"}, "redis.password: must be env:NAME, a variable, or file:PATH"),
        ({"sentinel_password": "env:A"}, "redis: sentinel_username and sentinel_password need sentinel"),
        ({"url": "rediss://a", "cert": "a.pem"}, "redis: cert and key need each other"),
        ({"url": "redis://a", "ca": "ca.pem"}, "redis: ca, cert and key need a url with rediss://"),
    ],
)
def test_a_mistake_in_the_settings_is_named_and_no_secret_is_shown(
    redis: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(settings("http://engine", redis=redis), {})
    assert problem in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"quotas": {"store": "redis"}}, 'quotas: store = "redis" needs url in [redis]'),
        ({"directory": {"store": "redis"}}, 'directory: store = "redis" needs url in [redis]'),
        ({"quotas": {"gateways": 0}}, "quotas.gateways: must be a whole number from 1 to 10000"),
        ({"quotas": {"fail": "open"}}, "quotas.fail: must be one of closed, local"),
    ],
)
def test_a_use_of_redis_that_cannot_be_is_refused(sections: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(settings("http://engine", **sections), {})
    assert caught.value.problems == [problem]


@pytest.mark.parametrize("name", [one.name for one in fields(RedisConfig)])
def test_a_setting_of_redis_among_those_of_quotas_is_refused_with_its_place(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(settings("http://engine", quotas={name: "secret"}), {})
    assert caught.value.problems == [f"quotas.{name}: this setting is redis.{name} now"]
    variable = f"PENSTOCK_GATEWAY_QUOTAS__{name.upper()}"
    with pytest.raises(ConfigError) as caught:
        load(settings("http://engine"), {variable: "secret"})
    now = f"PENSTOCK_GATEWAY_REDIS__{name.upper()}"
    assert caught.value.problems == [f"{variable}: this setting is {now} now"]


def test_no_request_waits_longer_than_50_ms_by_default() -> None:
    assert RedisConfig().timeout_s == 0.05


def test_a_password_that_cannot_be_read_is_named_at_the_start() -> None:
    sections = in_redis("redis://host", password="env:REDIS_PASSWORD")
    with pytest.raises(ConfigError, match="redis: the environment variable REDIS_PASSWORD is not set"):
        Gateway(load(settings("http://engine", **sections), {}), env={})
