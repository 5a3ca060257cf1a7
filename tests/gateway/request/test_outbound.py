"""What a replica is told, and what it is not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.config.whole import ModelConfig, load
from gateway.relay import upstream
from gateway.relay.upstream import Credentials
from gateway.request.outbound import bound_s
from shared.apis.completions import CompletionRequest
from shared.apis.holding import VALUES_MAX
from shared.apis.validation import parse
from shared.process.setting_values import ConfigError
from shared.wire.errors import InvalidRequest
from shared.wire.ids import (
    FIRST_TOKEN_TIMEOUT_HEADER,
    IGNORED_FIELDS_HEADER,
    QUEUE_TIMEOUT_HEADER,
    REQUEST_ID_HEADER,
    REQUEST_TIMEOUT_HEADER,
    SERVICE_TIER_HEADER,
    TENANT_HEADER,
    TRACEPARENT_HEADER,
)
from tests.gateway.conftest import KEY, PATIENCE_S, House, Open, settings, until
from tests.gateway.fake_engine import chunk, refusal, unary
from tests.gateway.fake_engine import stream as script_of

OURS = (
    FIRST_TOKEN_TIMEOUT_HEADER,
    TENANT_HEADER,
    SERVICE_TIER_HEADER,
    QUEUE_TIMEOUT_HEADER,
    REQUEST_TIMEOUT_HEADER,
)
SECRET = "sk-upstream-0123"


@pytest.mark.parametrize(
    ("asked", "most_s", "told"),
    [
        (None, None, None),
        ("3", None, 3.0),
        (None, 2.5, 2.5),
        ("1", 2.5, 1.0),
        ("2.5", 2.5, 2.5),
        ("1e3", 2.5, 2.5),
    ],
)
def test_a_caller_may_shorten_its_deadlines_and_never_extend_them(
    asked: str | None, most_s: float | None, told: float | None
) -> None:
    assert bound_s(QUEUE_TIMEOUT_HEADER, asked, most_s) == told


@pytest.mark.parametrize(
    "asked", ["", "inf", "nan", "-1", "0", "soon", "\udcff", "1" * 8000, "1e300", "86401", "0x10"]
)
async def test_an_invalid_deadline_header_is_refused_by_name(asked: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        bound_s(QUEUE_TIMEOUT_HEADER, asked, None)
    assert refused.value.param == QUEUE_TIMEOUT_HEADER


async def told(house: House, **headers: str) -> tuple[str | None, str | None]:
    house.engine.script = unary()
    async with house.chat(headers=headers) as answer:
        assert answer.status == 200
    seen = house.engine.seen[-1].headers
    return seen.get(QUEUE_TIMEOUT_HEADER), seen.get(REQUEST_TIMEOUT_HEADER)


async def test_deadlines_of_the_model_and_the_tenant(open_house: Open) -> None:
    house = await open_house(
        model={"queue_timeout_s": 20, "request_timeout_s": 200},
        tenant={"queue_timeout_s": 5, "request_timeout_s": 300},
    )
    assert await told(house) == ("5", "300")
    longer = {QUEUE_TIMEOUT_HEADER: "6", REQUEST_TIMEOUT_HEADER: "600"}
    assert await told(house, **longer) == ("5", "300")
    assert await told(house, **{QUEUE_TIMEOUT_HEADER: "1", REQUEST_TIMEOUT_HEADER: "9"}) == ("1", "9")


# -- engines that are not ours --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier_max", "asked", "sent"),
    [
        ("priority", "priority", "priority"),
        ("default", "priority", "default"),
        ("flex", "auto", "flex"),
        ("default", "auto", "auto"),
        ("flex", "flex", "flex"),
        ("flex", None, None),
        ("priority", "scale", "scale"),
        ("default", "scale", "default"),
    ],
)
async def test_a_foreign_engine_is_sent_openais_fields_alone(
    open_house: Open, tier_max: str, asked: str | None, sent: str | None
) -> None:
    house = await open_house(
        bundle=None, tenant={"service_tier": tier_max, "queue_timeout_s": 5, "request_timeout_s": 9}
    )
    house.engine.script = unary()
    own = {} if asked is None else {"service_tier": asked}
    headers = {QUEUE_TIMEOUT_HEADER: "1"}
    async with house.chat(priority=-5, temperature=0.5, their_own=[1], headers=headers, **own) as answer:
        assert answer.status == 200
        assert answer.headers[IGNORED_FIELDS_HEADER] == "priority, their_own"
    [seen] = house.engine.seen
    assert seen.body.keys() - {"service_tier"} == {"model", "messages", "temperature"}
    assert (seen.body.get("service_tier"), seen.body["temperature"]) == (sent, 0.5)
    assert not any(name in seen.headers for name in OURS)
    assert seen.headers[REQUEST_ID_HEADER]
    assert seen.headers[TRACEPARENT_HEADER]


TEXTS = ["a " * 600] * 256
"""A prompt is a token of `a` and a space for each, or so: all have more ids than a body may have values."""


@pytest.mark.parametrize(
    ("fields", "has_ids"),
    [
        pytest.param({"prompt": ["a"]}, True, id="a short prompt"),
        pytest.param({"prompt": TEXTS[:64]}, True, id="as many as a body may have values"),
        pytest.param({"prompt": TEXTS}, False, id="more ids than a body may have values"),
        pytest.param({"prompt": [[1, 2, 3] * 300] * 150}, False, id="the caller's own ids"),
        pytest.param({"prompt": ["a"], "x": [1] * (VALUES_MAX - 5)}, False, id="values of its own"),
        pytest.param({"prompt": ["a"], **{f"x{i}": 1 for i in range(253)}}, False, id="as many fields"),
        pytest.param({"prompt": ['a",:[{' * 300] * 64}, False, id="text that looks like too many fields"),
    ],
)
async def test_an_engine_takes_every_body_that_the_gateway_has_taken(
    house: House, fields: dict[str, Any], has_ids: bool
) -> None:
    house.engine.script = unary()
    body = msgspec.json.encode({"model": "tiny", "max_tokens": 1, **fields})
    parse(body, CompletionRequest)
    async with house.client.post(f"{house.url}/v1/completions", data=body, headers=house.headers) as answer:
        assert answer.status == 200, await answer.read()
    [seen] = house.engine.seen
    assert ("penstock" in seen.body) is has_ids
    parse(msgspec.json.encode(seen.body), CompletionRequest)


@pytest.mark.parametrize(("stream", "sent"), [(True, "2500"), (False, "9000")])
async def test_ours_is_told_for_how_long_a_first_token_is_of_use(
    open_house: Open, stream: bool, sent: str
) -> None:
    house = await open_house(model={"timeouts": {"first_token_s": 2.5, "total_s": 9}})
    house.engine.script = script_of(chunk("hello")) if stream else unary()
    async with house.chat(stream=stream, headers={FIRST_TOKEN_TIMEOUT_HEADER: "99999999"}) as answer:
        assert answer.status == 200
        await answer.read()
    assert house.engine.seen[-1].headers[FIRST_TOKEN_TIMEOUT_HEADER] == sent


async def test_ours_is_sent_all_fields_and_the_class_that_bounds_them(open_house: Open) -> None:
    house = await open_house(tenant={"service_tier": "default"})
    house.engine.script = unary()
    async with house.chat(priority=-5, service_tier="auto") as answer:
        assert answer.status == 200
    [seen] = house.engine.seen
    assert (seen.body["priority"], seen.headers[SERVICE_TIER_HEADER]) == (-5, "default")


# -- the gateway's own key ------------------------------------------------------------------------


async def test_an_engine_is_shown_the_gateways_key_and_not_the_callers(
    open_house: Open, tmp_path: Path
) -> None:
    path = tmp_path / "key"
    path.write_text(f"{SECRET}\n")
    house = await open_house(model={"api_key": f"file:{path}"})
    house.engine.script = unary()
    async with house.chat() as answer:
        assert answer.status == 200
    house.engine.script = refusal(401, "invalid_api_key", "who are you?")
    async with house.chat() as answer:
        assert answer.status == 502
    assert [seen.headers["authorization"] for seen in house.engine.seen] == [f"Bearer {SECRET}"] * 2
    await house.lines(2)
    assert SECRET not in house.log.getvalue()
    assert SECRET not in repr(house.gateway.config)


async def test_a_key_in_a_file_is_renewed_while_the_gateway_runs(
    open_house: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "POLL_S", 0.01)
    path = tmp_path / "key"
    path.write_text(SECRET)
    house = await open_house(model={"api_key": f"file:{path}"})
    house.engine.script = unary()

    async def shown() -> str:
        async with house.chat() as answer:
            assert answer.status == 200
        return str(house.engine.seen[-1].headers["authorization"])

    assert await shown() == f"Bearer {SECRET}"
    path.write_text("two words")
    await until(lambda: "secret.rejected" in house.log.getvalue())
    assert await shown() == f"Bearer {SECRET}", "a file that holds no key changes nothing"
    path.write_text("renewed")
    async with asyncio.timeout(PATIENCE_S):
        while (now := await shown()) != "Bearer renewed":
            assert now == f"Bearer {SECRET}"


def test_models_may_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(SECRET)
    both = [replace(model(api_key=f"file:{path}"), name=name) for name in ("a", "b")]
    mine = Credentials(both, {})
    assert [mine.headers(one) for one in both] == [((b"authorization", f"Bearer {SECRET}".encode()),)] * 2


async def test_without_credentials_no_authorization_header_is_sent(house: House) -> None:
    house.engine.script = unary()
    async with house.chat() as answer:
        assert answer.status == 200
    [seen] = house.engine.seen
    assert "authorization" not in seen.headers
    assert KEY not in str(seen.headers)


def model(**fields: Any) -> ModelConfig:
    return ModelConfig(name="m", replicas=("http://a:1",), **fields)


def test_a_key_from_the_environment() -> None:
    mine = Credentials([model(api_key="env:KEY")], {"KEY": SECRET})
    assert mine.headers(model()) == ((b"authorization", f"Bearer {SECRET}".encode()),)
    assert SECRET not in repr(mine)


@pytest.mark.parametrize("value", ["", " ", "two words", "new\nline", "\u00e4", "x" * 9000])
def test_invalid_engine_keys_are_reported_together_and_not_shown(tmp_path: Path, value: str) -> None:
    models = [model(api_key="env:KEY"), model(api_key="env:GONE"), model(api_key=f"file:{tmp_path / 'no'}")]
    with pytest.raises(ConfigError) as caught:
        Credentials(models, {"KEY": value})
    bad, gone, file = caught.value.problems
    told = "must hold one word of printable ASCII characters, 8192 at most" if value.strip() else "is empty"
    assert bad == f"models.m: the environment variable KEY {told}"
    assert gone == "models.m: the environment variable GONE is not set"
    assert file.endswith("cannot be read: No such file or directory")


def test_a_key_in_the_place_of_its_source_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="must be env:NAME, a variable, or file:PATH") as caught:
        load(settings("http://a:1", model={"api_key": SECRET}), {})
    assert SECRET not in str(caught.value)


async def test_the_callers_deadlines_are_passed_on(house: House) -> None:
    house.engine.script = unary()
    bounds = {QUEUE_TIMEOUT_HEADER: "1.5", REQUEST_TIMEOUT_HEADER: "30"}
    async with house.chat(headers=bounds) as answer:
        assert answer.status == 200
    async with house.chat() as answer:
        assert answer.status == 200
    told, untold = (seen.headers for seen in house.engine.seen)
    assert {name: told[name] for name in bounds} == bounds
    assert not bounds.keys() & {name.lower() for name in untold}


async def test_the_tenants_class_is_the_configurations_and_not_the_callers(open_house: Open) -> None:
    house = await open_house(tenants=[{"id": "acme", "service_tier": "flex"}, {"id": "other"}])
    house.engine.script = unary()
    async with house.chat(service_tier="priority", headers={SERVICE_TIER_HEADER: "priority"}) as answer:
        assert answer.status == 200
    [seen] = house.engine.seen
    assert seen.headers.getall(SERVICE_TIER_HEADER) == ["flex"]
