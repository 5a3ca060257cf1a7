"""When keys were used last, as operators ask who look for dead ones."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

from gateway.operators.key_uses import KeyUsesApi
from gateway.operators.operations import operation_of
from gateway.operators.together import OperatorAnswer, together
from gateway.request.key_uses import USES_MAX, KeyUses
from tests.gateway.conftest import Open, until
from tests.gateway.fake_engine import unary
from tests.gateway.operators.test_admin import OPERATOR, operator_keys
from tests.gateway.operators.test_requests_api import BEGUN


def test_the_keys_that_were_used_last_are_known() -> None:
    uses = KeyUses()
    for at in range(USES_MAX):
        uses.note(f"k{at}", "acme", BEGUN)
    uses.note("k0", "acme", BEGUN + timedelta(seconds=1))
    uses.note("new", "other", BEGUN)
    known = dict(uses.of(None))
    assert (len(known), known["k0"]) == (USES_MAX, BEGUN + timedelta(seconds=1))
    assert "k1" not in known
    assert list(uses.of("other")) == [("new", BEGUN)]


def test_of_several_the_latest_counts() -> None:
    first, later = "2026-11-02T00:00:00Z", "2026-11-03T00:00:00Z"
    answers = {
        None: {"since": "2026-11-01T00:00:00Z", "data": {"a": first, "b": later}},
        "x": {"since": "2026-11-01T00:00:05Z", "data": {"a": later, "b": first}},
    }
    told = {name: OperatorAnswer(200, {}, json.dumps(one).encode()) for name, one in answers.items()}
    merges = operation_of(KeyUsesApi(KeyUses())._answer).merges
    assert json.loads(together(told, (), merges).body) == {
        "since": "2026-11-01T00:00:05Z",
        "data": {"a": later, "b": later},
    }


async def test_a_running_gateway_tells_of_its_keys(open_house: Open) -> None:
    house = await open_house(admin=operator_keys())
    house.engine.script = unary()
    url = f"http://127.0.0.1:{house.gateway.admin_port}/admin/v1/key_uses"
    async with house.chat() as answer:
        assert answer.status == 200
    await until(lambda: len(house.gateway._recorder) == 1)
    for query, count in (("", 1), ("?tenant=acme", 1), ("?tenant=other", 0)):
        async with house.client.get(url + query, headers=OPERATOR) as answer:
            told = await answer.json()
        assert len(told["data"]) == count
    async with house.client.get(url, headers=OPERATOR) as answer:
        told = await answer.json()
    [at] = told["data"].values()
    assert datetime.fromisoformat(told["since"]) <= datetime.fromisoformat(at)
    async with house.client.get(f"{url}?key=k", headers=OPERATOR) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "key")
