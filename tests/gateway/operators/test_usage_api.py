"""Usage as operators ask for it, and the accounting of every end of a request."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from gateway.admission.quota import ReservationId
from gateway.billing.lines import BillingLine
from gateway.operators import usage
from gateway.operators.operations import query_of
from gateway.operators.usage import UsageQuery
from shared import cli
from shared.wire.errors import InvalidRequest
from shared.wire.ids import KeyId, TenantId
from tests.gateway.admission.test_redis_edge import in_redis
from tests.gateway.conftest import KEY, OTHER_KEY, House, Open, until
from tests.gateway.fake_engine import CUT, HEADERS, Script, chunk, refusal, stream, unary
from tests.gateway.operators.test_admin import OPERATOR, operator_keys
from tests.gateway.redis_server import PATIENT_S, RedisServer, redis_server
from tests.gateway.request.test_charges import ENDS
from tests.gateway.request.test_disconnect import RawClient, body

BOTH: Final = ("memory", "redis")
pytestmark = pytest.mark.hop("http2")  # only one: how engines report is in `test_charges.py`


async def accounted(
    open_house: Open, redis: RedisServer, store: str, timeout_s: float = PATIENT_S, **sections: Any
) -> House:
    counted = in_redis(redis.url, timeout_s=timeout_s) if store == "redis" else {}
    limits = {"limits": {"tokens_per_day": 10**6, "concurrent": 100}}
    told = {"tenants": [{"id": "acme", **limits}, {"id": "other"}]} | counted | sections
    house: House = await open_house(admin=operator_keys(), **told)
    return house


async def report(house: House, **parameters: str) -> dict[str, Any]:
    url = f"http://127.0.0.1:{house.gateway.admin_port}/admin/v1/usage"
    async with house.client.get(url, headers=OPERATOR, params=parameters) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


@pytest.mark.parametrize("store", BOTH)
async def test_every_end_of_a_request_is_counted_as_it_was_settled(
    open_house: Open, redis: RedisServer, store: str
) -> None:
    """The sums of usage are those of the completed lines, whichever way requests end."""
    house = await accounted(open_house, redis, store, timeouts={"total_s": 0.8})
    house.engine.script = unary()
    async with house.chat(max_tokens=5) as answer:
        assert answer.status == 200
    house.engine.script = refusal(400, "invalid_value")
    async with house.chat() as answer:
        assert answer.status == 400
    async with house.chat(temperature=9) as answer:
        assert answer.status == 400, "it is refused before the reservation, and not counted"
    house.engine.script = Script([CUT, HEADERS])
    async with house.chat() as answer:
        assert answer.status == 502
    house.engine.script, house.engine.reports = Script([asyncio.Event()]), ENDS
    async with house.chat() as answer:
        assert answer.status == 504
    house.engine.script = stream(chunk("a"), asyncio.Event())
    client = await RawClient.posting(house, body(stream=True))
    await client.reader.readuntil(b"\n\n")
    client.leave()
    lines = await house.lines(6)
    settled = sum(line["settled_tokens"] for line in lines)
    await until(lambda: not len(house.gateway.live))
    (row,) = (await report(house, by="tenant"))["rows"]
    assert row["total_tokens"] == settled
    assert row["total_tokens"] == (row["prompt_tokens"] + row["completion_tokens"] + row["estimated_tokens"])
    assert (row["tenant"], row["requests"], row["estimated_requests"]) == ("acme", 5, 1)


@pytest.mark.parametrize("store", BOTH)
async def test_usage_is_summed_by_what_is_asked_for(open_house: Open, redis: RedisServer, store: str) -> None:
    house = await accounted(open_house, redis, store)
    house.engine.script = unary()
    for key in (KEY, KEY, OTHER_KEY):
        async with house.chat(model="small", headers={"authorization": f"Bearer {key}"}) as answer:
            assert answer.status == 200
    await house.lines(3)
    today = datetime.now(UTC).date()
    found = await report(house, by="tenant,key,model,day", **{"from": str(today), "to": str(today)})
    named = [(row["tenant"], row["key"], row["model"], row["day"], row["requests"]) for row in found["rows"]]
    assert named == [
        ("acme", "k1", "tiny", str(today), 2),
        ("other", "k2", "tiny", str(today), 1),
    ], "a tenant without limits is counted, too"
    (row,) = (await report(house, by="model"))["rows"]
    assert set(row) >= {"model", "requests"}
    assert row["requests"] == 3
    assert not {"tenant", "key", "day"} & set(row)
    assert [row["key"] for row in (await report(house, by="key", key="k2"))["rows"]] == ["k2"]
    assert (await report(house, tenant="nobody"))["rows"] == []
    past = await report(house, **{"from": "2020-01-01", "to": "2020-01-31"})
    assert (past["from"], past["to"], past["rows"]) == ("2020-01-01", "2020-01-31", [])


@pytest.mark.parametrize("store", BOTH)
async def test_a_tenant_that_is_gone_is_in_every_sum(
    open_house: Open, redis: RedisServer, store: str
) -> None:
    """Its rows stay what was charged, for whoever adds up a bill."""
    house = await accounted(open_house, redis, store)
    house.engine.script = unary()
    for key in (KEY, OTHER_KEY):
        async with house.chat(headers={"authorization": f"Bearer {key}"}) as answer:
            assert answer.status == 200
    await house.lines(2)
    accounts = house.gateway.accounts
    tenants = accounts.now.tenants.changed((), [TenantId("acme"), TenantId("other")])
    accounts.now = accounts.now.changed(tenants, accounts.now.identity)
    rows = (await report(house, by="tenant"))["rows"]
    assert [(row["tenant"], row["requests"]) for row in rows] == [("acme", 1), ("other", 1)]
    for by in ("model", "day"):
        assert [row["requests"] for row in (await report(house, by=by))["rows"]] == [2]


@pytest.mark.parametrize("is_written", [False, True])
async def test_usage_in_memory_says_since_when_unless_lines_keep_it(
    open_house: Open, tmp_path: Path, is_written: bool
) -> None:
    file, payer = tmp_path / "lines", (TenantId("acme"), KeyId("k1"), "tiny")
    now = datetime.now(UTC)
    line = BillingLine(ReservationId("r"), now, now.date(), None, *payer, 20, 0, 3, 0)
    file.write_bytes(msgspec.json.encode(line) + b"\n")
    told = {"accounting": {"file": str(file)}} if is_written else {}
    house = await open_house(admin=operator_keys(), **told)
    house.engine.script = unary()
    async with house.chat():
        pass
    await house.lines(1)
    found = await report(house, by="key")
    assert (found["since"] is None) == is_written
    assert [row["requests"] for row in found["rows"]] == [2 if is_written else 1]


async def test_made_up_keys_and_models_make_no_row(open_house: Open, redis: RedisServer) -> None:
    house = await accounted(open_house, redis, "memory")
    for i in range(20):
        async with house.chat(headers={"authorization": f"Bearer made-up-{i}"}) as answer:
            assert answer.status == 401
        async with house.chat(model=f"made-up-{i}") as answer:
            assert answer.status == 404
    assert (await report(house, by="tenant,key,model,day"))["rows"] == []
    assert not house.store.rows.tenants()


async def test_usage_is_for_operators_alone(open_house: Open, redis: RedisServer) -> None:
    house = await accounted(open_house, redis, "memory")
    url = f"http://127.0.0.1:{house.gateway.admin_port}/admin/v1/usage"
    for headers, status in (({}, 401), (house.headers, 403)):
        async with house.client.get(url, headers=headers) as answer:
            assert answer.status == status
    async with house.client.post(url, headers=OPERATOR) as answer:
        assert answer.status == 405


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"by": "tenant,tenant"}, "by"),
        ({"by": "colour"}, "by"),
        ({"by": ""}, "by"),
        ({"from": "yesterday"}, "from"),
        ({"to": "2026-02-30"}, "to"),
        ({"from": "2026-03-02", "to": "2026-03-01"}, "from"),
        ({"from": "2020-01-01", "to": "2026-03-01"}, "from"),
        ({"tenant": "x" * 513}, "tenant"),
        ({"format": "csv"}, "format"),
    ],
)
def test_a_query_that_cannot_be_answered_names_its_parameter(parameters: dict[str, str], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        query_of(UsageQuery, parameters).days(datetime(2026, 3, 15, tzinfo=UTC).date())
    assert caught.value.param == param


def test_without_a_day_the_current_month_is_meant() -> None:
    query = UsageQuery(by="day,tenant")
    days = query.days(datetime(2026, 3, 15, tzinfo=UTC).date())
    assert (*map(str, days), query.dimensions) == ("2026-03-01", "2026-03-15", ("day", "tenant"))


async def test_an_answer_is_whole_or_refused(
    open_house: Open, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = await accounted(open_house, redis, "memory")
    house.engine.script = unary()
    for key in (KEY, OTHER_KEY):
        async with house.chat(headers={"authorization": f"Bearer {key}"}):
            pass
    await house.lines(2)
    monkeypatch.setattr(usage, "ROWS_MAX", 1)
    url = f"http://127.0.0.1:{house.gateway.admin_port}/admin/v1/usage"
    async with house.client.get(url, headers=OPERATOR) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "by")


async def test_usage_during_an_outage_of_redis_is_there_when_it_is_over(open_house: Open) -> None:
    with redis_server() as own:
        acme = {"id": "acme", "limits": {"tokens_per_day": 10**6}, "quota_fail": "local"}
        house = await accounted(open_house, own, "redis", 0.4, tenants=[acme, {"id": "other"}])
        house.engine.script = unary()
        async with house.chat() as answer:
            assert answer.status == 200
        await house.lines(1)
        own.stop_still()
        for key in (KEY, KEY, OTHER_KEY):
            async with house.chat(headers={"authorization": f"Bearer {key}"}) as answer:
                assert answer.status == 200
        url = f"http://127.0.0.1:{house.gateway.admin_port}/admin/v1/usage"
        async with house.client.get(url, headers=OPERATOR) as answer:
            assert answer.status == 503
        await house.lines(4)
        own.go_on()
        await until(lambda: house.store_is_well)
        rows = (await report(house))["rows"]
        assert [(row["tenant"], row["requests"]) for row in rows] == [("acme", 3), ("other", 1)]


# -- the command ----------------------------------------------------------------------------------


async def told(house: House, monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setenv("PENSTOCK_ADMIN_KEY", "the operator's")
    url = f"http://127.0.0.1:{house.gateway.admin_port}"
    return await asyncio.to_thread(cli.main, ["usage", "--admin-url", url, *argv])


async def test_the_command_prints_a_table_json_and_csv(
    open_house: Open,
    redis: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    house = await accounted(open_house, redis, "memory")
    house.engine.script = unary()
    for _ in range(2):
        async with house.chat():
            pass
    await house.lines(2)
    capsys.readouterr()
    assert await told(house, monkeypatch, "--by", "key,model", "--format", "json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["key"], row["model"], row["requests"], row["total_tokens"]) == ("k1", "tiny", 2, 26)
    assert await told(house, monkeypatch, "--by", "key,model", "--format", "csv") == 0
    (cells,) = csv.DictReader(io.StringIO(capsys.readouterr().out, newline=""))
    assert {name: str(value) for name, value in row.items()} == cells
    assert await told(house, monkeypatch, "--by", "key,model") == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[1:]] == ["key", "k1", "total"]
    assert shown[2].split()[-1] == shown[3].split()[-1] == "26"


async def test_the_command_says_what_is_wrong(
    open_house: Open,
    redis: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    house = await accounted(open_house, redis, "memory")
    assert await told(house, monkeypatch, "--by", "colour") == 1
    assert "by must be some of tenant, key, model, day" in capsys.readouterr().err
    assert await told(house, monkeypatch, "--admin-url", house.url) == 1
    monkeypatch.delenv("PENSTOCK_ADMIN_KEY")
    url = f"http://127.0.0.1:{house.gateway.admin_port}"
    assert await asyncio.to_thread(cli.main, ["usage", "--admin-url", url]) == 1
    assert "PENSTOCK_ADMIN_KEY" in capsys.readouterr().err
    assert await told(house, monkeypatch, "--admin-url", "http://127.0.0.1:1") == 1
    assert "does not answer" in capsys.readouterr().err
