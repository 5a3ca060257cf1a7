"""What operators ask of one gateway is answered by all that share its Redis."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import trustme

from gateway.identity.keys import digest_of, hash_key
from gateway.operators import elsewhere, peers
from gateway.operators.peers import PROOF_HEADER, PROOF_S, proof_of
from gateway.redis import members
from shared import cli
from shared.wire.ids import REQUEST_ID_HEADER
from tests.gateway.conftest import KEY, OTHER_KEY, House, Open, until
from tests.gateway.endpoints import responses_scripts as scripts
from tests.gateway.fake_engine import chunk, refusal, stream, unary
from tests.gateway.operators.test_admin import OPERATOR, operator_keys
from tests.gateway.redis_server import PATIENT_S, RedisServer, redis_server

DIGEST: Final = digest_of(hash_key("the operator's"))


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


pytestmark = pytest.mark.hop("http2")


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "BEAT_S", 0.01)


def sharing(redis: RedisServer) -> dict[str, Any]:
    prefix = f"test-{uuid.uuid4().hex}"
    return {"redis": {"url": redis.url, "timeout_s": PATIENT_S, "key_prefix": prefix}}


def admin_url(house: House) -> str:
    return f"http://127.0.0.1:{house.gateway.admin_port}"


async def ask(house: House, path: str, method: str = "GET", **headers: str) -> tuple[int, Any]:
    url = f"{admin_url(house)}/admin/v1{path}"
    async with house.client.request(method, url, headers=headers or OPERATOR) as answer:
        return answer.status, await answer.json()


def listed(house: House) -> list[str]:
    """The other gateways that it knows of."""
    assert house.gateway.peers is not None
    return [member.url for member in house.gateway.peers.members.others]


async def pair(open_house: Open, sections: dict[str, Any], **more: Any) -> tuple[House, House]:
    first, second = [await open_house(admin=operator_keys(), **sections, **more) for _ in range(2)]
    first.engine.script = second.engine.script = unary()
    await until(lambda: listed(first) == [admin_url(second)] and listed(second) == [admin_url(first)])
    return first, second


async def served(house: House, request_id: str) -> None:
    async with house.chat(max_tokens=5, headers={REQUEST_ID_HEADER: request_id}) as answer:
        assert answer.status == 200


# -- what a tenant cancels -------------------------------------------------------------------------


@pytest.mark.parametrize("tenant", ["acme", "other"])
async def test_a_response_is_cancelled_at_any_gateway(
    open_house: Open, redis: RedisServer, tenant: str
) -> None:
    """By its own tenant alone. No operator has done it, so none is in the audit."""
    first, second = await pair(open_house, sharing(redis), responses={"store": "redis"})
    first.engine.script = scripts.streamed("a", before=[asyncio.Event()])
    body = {"model": "tiny", "input": "hi", "stream": True}
    async with first.client.post(f"{first.url}/v1/responses", json=body, headers=first.headers) as answer:
        await answer.content.readany()
        url = f"{second.url}/v1/responses/{scripts.ID}/cancel"
        key = KEY if tenant == "acme" else OTHER_KEY
        async with second.client.post(url, headers={"authorization": f"Bearer {key}"}) as cancelled:
            told = await cancelled.json()
        if tenant == "other":
            assert cancelled.status == 404
            answer.close()
        else:
            assert (cancelled.status, told["status"], told["id"]) == (200, "cancelled", scripts.ID)
            assert b"request_aborted" in await answer.read()
    await until(lambda: not len(first.gateway.live))
    assert "admin.change" not in first.log.getvalue()


# -- one answer -----------------------------------------------------------------------------------


async def test_a_request_is_found_whichever_gateway_served_it(open_house: Open, redis: RedisServer) -> None:
    first, second = await pair(open_house, sharing(redis))
    for number, house in enumerate((first, second, first, second)):
        await served(house, f"req-{number}")
    for asked, other in ((first, 1), (second, 0)):
        status, told = await ask(asked, f"/requests/req-{other}")
        [record] = told["data"]
        assert (status, record["summary"]["request_id"], told["silent_gateways"]) == (200, f"req-{other}", [])
        assert record["gateway"]
        assert "gateway" not in (await ask(asked, f"/requests/req-{1 - other}"))[1]["data"][0]
        page = (await ask(asked, "/requests?state=done"))[1]
        assert [one["request_id"] for one in page["data"]] == ["req-3", "req-2", "req-1", "req-0"]
        usage = (await ask(asked, "/usage"))[1]
        assert [row["requests"] for row in usage["rows"]] == [4]
    assert (await ask(first, "/requests/req-9"))[0] == 404


async def test_what_no_gateway_has_changed_is_not_told_again(open_house: Open, redis: RedisServer) -> None:
    first, second = await pair(open_house, sharing(redis))
    await served(first, "req-0")
    url = f"{admin_url(first)}/admin/v1/requests?state=done"

    async def poll(known: str) -> tuple[int, str, bytes]:
        async with first.client.get(url, headers={**OPERATOR, "if-none-match": known}) as answer:
            return answer.status, answer.headers["etag"], await answer.read()

    etag = (await poll('"none"'))[1]
    assert await poll(etag) == (304, etag, b"")
    await served(second, "req-1")
    status, newest, body = await poll(etag)
    assert (status, newest != etag) == (200, True)
    assert [one["request_id"] for one in json.loads(body)["data"]] == ["req-1", "req-0"], (
        "also what is as it was"
    )
    assert await poll(newest) == (304, newest, b"")


async def test_pages_of_all_have_each_request_once(open_house: Open, redis: RedisServer) -> None:
    first, second = await pair(open_house, sharing(redis))
    for number in range(7):
        await served((first, second)[number % 3 == 0], f"req-{number}")
    found, before = [], ""
    while True:
        page = (await ask(first, f"/requests?limit=2{before}"))[1]
        found += [one["request_id"] for one in page["data"]]
        if page["before"] is None:
            break
        before = f"&before={page['before']}"
    assert found == [f"req-{number}" for number in range(6, -1, -1)]


async def test_a_live_request_is_seen_and_ended_from_elsewhere(open_house: Open, redis: RedisServer) -> None:
    first, second = await pair(open_house, sharing(redis))
    second.engine.script = stream(chunk("a"), asyncio.Event())
    async with second.chat(stream=True, headers={REQUEST_ID_HEADER: "live"}) as answer:
        await answer.content.readany()
        [one] = (await ask(first, "/requests?state=live"))[1]["data"]
        assert (one["request_id"], one["is_live"]) == ("live", True)
        assert (await ask(first, "/requests/live", "DELETE"))[1]["aborted"] == 1
        assert b"request_aborted" in await answer.content.read()


async def test_usage_that_redis_has_is_counted_once(open_house: Open, redis: RedisServer) -> None:
    first, second = await pair(open_house, sharing(redis) | {"quotas": {"store": "redis"}})
    for house in (first, second):
        await served(house, "req")
    await first.lines(2)  # of both
    for guarded in (first.gateway._guarded, second.gateway._guarded):
        assert guarded is not None
        await guarded.post()
    assert [row["requests"] for row in (await ask(second, "/usage"))[1]["rows"]] == [2]


async def test_a_try_before_it_at_another_gateway_is_told(open_house: Open, redis: RedisServer) -> None:
    first, second = await pair(open_house, sharing(redis))
    first.engine.script = refusal(400, "invalid_value")
    async with first.chat(max_tokens=5, headers={REQUEST_ID_HEADER: "try"}) as answer:
        assert answer.status == 400
    headers = {REQUEST_ID_HEADER: "own", "x-stainless-retry-count": "1"}
    async with second.chat(max_tokens=5, headers=headers) as answer:
        assert answer.status == 200
    for asked in (first, second):
        [record] = (await ask(asked, "/requests/own"))[1]["data"]
        assert "most likely its first try, try, was refused (400 invalid_value)" in record["causes"][0]


async def test_others_that_hang_hold_up_no_record(
    open_house: Open, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have less time than the gateway that asks for them is given."""
    assert elsewhere.ANSWER_S < peers.ANSWER_S
    monkeypatch.setattr(elsewhere, "ANSWER_S", 0.05)
    _, second = await pair(open_house, sections := sharing(redis))
    hangs = socket.create_server(("127.0.0.1", 0))
    say(redis, sections, {"name": "hangs:1", "url": f"http://127.0.0.1:{hangs.getsockname()[1]}"})
    await until(lambda: len(listed(second)) == 2)
    second.engine.script = unary()
    async with second.chat(headers={REQUEST_ID_HEADER: "own", "x-stainless-retry-count": "1"}) as answer:
        assert answer.status == 200
    at_s = int(time.time())
    proof = proof_of(DIGEST, admin_url(second), "GET", "/admin/v1/requests/own", at_s)
    status, told = await ask(second, "/requests/own", **{PROOF_HEADER: f"ops {at_s} {proof}"})
    assert (status, len(told["data"])) == (200, 1)
    assert any("its SDK counts 1 try" in text for text in told["data"][0]["causes"])
    hangs.close()


