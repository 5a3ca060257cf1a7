"""Vectors of texts: what a request may ask, what it is answered, and what it costs."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.contract.messages import FinishReason
from tests.engine.api.conftest import MODEL, Serve, Served, until
from tests.engine.api.fake_core import vector_of
from tests.engine.api.tiny import write_model_dir

PATH = "/v1/embeddings"
LEN = 6
CONTEXT_LEN = 256
"""That of the fake core."""


@pytest.fixture
async def embeds(serve: Serve) -> AsyncIterator[Served]:
    """An engine whose model answers, and makes vectors, too."""
    async with serve(
        core={"vector_len": LEN}, embeddings="mean", embedding_dimensions="2,4", max_queue_len=4
    ) as served:
        yield served
        served.assert_nothing_leaks()


def write_embedder(directory: Path, **config: Any) -> Path:
    """The files of a model that makes vectors, and does nothing else."""
    write_model_dir(directory)
    kinds = ["models.Transformer", "models.Pooling", "models.Normalize"]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.{kind}"}
        for at, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": LEN, "pooling_mode_lasttoken": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def ask(served: Served, given: Any, **fields: Any) -> Any:
    return served.http.post(PATH, json={"model": MODEL, "input": given, **fields})


def vectors(answer: httpx.Response) -> list[list[float]]:
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["object"], body["model"]) == ("list", MODEL)
    assert [one["index"] for one in body["data"]] == list(range(len(body["data"])))
    found = []
    for one in body["data"]:
        numbers = one["embedding"]
        if isinstance(numbers, str):
            packed = base64.b64decode(numbers)
            numbers = [*struct.unpack(f"<{len(packed) // 4}f", packed)]
        found.append(numbers)
    return found


def expected(ids: list[list[int]], length: int = LEN) -> list[list[float]]:
    return [[*struct.unpack(f"<{length}f", vector_of(one, length))] for one in ids]


def refused(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


@pytest.mark.parametrize("form", [None, "float", "base64"])
async def test_every_form_of_input_has_a_vector_for_each(embeds: Served, form: str | None) -> None:
    fields = {} if form is None else {"encoding_format": form}
    for given, ids in (
        ("hello world", [embeds.ids("hello world")]),
        (["hello", "the lazy dog"], [embeds.ids("hello"), embeds.ids("the lazy dog")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ):
        answer = await ask(embeds, given, **fields)
        assert vectors(answer) == expected(ids)
        tokens = sum(map(len, ids))
        assert answer.json()["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


async def test_the_sdk_asks_for_them_in_base64(embeds: Served) -> None:
    url = f"http://127.0.0.1:{embeds.engine.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as sdk:
        for form in ({}, {"encoding_format": "float"}):
            answer = await sdk.embeddings.create(model=MODEL, input=["hello", "dog"], **form)
            told = [one.embedding for one in answer.data]
            assert told == expected([embeds.ids("hello"), embeds.ids("dog")])
            assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0


async def test_2048_inputs_are_one_request(embeds: Served, lines: list[dict[str, Any]]) -> None:
    """A tenant that has nothing else waiting may send as many, however short the queue is."""
    answer = await ask(embeds, [[at % 300] for at in range(2048)])
    assert vectors(answer) == expected([[at % 300] for at in range(2048)])
    [line] = [one for one in lines if one["endpoint"] == PATH]
    assert (line["sequences"], line["prompt_tokens"], line["completion_tokens"]) == (2048, 2048, 0)
    assert (await ask(embeds, [[1]] * 2049)).status_code == 400


async def test_the_core_is_asked_for_vectors_and_no_token(embeds: Served) -> None:
    await ask(embeds, ["hello", "dog"], dimensions=2)
    [asked] = embeds.core.asked
    assert (asked.sampling.vector_len, asked.sampling.max_tokens) == (2, 0)
    assert [prompt.max_tokens for prompt in asked.prompts] == [0, 0]


async def test_only_what_a_model_may_be_cut_to_is_taken(embeds: Served) -> None:
    for length in (2, 4, LEN):
        assert [len(one) for one in vectors(await ask(embeds, "dog", dimensions=length))] == [length]
    for length in (1, 3, LEN + 1):
        answer = await ask(embeds, "dog", dimensions=length)
        assert refused(answer) == (400, "invalid_value", "dimensions")
        assert "2, 4" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("stated", "taken"),
    [
        ({}, []),
        ({"is_matryoshka": False}, []),
        ({"is_matryoshka": True}, [1, 2, 3, 4, 5]),
        ({"matryoshka_dimensions": [2, 5]}, [2, 5]),
    ],
)
async def test_the_models_own_config_says_what_it_may_be_cut_to(
    tmp_path: Path, serve: Serve, stated: dict[str, Any], taken: list[int]
) -> None:
    directory = write_embedder(tmp_path, **stated)
    async with serve(core={"vector_len": LEN}, directory=directory) as served:
        answers = [await ask(served, "dog", dimensions=length) for length in range(1, LEN)]
        assert [at + 1 for at, answer in enumerate(answers) if answer.status_code == 200] == taken


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [[7] * (CONTEXT_LEN + 1)]}, "input[0]"),
        ({"input": [[7], [7] * (CONTEXT_LEN + 1)]}, "input[1]"),
        ({"input": [7] * (CONTEXT_LEN + 1)}, "input"),
        ({"input": "dog " * (CONTEXT_LEN + 1)}, "input"),
        ({"input": ["dog", "dog " * (CONTEXT_LEN + 1)]}, "input[1]"),
        ({"input": [[-1]]}, "input"),
        ({"input": [[100_000]]}, "input"),
        ({"input": "dog", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "dog", "truncate_prompt_tokens": CONTEXT_LEN + 1}, "truncate_prompt_tokens"),
        ({"input": "dog", "add_special_tokens": False}, "add_special_tokens"),
    ],
)
async def test_what_cannot_be_embedded_is_refused_by_name(
    embeds: Served, fields: dict[str, Any], param: str
) -> None:
    answer = await embeds.http.post(PATH, json={"model": MODEL, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not embeds.core.asked


async def test_an_input_may_take_all_of_the_context(embeds: Served) -> None:
    assert vectors(await ask(embeds, [7] * CONTEXT_LEN)) == expected([[7] * CONTEXT_LEN])


async def test_what_is_too_long_is_cut_where_its_caller_says_so(embeds: Served) -> None:
    long = "dog hello " * 300
    ids = embeds.ids(long)
    for cut, kept in ((3, 3), (CONTEXT_LEN, CONTEXT_LEN), (-1, CONTEXT_LEN)):
        answer = await ask(embeds, [long, "dog"], truncate_prompt_tokens=cut)
        assert vectors(answer) == expected([ids[:kept], embeds.ids("dog")])
        assert answer.json()["usage"]["prompt_tokens"] == kept + len(embeds.ids("dog"))
        given = [7, *[8] * 400]
        assert vectors(await ask(embeds, given, truncate_prompt_tokens=cut)) == expected([given[:kept]])


async def test_a_model_serves_what_it_can_and_says_so(tmp_path: Path, serve: Serve, served: Served) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    told = (await served.http.get("/v1/models")).json()["data"][0]["capabilities"]
    assert (told["embeddings"], told["generation"]) == (False, True)
    assert refused(await ask(served, "dog")) == (404, "path_not_served", None)
    directory = write_embedder(tmp_path)
    async with serve(core={"vector_len": LEN}, directory=directory) as embedder:
        told = (await embedder.http.get("/v1/models")).json()["data"][0]["capabilities"]
        assert (told["embeddings"], told["generation"]) == (True, False)
        assert refused(await embedder.http.post("/v1/chat/completions", json=chat))[:2] == (
            404,
            "path_not_served",
        )
        assert vectors(await ask(embedder, "dog")) == expected([embedder.ids("dog")])
        assert not embedder.core.asked[1:]


async def test_a_vector_that_is_not_finite_is_an_error(embeds: Served) -> None:
    embeds.core.is_held = True
    asking = asyncio.create_task(ask(embeds, ["hello", "dog"]))
    await until(lambda: len(embeds.core.waiting) == 2)
    embeds.core.finish(embeds.core.added[0].handle, FinishReason.NUMERIC)
    embeds.core.release()
    assert (await asking).status_code == 500


async def test_a_caller_that_leaves_ends_all_of_its_inputs(embeds: Served) -> None:
    embeds.core.is_held = True
    asking = asyncio.create_task(ask(embeds, [[1], [2], [3]]))
    await until(lambda: len(embeds.core.waiting) == 3)
    asking.cancel()
    handles = [added.handle for added in embeds.core.added]
    await until(lambda: embeds.core.aborted == handles)
    embeds.core.release()


async def test_memory_for_vectors_is_reserved_before_they_are_made(serve: Serve) -> None:
    """2,048 vectors of a million numbers are more than the process may hold for a tenant."""
    async with serve(core={"vector_len": 1 << 20}, embeddings="mean") as served:
        answer = await ask(served, [[1]] * 2048)
        assert answer.status_code == 503
        assert not served.core.asked
        assert math.isclose(vectors(await ask(served, [[1]] * 2))[1][1], 1.0)
