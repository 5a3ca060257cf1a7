"""Requests that the gateway refuses, and how it says so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.identity.keys import hash_key
from shared.wire.ids import IGNORED_FIELDS_HEADER
from tests.gateway.conftest import PATIENCE_S, PROMPT, House, Open, error_of
from tests.gateway.fake_engine import unary

DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("authorization", "says"),
    [
        (None, "did not provide"),
        ("Basic abc", "malformed"),
        ("Bearer", "malformed"),
        ("Bearer two words", "Incorrect"),
        ("Bearer wrong-key", "Incorrect"),
        ("Bearer sk_dev_abcdefghijkl_" + "x" * 32, "Incorrect"),
        ("Bearer " + "x" * 5000, "malformed"),
    ],
)
async def test_every_path_is_401_without_a_valid_key(
    house: House, authorization: str | None, says: str
) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("DELETE", "/v1/requests/x"),
        ("GET", "/metrics"),
        ("GET", "/nowhere"),
    ):
        async with house.client.request(method, house.url + path, headers=headers) as answer:
            assert answer.status == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            error = await error_of(answer)
            assert error["code"] == "invalid_api_key"
            assert says in error["message"]
    assert not house.engine.seen
    sent = authorization.split()[-1] if authorization else ""
    assert len(sent) < 8 or sent not in house.log.getvalue() + error["message"]


async def test_the_404_of_a_misspelt_path_names_the_right_one(house: House) -> None:
    async with house.client.post(f"{house.url}/chat/completions", headers=house.headers) as answer:
        assert answer.status == 404
        error = await error_of(answer)
        assert error["code"] == "unknown_url"
        assert "Did you mean '/v1/chat/completions'? The base URL ends with /v1." in error["message"]
    async with house.get("/v1/models/") as answer:
        assert answer.status == 404
        assert "Did you mean '/v1/models'?" in (await error_of(answer))["message"]
    async with house.client.delete(f"{house.url}/v1/requests/", headers=house.headers) as answer:
        assert answer.status == 404
    async with house.get("/nowhere") as answer:
        assert (await error_of(answer))["message"] == "There is nothing at '/nowhere'."


async def test_head_is_answered_as_get_is_without_the_body(house: House) -> None:
    for path, status in (("/v1/models", 200), ("/v1/models/tiny", 200), ("/v1/models/big", 404)):
        async with house.client.head(house.url + path, headers=house.headers) as answer:
            assert (answer.status, await answer.read()) == (status, b"")
            assert int(answer.headers["content-length"]) > 0
    async with house.client.head(f"{house.url}/v1/requests/x", headers=house.headers) as answer:
        assert answer.status == 405


async def test_expired_and_disabled_keys(open_house: Open) -> None:
    keys = [
        {"id": "old", "hash": hash_key("old-key"), "tenant": "acme", "expires": "2020-01-01T00:00:00Z"},
        {"id": "off", "hash": hash_key("off-key"), "tenant": "acme", "disabled": True},
    ]
    house = await open_house(keys=keys)
    for key, says in (("old-key", "expired"), ("off-key", "revoked")):
        async with house.chat(headers={"authorization": f"Bearer {key}"}) as answer:
            assert answer.status == 401
            assert says in (await error_of(answer))["message"]


HOSTILE = [
    b"",
    b"   ",
    b"null",
    b"[]",
    b"7",
    b'{"model": "tiny"',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff"}]}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "tiny", "messages": "hi"}',
    b'{"model": "tiny", "messages": []}',
    b'{"model": "tiny", "messages": [{"role": "wizard", "content": "x"}]}',
    b'{"model": 3, "messages": [{"role": "user", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": "x"}]}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": '
    + b"9" * 10_000
    + b"}",
    b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "x": ' + b"[" * 100_000,
    b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "penstock": '
    b'{"tokenizer": "", "prompt_ids": [[1]]}}',
    b'{"model": "tiny", "model": "tiny", "messages": [{"role": "user", "content": "x"}]}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": '
    b'[{"type": "custom", "custom": {"name": "f"}}]}',
]


@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
async def test_hostile_bodies_are_400(house: House, body: bytes) -> None:
    async with house.client.post(
        f"{house.url}/v1/chat/completions", data=body, headers=house.headers
    ) as answer:
        assert answer.status == 400
        error = await error_of(answer)
    assert error["type"] == "invalid_request_error"
    assert not house.engine.seen
    line = await house.line()
    assert line["end_reason"] == "refused"
    assert line["stage"] == ("tenant" if b"tools" in body else "validate"), "who knows the engine knows tools"


async def test_unknown_fields_are_refused_when_the_policy_says_so(open_house: Open) -> None:
    house = await open_house(admission={"unknown_fields": "refuse"})
    async with house.chat(colour="red") as answer:
        assert answer.status == 400
        assert (await error_of(answer))["param"] == "colour"


async def test_a_prompt_beyond_the_context_is_refused_before_it_is_dispatched(house: House) -> None:
    for fields, param in (
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ({"max_tokens": 4096}, "max_tokens"),
        ({"max_completion_tokens": 4096}, "max_completion_tokens"),
    ):
        async with house.chat(fields) as answer:
            assert answer.status == 400
            error = await error_of(answer)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == param
    assert not house.engine.seen
    async with house.chat(max_tokens=4096 - len(PROMPT)) as answer:
        assert answer.status == 200


async def test_a_prompt_beyond_the_kv_cache_is_not_said_to_exceed_the_context(open_house: Open) -> None:
    """The engine tells both, and would say the same."""
    house = await open_house(max_model_len=4096, context_len=6000)
    for fields, code, param, holds in (
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "kv_capacity_exceeded", "messages", "4095"),
        ({"max_tokens": 4096}, "kv_capacity_exceeded", "max_tokens", "4095"),
        ({"max_tokens": 6000}, "context_length_exceeded", "max_tokens", "6000"),
    ):
        async with house.chat(fields) as answer:
            assert answer.status == 400
            error = await error_of(answer)
        assert (error["code"], error["param"]) == (code, param)
        assert f"holds {holds} tokens" in error["message"]
    assert not house.engine.seen
    async with house.chat(max_tokens=4096 - len(PROMPT)) as answer:
        assert answer.status == 200
    async with house.get("/v1/models/tiny") as answer:
        listed = await answer.json()
    assert (listed["max_model_len"], listed["context_len"]) == (4096, 6000)


async def test_bodies_are_bounded(open_house: Open) -> None:
    house = await open_house(limits={"body_len_max": 2000})
    long = "x" * 3000
    async with house.chat(user=long) as answer:
        assert answer.status == 413
        assert (await error_of(answer))["code"] == "request_too_large"

    async def pieces() -> Any:
        for _ in range(30):
            yield b"x" * 100

    url = f"{house.url}/v1/chat/completions"
    async with house.client.post(url, data=pieces(), headers=house.headers) as answer:
        assert answer.status == 413
    async with house.client.post(
        url, data=b"{}", headers=house.headers | {"content-encoding": "gzip"}
    ) as answer:
        assert answer.status == 400


async def test_a_body_that_arrives_too_slowly_is_a_408_timeout(open_house: Open) -> None:
    house = await open_house(timeouts={"body_s": 0.05})
    never = asyncio.Event()

    async def drip() -> Any:
        yield b"{"
        await never.wait()

    request = house.client.post(f"{house.url}/v1/chat/completions", data=drip(), headers=house.headers)
    async with asyncio.timeout(PATIENCE_S), request as answer:
        assert answer.status == 408
        assert (await error_of(answer))["code"] == "request_body_timeout"
    assert (await house.line())["stage"] == "body"


async def test_unknown_routes_and_methods(house: House) -> None:
    async with house.get("/nowhere") as answer:
        assert answer.status == 404
        assert (await error_of(answer))["code"] == "unknown_url"
    async with house.get("/v1/chat/completions") as answer:
        assert answer.status == 405
        assert (await error_of(answer))["code"] == "method_not_allowed"
    async with house.client.delete(f"{house.url}/v1/models", headers=house.headers) as answer:
        assert answer.status == 405


@pytest.mark.parametrize(
    "head",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nhost : b\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 10_000 + b"\r\n\r\n",
        b"GET /" + b"y" * 10_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\n" + b"".join(b"x%d: y\r\n" % i for i in range(200)) + b"\r\n",
    ],
    ids=range(6),
)
async def test_malformed_http_is_refused_in_openais_envelope(house: House, head: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port)
    writer.write(head)
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    writer.close()
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
    assert b"x-request-id: req_" in answer.lower()
    assert b'{"error":{"message":"' in answer
    line = await house.line()
    assert line["endpoint"] == "unparsed"


PLACE = "tools[3].function.parameters.uniqueItems"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"response_format": {"type": "json_object"}, "colour": 1}, f"colour, {PLACE}"),
        ({"colour": 1}, "colour"),  # nothing of it is for the engine to ignore
    ],
)
async def test_what_an_engine_ignores_of_a_schema_is_told(
    house: House, fields: dict[str, Any], told: str
) -> None:
    script = unary()
    script.headers[IGNORED_FIELDS_HEADER] = f"colour, {PLACE}, not fit"
    house.engine.script = script
    async with house.chat(**fields) as answer:
        assert (answer.status, answer.headers[IGNORED_FIELDS_HEADER]) == (200, told)
    await house.at_rest()