# -- those that do not answer ---------------------------------------------------------------------


async def test_a_silent_gateway_is_named_and_holds_nobody_up(
    open_house: Open,
    redis: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One that hangs, and one that is gone."""
    sections = sharing(redis)
    house = await open_house(admin=operator_keys(), **sections)
    house.engine.script = unary()
    monkeypatch.setattr(peers, "ANSWER_S", 0.05)
    hangs = socket.create_server(("127.0.0.1", 0))
    say(redis, sections, {"name": "hangs:1", "url": f"http://127.0.0.1:{hangs.getsockname()[1]}"})
    say(redis, sections, {"name": "gone:2", "url": "http://127.0.0.1:1"})
    await until(lambda: len(listed(house)) == 2)
    await served(house, "req")
    status, told = await ask(house, "/requests/req")
    assert (status, told["partial"], sorted(told["silent_gateways"])) == (200, True, ["gone:2", "hangs:1"])
    status, told = await ask(house, "/requests/other")
    assert status == 404
    assert "hangs:1" in told["error"]["message"]
    monkeypatch.setenv("PENSTOCK_ADMIN_KEY", "the operator's")
    for command in (["trace", "req"], ["usage"]):
        assert await asyncio.to_thread(cli.main, [*command, "--admin-url", admin_url(house)]) == 0
        assert "hangs:1" in capsys.readouterr().err
    hangs.close()


def say(redis: RedisServer, sections: dict[str, Any], member: dict[str, str]) -> None:
    """Have Redis say that there is a gateway."""
    key = f"{sections['redis']['key_prefix']}:{{~gateways}}:gateways"
    with redis.raw as client:
        client.zadd(key, {json.dumps(member): 1000 * time.time() + 60_000})


async def test_an_answer_that_is_too_long_is_none(
    open_house: Open, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may have its part of what all may be together."""
    sections = sharing(redis)
    first, second = await pair(open_house, sections)
    await served(second, "req")
    _, told = await ask(second, "/requests")
    monkeypatch.setattr(peers, "ANSWERS_LEN_MAX", len(json.dumps(told, separators=(",", ":"))) * 3 // 2)
    _, told = await ask(first, "/requests")
    assert (len(told["data"]), told["silent_gateways"]) == (1, [])
    say(redis, sections, {"name": "gone:2", "url": "http://127.0.0.1:1"})
    await until(lambda: len(listed(first)) == 2)
    status, told = await ask(first, "/requests")
    assert (status, told["data"], len(told["silent_gateways"])) == (200, [], 2)


async def test_gateways_without_end_are_not_asked(
    open_house: Open, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "MEMBERS_MAX", 3)
    sections = sharing(redis)
    for number in range(9):
        say(redis, sections, {"name": f"n:{number}", "url": f"http://127.0.0.1:{number + 1}"})
    house = await open_house(admin=operator_keys(), **sections)
    await until(lambda: len(listed(house)) > 0)
    assert len(listed(house)) <= 3


async def test_a_gateway_that_stops_is_not_missed(open_house: Open, redis: RedisServer) -> None:
    first, second = await pair(open_house, sharing(redis))
    assert second.gateway.peers is not None
    await second.gateway.peers.aclose()
    await until(lambda: not listed(first))
    assert (await ask(first, "/requests"))[1]["silent_gateways"] == []


async def test_without_redis_each_goes_on_by_itself(open_house: Open) -> None:
    house = await open_house(admin=operator_keys(), redis={"url": "redis://127.0.0.1:1", "timeout_s": 0.1})
    house.engine.script = unary()
    await served(house, "req")
    assert (await ask(house, "/requests/req"))[0] == 200


def test_what_redis_says_that_is_no_gateways_word_is_passed_over() -> None:
    for url in ("http://h:1/path", "http://u@h:1", "file:///etc/passwd", "http://h", "http://h:1?x"):
        assert members._read(json.dumps({"name": "n", "url": url}).encode()) is None
    for raw in (
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 100_000,
        json.dumps({"name": "n" * 301, "url": "http://h:1"}).encode(),
    ):
        assert members._read(raw) is None


async def test_one_that_refuses_is_named_too(open_house: Open, redis: RedisServer) -> None:
    """Its operators have other keys."""
    sections = sharing(redis)
    house = await open_house(admin=operator_keys(), **sections)
    await open_house(admin=operator_keys("another's"), **sections)
    await until(lambda: len(listed(house)) == 1)
    status, told = await ask(house, "/requests")
    assert (status, told["data"], len(told["silent_gateways"])) == (200, [], 1)


# -- proofs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        {"digest": digest_of(hash_key("replaced"))},
        {"digest": digest_of(hash_key("another"))},
        {"url": "http://127.0.0.1:1"},
        {"method": "DELETE"},
        {"target": "/admin/v1/usage"},
        {"at_s": PROOF_S + 5},
        {"at_s": -PROOF_S - 5},
        {"made_s": -1},
        {"operator": "nobody"},
        {"operator": "ops "},
    ],
    ids=str,
)
async def test_a_proof_is_for_one_question_to_one_gateway_for_a_minute(
    open_house: Open, redis: RedisServer, changed: dict[str, Any]
) -> None:
    admin, over = operator_keys(), "2026-01-01T00:00:00Z"
    admin["keys"][0] |= {"previous_hash": hash_key("replaced"), "previous_expires": over}
    house = await open_house(admin=admin, **sharing(redis))
    target = "/admin/v1/requests?limit=1"
    asked: dict[str, Any] = {"digest": DIGEST, "url": admin_url(house), "method": "GET", "target": target}
    at_s, operator = int(time.time() + changed.pop("at_s", 0)), changed.pop("operator", "ops")
    made_s = at_s + changed.pop("made_s", 0)
    headers = {PROOF_HEADER: f"{operator} {at_s} {proof_of(**asked, at_s=at_s)}"}
    if operator == "ops" and abs(at_s - time.time()) < PROOF_S:
        assert (await ask(house, "/requests?limit=1", **headers))[0] == 200
    headers = {PROOF_HEADER: f"{operator} {at_s} {proof_of(**{**asked, **changed}, at_s=made_s)}"}
    assert (await ask(house, "/requests?limit=1", **headers))[0] == 401


