"""Rankings through the gateway: counted and charged, at engines of ours that rank and of other makes."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec
import pytest
from tokenizers import Tokenizer as Raw

from shared.apis.rerank import DOCUMENTS_MAX
from shared.text.reranking import FORMATS
from shared.text.tokenizer import Tokenizer, TokenizerBundle
from shared.wire import sse
from tests.gateway.conftest import House, Open, error_of
from tests.gateway.fake_engine import Script, Seen, byte_bundle, closing

ABLE = {"tools": False, "reasoning": False, "structured_output": False, "reranking": True}
QWEN3 = FORMATS["qwen3"]
DOCUMENTS = ["a fox", "a dog"]
pytestmark = pytest.mark.hop("http2")


def ranking_bundle() -> TokenizerBundle:
    raw = Raw.from_str(byte_bundle().tokenizer_json)
    raw.add_tokens(["yes", "no"])
    return msgspec.structs.replace(byte_bundle(), tokenizer_json=raw.to_str(), reranker="qwen3")


def ranked(seen: Seen, tokens: int) -> Script:
    """A ranking in the order of the documents, with the usage that vLLM tells."""
    given = seen.body["documents"]
    results = [
        {
            "index": at,
            "document": {"text": one if isinstance(one, str) else one["text"]},
            "relevance_score": 0.5,
        }
        for at, one in enumerate(given)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    body = {"id": "rerank-1", "model": "tiny", "results": results, "usage": usage}
    told = sse.encode_closing(closing(prompt=tokens, completion=0)).decode()
    headers = {sse.CLOSING_HEADER: told} if "penstock" in seen.body else {}
    return Script([msgspec.json.encode(body)], 200, "application/json", headers)


async def ours(open_house: Open, **sections: Any) -> House:
    house: House = await open_house(bundle=ranking_bundle(), capabilities=ABLE, **sections)
    house.engine.script = lambda seen: ranked(seen, sum(map(len, seen.body["penstock"]["prompt_ids"])))
    return house


async def theirs(open_house: Open, **sections: Any) -> House:
    house: House = await open_house(bundle=None, **sections)
    house.engine.script = lambda seen: ranked(seen, 7 * len(seen.body["documents"]))
    return house


def ask(house: House, path: str = "/v1/rerank", **fields: Any) -> aiohttp.client._RequestContextManager:
    body = {"model": "tiny", "query": "hi", "documents": DOCUMENTS, **fields}
    return house.client.post(f"{house.url}{path}", json=body, headers=house.headers)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_an_engine_of_ours_is_sent_what_was_counted(open_house: Open, path: str) -> None:
    house = await ours(open_house, tenant={"limits": {"tokens_per_min": 100_000}})
    async with ask(house, path) as answer:
        assert answer.status == 200
        assert len((await answer.json())["results"]) == 2
        assert "x-ratelimit-limit-tokens" in answer.headers
    [seen] = house.engine.seen
    encode = Tokenizer(ranking_bundle()).encode
    pieces = [QWEN3.beginning(None, "hi"), *(f" {one}{QWEN3.behind}" for one in DOCUMENTS)]
    assert seen.path == path
    assert seen.body["penstock"]["prompt_ids"] == [encode(piece, False) for piece in pieces]
    tokens = sum(len(encode(piece, False)) for piece in pieces)
    line = await house.line()
    told = line["reserved_tokens"], line["settled_tokens"], line["prompt_tokens"], line["completion_tokens"]
    assert told == (tokens, tokens, tokens, 0), "what they share counts once, and nothing is generated"
    assert line["endpoint"] == path
    await house.at_rest()


async def test_another_make_is_sent_its_own_fields_alone(open_house: Open) -> None:
    house = await theirs(open_house, tenant={"limits": {"tokens_per_min": 100_000}})
    fields: dict[str, Any] = {"top_n": 1, "truncate_prompt_tokens": -1, "user": "u", "instruction": "x"}
    async with ask(house, **fields, temperature=0.5, max_tokens=5, priority=-5, made_up=1) as answer:
        assert answer.status == 200
        left_out = set(answer.headers["x-penstock-ignored-fields"].split(", "))
    assert left_out == {"temperature", "max_tokens", "priority", "made_up"}
    [seen] = house.engine.seen
    assert (seen.path, seen.body) == (
        "/v1/rerank",
        {"model": "tiny", "query": "hi", "documents": DOCUMENTS, **fields},
    )
    line = await house.line()
    assert (line["settled_tokens"], line["completion_tokens"]) == (14, 0)
    assert line["reserved_tokens"] > 2 * len("a fox") / 4, "for each document all that is asked of it"
    await house.at_rest()


async def test_a_document_that_is_too_long_is_named_before_anything_is_sent(open_house: Open) -> None:
    house = await ours(open_house, max_model_len=600)
    async with ask(house, documents=["a", "b" * 600]) as answer:
        error = await error_of(answer)
    assert (answer.status, error["code"], error["param"]) == (400, "context_length_exceeded", "documents[1]")
    async with ask(house, documents=["a", "b" * 600], truncate_prompt_tokens=-1) as answer:
        assert answer.status == 200
    [seen] = house.engine.seen
    shared, _, cut = map(len, seen.body["penstock"]["prompt_ids"])
    assert shared + cut == 600
    await house.at_rest()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": ["a"] * (DOCUMENTS_MAX + 1)}, "documents"),
        ({"documents": ["a", ""]}, "documents[1]"),
        ({"query": None}, "query"),
        ({"stream": True}, "stream"),
    ],
)
async def test_what_cannot_be_ranked_is_refused_by_name(
    open_house: Open, fields: dict[str, Any], param: str
) -> None:
    house = await theirs(open_house)
    async with ask(house, **fields) as answer:
        assert (answer.status, (await error_of(answer))["param"]) == (400, param)
    assert not house.engine.seen


async def test_who_leaves_ends_the_ranking(open_house: Open) -> None:

    house = await ours(open_house)
    never = asyncio.Event()
    house.engine.script = Script([never], 200, "application/json")
    task = asyncio.create_task(ask(house).__aenter__())
    await house.engine.arrived.wait()
    task.cancel()
    [seen] = house.engine.seen
    await asyncio.wait_for(seen.cancelled.wait(), 20)
    await house.at_rest()
