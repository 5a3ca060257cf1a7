"""Refusals: at once, in OpenAI's shape, with the field named, and never a 500."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from shared.wire.shapes import BODY_LEN_MAX
from tests.engine.api.conftest import MODEL, PATIENCE_S, Serve, Served, until

TOOLS = [{"type": "function", "function": {"name": "f"}}]
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
TEXT = {"model": MODEL, "prompt": "hello"}


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error = body["error"]
    assert isinstance(error, dict)
    return error


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("chat/completions", {**CHAT, "model": "other"}, 404, "model_not_found", "model"),
        ("chat/completions", {**CHAT, "max_tokens": 256}, 400, "context_length_exceeded", "max_tokens"),
        (
            "chat/completions",
            {**CHAT, "max_completion_tokens": 9999},
            400,
            "context_length_exceeded",
            "max_completion_tokens",
        ),
        ("completions", {**TEXT, "prompt": [5] * 256}, 400, "context_length_exceeded", "prompt"),
        (
            "completions",
            {**TEXT, "prompt": [5] * 250, "max_tokens": 7},
            400,
            "context_length_exceeded",
            "max_tokens",
        ),
        ("completions", {**TEXT, "prompt": [5, 340]}, 400, "invalid_value", "prompt"),
        ("completions", {**TEXT, "prompt": ""}, 400, "invalid_value", "prompt"),
        ("chat/completions", {**CHAT, "stop_token_ids": [340]}, 400, "invalid_value", "stop_token_ids"),
        ("chat/completions", {**CHAT, "logit_bias": {"340": 1}}, 400, "invalid_value", "logit_bias"),
        ("chat/completions", {**CHAT, "messages": []}, 400, "invalid_value", "messages"),
        ("chat/completions", {**CHAT, "tools": TOOLS}, 400, "invalid_value", "tools"),
        ("chat/completions", {**CHAT, "temperature": 3}, 400, "invalid_value", "temperature"),
        ("chat/completions", {"model": MODEL}, 400, "invalid_value", "messages"),
    ],
)
async def test_bad_requests(
    served: Served, path: str, body: dict[str, Any], status: int, code: str, param: str
) -> None:
    for streams in ({}, {"stream": True}):
        response = await served.http.post(f"/v1/{path}", json={**body, **streams})
        error = error_of(response, status)
        assert (error["code"], error["param"]) == (code, param)
        assert response.headers["x-should-retry"] == "false"
    assert served.core.added == []


async def test_a_context_error_says_both_numbers(served: Served) -> None:
    response = await served.http.post(
        "/v1/completions", json={**TEXT, "prompt": [5] * 200, "max_tokens": 100}
    )
    message = error_of(response, 400)["message"]
    assert "256" in message
    assert "300" in message
    assert "200 in the prompt" in message


async def test_what_can_never_fit_the_kv_pool_is_refused(serve: Serve) -> None:
    async with serve(core={"pages": 4, "page_size": 16}) as served:
        response = await served.http.post(
            "/v1/completions", json={**TEXT, "prompt": [5] * 60, "max_tokens": 6}
        )
        error = error_of(response, 400)
        assert (error["code"], error["param"]) == ("kv_capacity_exceeded", "max_tokens")
        response = await served.http.post(
            "/v1/completions", json={**TEXT, "prompt": [5] * 65, "max_tokens": 1}
        )
        assert error_of(response, 400)["param"] == "prompt"
        long = {**TEXT, "prompt": "the lazy dog " * 20_000}
        error = error_of(await served.http.post("/v1/completions", json=long), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        served.says("x")
        response = await served.http.post(
            "/v1/completions", json={**TEXT, "prompt": [5] * 60, "max_tokens": 5}
        )
        assert response.status_code == 200
        assert (await served.http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        added = served.core.added[-1]
        assert len(added.prompt_ids) + added.sampling.max_tokens - 1 == 64


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"model": "tiny", "messages": ' + b"[" * 100_000,
        b'{"model": "tiny", "prompt": {"a": 1}}',
        b'{"model": "tiny", "prompt": [1, "a"]}',
        b'{"model": "tiny", "prompt": "a", "penstock": {"tokenizer": 1, "prompt_ids": []}}',
        b'{"model": "tiny", "prompt": "a", "logit_bias": {"x": 1}}',
        b'{"model": 7, "prompt": "a"}',
        b'{"model": null, "messages": null, "prompt": null, "tokens": null}',
    ],
)
async def test_hostile_bodies(served: Served, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        response = await served.http.post(path, content=body)
        if "tokenize" in path and response.status_code == 200:
            assert response.headers["content-type"] == "application/json"  # the bad field means nothing here
        else:
            error_of(response, 400)
    assert served.core.added == []


async def test_a_page_of_any_site_in_a_developers_browser_asks_for_nothing(served: Served) -> None:
    """A browser sends it without asking first; it asks first, and is refused, before it sends JSON."""
    body = {"model": MODEL, "prompt": "the", "max_tokens": 1}
    headers = {"origin": "http://evil.example", "content-type": "text/plain"}
    for path in ("/v1/completions", "/tokenize"):
        error = error_of(await served.http.post(path, content=json.dumps(body), headers=headers), 400)
        assert error["param"] == "content-type"
    asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    error_of(await served.http.request("OPTIONS", "/v1/completions", headers=asked), 405)
    del headers["origin"]  # as curl sends it
    answer = await served.http.post("/v1/completions", content=json.dumps(body), headers=headers)
    assert answer.status_code == 200


async def test_a_body_that_is_too_large(served: Served) -> None:
    response = await served.http.post("/v1/completions", content=b"x" * (BODY_LEN_MAX + 1))
    assert error_of(response, 413)["code"] == "request_too_large"
    assert response.headers["connection"] == "close"

    async def chunks() -> Any:
        for _ in range(BODY_LEN_MAX // 2**20 + 1):
            yield b"x" * 2**20

    response = await served.http.post("/v1/completions", content=chunks())
    assert error_of(response, 413)["code"] == "request_too_large"


async def test_a_compressed_body_is_refused(served: Served) -> None:
    response = await served.http.post("/v1/completions", content=b"x", headers={"content-encoding": "gzip"})
    error_of(response, 400)


async def test_a_body_that_does_not_come(serve: Serve) -> None:
    async with serve(body_timeout_s=0.05) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.engine.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert b" 408 " in head.split(b"\r\n")[0]
        assert b"request_body_timeout" in await asyncio.wait_for(reader.read(), 10)
        writer.close()


async def test_a_head_that_does_not_come(serve: Serve) -> None:
    async with serve(keepalive_timeout_s=0.05) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.engine.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-a: ")
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        writer.close()


async def test_paths_and_methods(served: Served) -> None:
    assert error_of(await served.http.get("/nowhere"), 404)["code"] == "unknown_url"
    assert error_of(await served.http.get("/v1/requests/"), 404)["code"] == "unknown_url"
    assert error_of(await served.http.get("/v1/chat/completions"), 405)["code"] == "method_not_allowed"
    assert error_of(await served.http.post("/v1/requests/abc"), 405)["code"] == "method_not_allowed"
    assert error_of(await served.http.get("/v1/models/other"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/v1/models", f"/v1/models/{MODEL}", "/livez", "/metrics"])
async def test_head_is_answered_as_get_is_without_the_body(
    served: Served, http2: httpx.AsyncClient, path: str
) -> None:
    for client in (served.http, http2):
        for _ in range(2):  # the connection is still in step afterwards
            got, head = await client.get(path), await client.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-type"] == got.headers["content-type"]
            assert int(head.headers["content-length"]) > 0
        missing = await client.head("/v1/models/other")
        assert (missing.status_code, missing.content) == (404, b"")
        assert (await client.head("/v1/chat/completions")).status_code == 405


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/models/", "/v1/models"),
        ("/models/m", "/v1/models/m"),
    ],
)
async def test_a_path_that_is_nearly_right_is_answered_with_the_one_that_is(
    served: Served, path: str, meant: str
) -> None:
    response = await served.http.post(path, json=CHAT)
    assert f"Did you mean '{meant}'?" in error_of(response, 404)["message"]


@pytest.mark.parametrize("data", [b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n", b"NONSENSE\r\n\r\n"])
async def test_no_version_of_ours_is_told(served: Served, data: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.engine.port)
    writer.write(data)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    writer.close()
    assert b"\r\nserver: penstock\r\n" in head.lower()
    assert b"aiohttp" not in head


async def test_request_ids_are_accepted_or_minted(served: Served) -> None:
    for sent, is_kept in [("abc-1.2_3", True), ("a" * 65, False), ("a b", False), ("", False)]:
        response = await served.http.get("/v1/models", headers={"x-request-id": sent})
        assert (response.headers["x-request-id"] == sent) is is_kept
        assert response.headers["x-penstock-tokenizer"] == served.tokenizer.hash


@pytest.mark.parametrize("name", [b"\xff", b"a" * 65, b"two words", b"a/b"])
async def test_a_name_that_no_tenant_has_is_refused_and_not_logged(
    served: Served, lines: list[dict[str, Any]], name: bytes
) -> None:
    response = await served.http.post(
        "/v1/chat/completions", json=CHAT, headers=[(b"x-penstock-tenant", name)]
    )
    assert error_of(response, 400)["param"] == "x-penstock-tenant"
    [line] = lines
    assert line["end_reason"] == "refused"
    assert "tenant" not in line


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/metrics"])
@pytest.mark.parametrize(
    "header",
    [
        *(b"x-request-id", b"traceparent", b"tracestate", b"x-penstock-service-tier", b"x-queue-timeout"),
        *(b"x-penstock-first-token-timeout-ms", b"x-penstock-session", b"accept", b"content-type"),
        *(b"content-encoding", b"expect"),
    ],
)
async def test_a_header_that_is_no_text_is_its_senders_mistake_or_none(
    served: Served, http2: httpx.AsyncClient, path: str, header: bytes
) -> None:
    served.says("x")
    for client in (served.http, http2):
        method = "GET" if path == "/metrics" else "POST"
        body = None if path == "/metrics" else CHAT
        response = await client.request(method, path, json=body, headers=[(header, b"\xff\x80")])
        assert response.status_code in (200, 400, 415, 417), response.text


@pytest.mark.parametrize(
    "data",
    [
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 10_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X%d: 1\r\n" % i for i in range(200)) + b"\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    ],
)
async def test_what_is_no_http_is_answered_in_our_envelope_and_has_its_line(
    served: Served, lines: list[dict[str, Any]], data: bytes
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.engine.port)
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 400 " in head.split(b"\r\n")[0]
    assert b"x-should-retry: false" in head.lower()
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    [line] = lines
    assert f"x-request-id: {line['request_id']}".encode() in head.lower()
    assert (line["status"], line["end_reason"], line["error_code"]) == (400, "refused", "invalid_value")


async def test_expect_continue(served: Served) -> None:
    served.says("x")
    reader, writer = await asyncio.open_connection("127.0.0.1", served.engine.port)
    body = json.dumps(TEXT).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body))
    assert b" 100 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    writer.write(body)
    assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    writer.close()


async def test_a_queue_is_full_of_tokens_too_but_one_request_may_wait_alone(serve: Serve) -> None:
    async with serve(max_queue_tokens=1) as served:
        served.core.admits = False
        served.says("x")
        waiting = asyncio.create_task(served.http.post("/v1/completions", json=TEXT))
        await until(lambda: served.engine.state.core.waiting == 1)
        response = await served.http.post("/v1/completions", json=TEXT)
        assert error_of(response, 503)["code"] == "queue_full"
        served.core.admits = True
        served.core.release()
        assert (await waiting).status_code == 200
        assert (await served.http.post("/v1/completions", json=TEXT)).status_code == 200
        served.assert_nothing_leaks()


async def test_a_full_queue_is_said_at_once(serve: Serve) -> None:
    async with serve(max_queue_len=2) as served:
        served.core.admits = False
        served.says("x")
        waiting = [asyncio.create_task(served.http.post("/v1/completions", json=TEXT)) for _ in range(2)]
        await until(lambda: served.engine.state.core.waiting == 2)
        response = await served.http.post("/v1/completions", json=TEXT)
        assert error_of(response, 503)["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
        assert response.headers["x-should-retry"] == "true"
        served.core.admits = True
        served.core.release()
        assert [(await task).status_code for task in waiting] == [200, 200]
        served.assert_nothing_leaks()


async def test_one_tenant_fills_its_part_of_the_queue_and_others_still_get_in(serve: Serve) -> None:
    """Three quarters of the places; what a flood may not have is there for everybody else."""
    async with serve(max_queue_len=8) as served:
        served.core.admits = False
        served.says("x")

        def ask(tenant: str) -> asyncio.Task[httpx.Response]:
            headers = {"x-penstock-tenant": tenant}
            return asyncio.create_task(served.http.post("/v1/completions", json=TEXT, headers=headers))

        flood = [ask("flooding") for _ in range(20)]
        await until(lambda: sum(task.done() for task in flood) == 14)
        assert served.engine.state.core.waiting == 6
        for task in flood:
            if task.done():
                assert error_of(task.result(), 503)["code"] == "queue_full"
        others = [ask("other"), ask("another")]
        await until(lambda: served.engine.state.core.waiting == 8)
        assert error_of(await ask("flooding"), 503)["code"] == "queue_full"
        served.core.admits = True
        served.core.release()
        assert [(await task).status_code for task in others] == [200, 200]
        assert sorted([(await task).status_code for task in flood]) == [200] * 6 + [503] * 14
        served.assert_nothing_leaks()


async def test_a_request_larger_than_the_queue_is_taken_when_nobody_waits(serve: Serve) -> None:
    async with serve(max_queue_len=2) as served:
        served.says("x")
        response = await served.http.post("/v1/completions", json={**TEXT, "n": 4})
        assert len(response.json()["choices"]) == 4


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/%ff",
        "/v1/models/%ed%a0%80",
        "/v1/models/%00",
        "/%2e%2e/x",
        "/v1/models/a%2fb",
        "//",
        "/?x",
    ],
)
async def test_hostile_paths(served: Served, path: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.engine.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    writer.close()
    assert head.split(b" ")[1] in (b"404", b"400")
    assert "error" in json.loads(body)


async def test_a_models_name_may_have_a_slash(serve: Serve) -> None:
    async with serve(served_model_name="org/name") as served:
        assert (await served.http.get("/v1/models/org/name")).json()["id"] == "org/name"
        assert (await served.http.get("/v1/models/org%2Fname")).json()["id"] == "org/name"