async def test_a_proof_opens_nothing_else(open_house: Open, redis: RedisServer) -> None:
    house = await open_house(admin=operator_keys(), **sharing(redis))
    for method, path, status in (("GET", "/keys", 403), ("POST", "/reload", 403), ("GET", "/usage", 200)):
        proof = proof_of(DIGEST, admin_url(house), method, f"/admin/v1{path}", at_s := int(time.time()))
        assert (await ask(house, path, method, **{PROOF_HEADER: f"ops {at_s} {proof}"}))[0] == status


async def test_whoever_writes_into_redis_learns_no_key(open_house: Open, redis: RedisServer) -> None:
    sections, heads = sharing(redis), []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    trap = await asyncio.start_server(listen, "127.0.0.1", 0)
    first, second = await pair(open_house, sections)
    url = f"http://127.0.0.1:{trap.sockets[0].getsockname()[1]}"
    say(redis, sections, {"name": "trap:1", "url": url})
    await until(lambda: url in listed(first))
    await ask(first, "/requests?limit=1")
    head = heads[0]
    assert b"the operator's" not in head
    assert DIGEST.hex().encode() not in head
    proof = next(line for line in head.decode().splitlines() if line.lower().startswith(PROOF_HEADER))
    headers = {PROOF_HEADER: proof.partition(": ")[2]}
    assert (await ask(second, "/requests?limit=1", **headers))[0] == 401
    trap.close()
    await trap.wait_closed()


async def test_gateways_with_certificates_know_each_other_by_them(
    open_house: Open, redis: RedisServer, tmp_path: Path
) -> None:
    """Whatever names these are for; another's is not taken."""
    issued = trustme.CA().issue_cert("somewhere.example")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(key)
    tls, sections = {"tls": {"cert": str(cert), "key": str(key)}}, sharing(redis)
    first, second = [await open_house(admin=operator_keys() | tls, **sections) for _ in range(2)]
    second.engine.script = unary()
    await until(lambda: len(listed(first)) == 1)
    await served(second, "req")

    async def told() -> Any:
        url = f"https://127.0.0.1:{first.gateway.admin_port}/admin/v1/requests"
        async with first.client.get(url, headers=OPERATOR, ssl=False) as answer:
            return await answer.json()

    assert len((await told())["data"]) == 1
    assert first.gateway.peers is not None
    known = first.gateway.peers.members
    known.others = tuple(members.GatewayMember(one.name, one.url, "00" * 32) for one in known.others)
    assert (await told())["silent_gateways"]
