"""The API's description: it is served to everybody, it says what the code does, and what it says holds."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import pytest
import schemathesis

from gateway.app import Gateway
from gateway.config.edge import LimitsConfig
from gateway.config.whole import load
from gateway.endpoints.routes import DESCRIBE
from gateway.endpoints.table import ENDPOINTS
from gateway.openapi import public
from gateway.request import edge
from shared.apis.chat import AssistantMessage, ChatChoice, ChatCompletion
from shared.apis.completions import Completion, CompletionChoice
from shared.apis.generation import PromptTokensDetails, Usage
from shared.apis.message_answers import STOP, AnswerText, MessageAnswer, message_usage
from shared.apis.messages import CountTokensResponse
from shared.apis.responses.answer import InputTokens
from shared.apis.tokenize import DetokenizeResponse, TokenizeResponse
from shared.wire.sse import CLOSING_HEADER, closing_comment, encode_closing, named_event
from tests.bench.cpu import resident_bytes
from tests.bench.memory_sums import gateway_memory_max
from tests.gateway.conftest import CHAT, KEY, House, Open, error_of, settings, until
from tests.gateway.endpoints.described import EXAMPLES, asked_of
from tests.gateway.endpoints.responses_scripts import streamed
from tests.gateway.endpoints.responses_scripts import unary as responded
from tests.gateway.fake_engine import (
    HEADERS,
    FakeEngine,
    Script,
    Seen,
    byte_bundle,
    chunk,
    closing,
    stream,
    unary,
)

PLAIN: Final = {"content-type", "content-length", "date", "server"}
"""The headers that any answer of HTTP has."""
API: Final = Path(__file__).parents[3] / "shared/API.md"
pytestmark = pytest.mark.hop("http2")


def described() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(public.document())
    return document


async def test_the_description_is_served_without_a_key(house: House) -> None:
    url = house.url + DESCRIBE.path
    async with house.client.get(url, headers={"x-request-id": "reader.1"}) as answer:
        assert (answer.status, answer.content_type) == (200, "application/json")
        assert answer.headers["x-request-id"] == "reader.1"
        assert (await answer.json())["openapi"].startswith("3.1.")
        length = answer.headers["content-length"]
    async with house.client.head(url) as answer:
        assert (answer.status, answer.headers["content-length"]) == (200, length)
        assert await answer.read() == b""
    async with house.client.post(url) as answer:
        assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")
        assert (await error_of(answer))["code"] == "method_not_allowed"
    assert [line["endpoint"] for line in await house.lines(3)] == [DESCRIBE.path] * 3


async def test_those_who_read_it_slowly_are_bounded_and_hold_up_nobody(
    open_house: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "DESCRIBING_MAX", 1)
    monkeypatch.setattr(edge, "document", lambda: b"x" * 4_000_000)  # more than the kernel holds for a client
    house: House = await open_house(timeouts={"slow_client_s": 0.2})
    _, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port, limit=1)
    writer.write(b"GET /openapi.json HTTP/1.1\r\nhost: here\r\n\r\n")
    await until(lambda: house.gateway._edge._describing == 1)
    async with house.client.get(house.url + DESCRIBE.path) as answer:
        assert (answer.status, (await error_of(answer))["code"]) == (503, "queue_full")
    async with house.get("/v1/models") as answer:
        assert answer.status == 200
    await until(lambda: house.gateway._edge._describing == 0)
    writer.transport.abort()
    assert "slow_client" in {line.get("error_code") for line in await house.lines(3)}


def test_every_endpoint_and_every_error_is_described() -> None:
    document = described()
    named = set(re.findall(r"`(?:GET|POST|DELETE) (/[^`]*)`", API.read_text())) - {"/metrics"}
    assert set(document["paths"]) == named
    assert set(ENDPOINTS) <= set(document["paths"])
    codes = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| \d{3} ", API.read_text(), re.MULTILINE)
    told = str([path["post"]["responses"] for path in document["paths"].values() if "post" in path])
    for code in re.findall(r"`(\w+)`", " ".join(codes)):
        assert f"`{code}`" in told


def test_a_field_is_described_with_its_bounds_and_its_meaning() -> None:
    schemas = described()["components"]["schemas"]
    fields = schemas["ChatRequest"]["properties"]
    assert {"type": "integer", "minimum": 1, "maximum": 64} in fields["n"]["anyOf"]
    assert fields["top_k"]["description"].startswith("The number of likeliest tokens")
    assert fields["functions"]["enum"] == [None, []]
    assert fields["tools"]["description"].startswith("The functions that the model may call")
    assert schemas["FunctionSpec"]["properties"]["name"]["type"] == "string"
    assert "penstock" not in fields, "the gateway's own"
    assert "PromptExtension" not in schemas


async def test_every_header_of_an_answer_is_described() -> None:
    limits = {
        "requests_per_min": 60,
        "tokens_per_min": 10**6,
        "tokens_per_day": 10**6,
        "tokens_per_month": 10**6,
    }
    spare = {"name": "spare", "upstream_model": "tiny"}
    async with FakeEngine(bundle=byte_bundle()) as engine:
        engine.script = unary()
        models = [
            {"name": "tiny", "fallback": ["spare"], "replicas": ["http://127.0.0.1:1"]},
            {**spare, "replicas": [engine.url]},
        ]
        gateway = Gateway(load(settings(engine.url, models=models, tenant={"limits": limits}), {}))
        async with gateway, aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as client:
            url, paths = f"http://127.0.0.1:{gateway.port}", described()["paths"]
            for method, path, body in (
                ("get", "/v1/models", None),
                ("delete", "/v1/requests/{id}", None),
                ("post", "/v1/chat/completions", {**CHAT, "made_up": 1}),
                ("post", "/v1/messages", {**CHAT, "max_tokens": 9, "made_up": 1}),
            ):
                async with client.request(method, url + path.replace("{id}", "r1"), json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    own = {name.lower() for name in answer.headers}
                told = paths[path][method]["responses"]["200"]["headers"].keys()
                assert own - PLAIN <= told
                if method == "post":
                    assert told == own - PLAIN


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{id}", "/v1/requests/{id}"])
def test_what_a_request_that_no_engine_answers_may_be_refused_with_is_described(path: str) -> None:
    """A key may be restricted to other endpoints, and any request can be ended by its id."""
    operations = described()["paths"][path]
    told = operations["delete" if "requests" in path else "get"]["responses"]
    assert {"401", "403", "404", "499", "503", "504"} <= told.keys()


# -- what it says holds ---------------------------------------------------------------------------


MESSAGE: Final = named_event(b"content_block_stop", b'{"type":"content_block_stop","index":0}')


def answer(seen: Seen) -> Script:
    """What an engine answers, in short, to any request."""
    usage = Usage(3, 2, 5, PromptTokensDetails())
    one: dict[str, Any] = {"created": 1, "model": "tiny", "system_fingerprint": "fp"}
    value: msgspec.Struct
    reported = {CLOSING_HEADER: encode_closing(closing(3, 2)).decode()}
    match seen.path:
        case "/tokenize":
            value, reported = TokenizeResponse(1, 4096, [1]), {}
        case "/detokenize":
            value, reported = DetokenizeResponse("a"), {}
        case "/v1/responses/input_tokens":
            value, reported = InputTokens(1), {}
        case "/v1/responses":
            return streamed("a") if seen.body.get("stream") else responded("a")
        case "/v1/messages/count_tokens":
            value, reported = CountTokensResponse(1), {}
        case "/v1/messages" if seen.body.get("stream"):
            return Script([MESSAGE, STOP, closing_comment(closing(3, 2))])
        case "/v1/messages":
            used = message_usage(usage)
            value = MessageAnswer(
                id="m", model="tiny", content=[AnswerText("a")], stop_reason="end_turn", usage=used
            )
        case _ if seen.body.get("stream"):
            return stream(chunk("a"))
        case "/v1/completions":
            value = Completion(id="c", choices=[CompletionChoice(0, "a", "stop")], usage=usage, **one)
        case _:
            choice = ChatChoice(0, AssistantMessage("a"), "stop")
            value = ChatCompletion(id="c", choices=[choice], usage=usage, **one)
    return Script([HEADERS, msgspec.json.encode(value)], 200, "application/json", reported)


LIMITS: Final = LimitsConfig(
    body_len_max=64 * 1024, request_memory=40 * 1024**2, live_max=16, tokenizer_threads=1, connections_max=64
)
"""With which a gateway's bound on memory is 203 MiB above what it holds at rest."""
MEMORY_MAX: Final = gateway_memory_max(
    LIMITS.request_memory, LIMITS.live_max, LIMITS.tokenizer_threads, LIMITS.connections_max
)


@pytest.mark.slow
@pytest.mark.parametrize("mode", schemathesis.GenerationMode, ids=str)
async def test_answers_are_as_described(open_house: Open, mode: schemathesis.GenerationMode) -> None:
    """12,500 requests with `DRAWN=whole`. This process, which draws them too, keeps to the gateway's bound on
    memory."""
    house: House = await open_house(model={"aliases": ["*"]}, limits=msgspec.to_builtins(LIMITS))
    house.engine.script = answer
    at_rest = resident_bytes(os.getpid())
    asked = await asyncio.to_thread(asked_of, described(), house.url, KEY, mode)
    assert asked > 6 * EXAMPLES
    await house.at_rest()
    await until(lambda: len(house._lines()) > 12 * EXAMPLES)  # with those of the checks
    statuses = {line["status"] for line in house._lines()}
    assert statuses & {400, 404}
    assert 200 in statuses
    assert resident_bytes(os.getpid()) - at_rest < MEMORY_MAX
