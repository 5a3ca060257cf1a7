"""The ranking of documents: their order, what the core is asked for it, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tokenizers import AddedToken

from engine.api.ask.model import UnusableModel, load_model
from engine.api.core.parts import AT_ONCE
from engine.config import EngineConfig
from engine.contract.messages import FinishReason, ServiceClass, StepOutput
from engine.contract.packing import unpacked
from engine.core.queue.newcomers import AddSequence
from shared.text.reranking import FORMATS
from shared.text.tokenizer import Tokenizer, TokenizerBundle, UnusableTokenizer
from tests.engine.api.conftest import MODEL, Serve, Served
from tests.engine.api.tiny import byte_level, write_model_dir
from tests.waiting import until

QWEN3 = FORMATS["qwen3"]
ROOM = {"max_model_len": 2000, "pages": 400}


def write_reranker(directory: Path) -> Path:
    """A model directory whose tokenizer has the tokens of Qwen3-Reranker's questions."""
    write_model_dir(directory)
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<think>", "</think>"])
    tokenizer.add_tokens([AddedToken("yes"), AddedToken("no")])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reranker(tmp_path_factory.mktemp("reranker"))


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(TokenizerBundle.from_dir(model_dir))


@pytest.fixture
def config(model_dir: Path) -> EngineConfig:
    return EngineConfig(
        model=str(model_dir), served_model_name=MODEL, port=0, drain_timeout_s=20.0, reranker="qwen3"
    )


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    async with serve(core=ROOM) as served:
        yield served
        served.assert_nothing_leaks()


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "query": "hello world", "documents": ["a fox", "a dog", "a jug"], **fields}


def whole(query: str, document: str, instruction: str | None = None) -> str:
    return f"{QWEN3.beginning(instruction, query)} {document}{QWEN3.behind}"


def by_text(served: Served, relevance: dict[str, float]) -> None:
    """Let documents have these log-odds."""

    def scores(add: AddSequence) -> list[float]:
        text = served.tokenizer.decode(add.prompt_ids, skip_special_tokens=False)
        return [0.0, next(odds for document, odds in relevance.items() if document in text)]

    served.core.scores = scores


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_documents_are_answered_in_the_order_of_their_relevance(served: Served, path: str) -> None:
    by_text(served, {"fox": -1.0, "dog": 2.0, "jug": 0.0})
    answer = (
        await served.http.post(path, json=asked(documents=["a fox", {"text": "a dog"}, "a jug"]))
    ).json()
    assert answer["id"].startswith("rerank-")
    assert [(one["index"], one["document"]["text"]) for one in answer["results"]] == [
        (1, "a dog"),
        (2, "a jug"),
        (0, "a fox"),
    ]
    found = [one["relevance_score"] for one in answer["results"]]
    assert found == pytest.approx([0.880797, 0.5, 0.268941], abs=1e-6)
    assert not any(add.sampling.max_tokens for add in served.core.added), "nothing is sampled"


async def test_the_core_is_sent_what_they_share_once(served: Served) -> None:
    answer = (await served.http.post("/v1/rerank", json=asked())).json()
    first, rest = served.core.asked
    assert (len(first.prompts), len(rest.prompts)) == (1, 2), "the first goes ahead"
    assert first.shared == rest.shared
    texts = [served.tokenizer.decode(add.prompt_ids, skip_special_tokens=False) for add in served.core.added]
    assert texts == [whole("hello world", document) for document in asked()["documents"]]
    assert [add.prompt_ids for add in served.core.added] == [served.ids(text) for text in texts]
    tokens = [served.ids("no")[0], served.ids("yes")[0]]
    assert {tuple(unpacked(add.sampling.scored)) for add in served.core.added} == {tuple(tokens)}
    own = sum(len(one.ids) // 4 for sent in (first, rest) for one in sent.prompts)
    told = answer["usage"]
    assert told["prompt_tokens"] == told["total_tokens"] == len(first.shared) // 4 + own


async def test_the_instruction_is_the_callers(served: Served) -> None:
    await served.http.post("/v1/rerank", json=asked(instruction="Find jugs.", documents=["a fox"]))
    [add] = served.core.added
    text = served.tokenizer.decode(add.prompt_ids, skip_special_tokens=False)
    assert text == whole("hello world", "a fox", "Find jugs.")


async def test_what_is_answered_is_what_was_asked_for(served: Served) -> None:
    by_text(served, {"fox": -1.0, "dog": 2.0, "jug": 0.0})
    for fields, count, keys in (
        ({"top_n": 2}, 2, {"index", "relevance_score", "document"}),
        ({"top_n": 0}, 3, {"index", "relevance_score", "document"}),
        ({"top_n": 9, "return_documents": False}, 3, {"index", "relevance_score"}),
    ):
        answer = (await served.http.post("/v1/rerank", json=asked(**fields))).json()
        assert [set(one) for one in answer["results"]] == [keys] * count
        assert answer["results"][0]["index"] == 1


async def test_of_two_that_are_as_relevant_the_first_comes_first(served: Served) -> None:
    answer = (await served.http.post("/v1/rerank", json=asked())).json()
    assert [one["index"] for one in answer["results"]] == [0, 1, 2]


async def test_tokens_that_were_found_count_as_cached(served: Served) -> None:
    await served.http.post("/v1/rerank", json=asked())
    # the fake core finds nothing: the sequences that follow the first are charged for what is theirs alone
    exposed = (await served.http.get("/metrics")).text
    shared_len = len(served.core.asked[0].shared) // 4
    [line] = [one for one in exposed.splitlines() if 'uncharged_tokens_total{reason="choice"}' in one]
    assert float(line.split()[-1]) == 2 * shared_len


async def test_a_long_document_is_cut_where_that_is_asked_for(served: Served) -> None:
    long = "the quick brown fox " * 2000
    answer = await served.http.post("/v1/rerank", json=asked(documents=["a fox", long]))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents[1]")
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    for fields, most in (
        ({"max_tokens_per_doc": 7}, None),
        ({"truncate_prompt_tokens": -1}, 2000),
        ({"truncate_prompt_tokens": 400}, 400),
    ):
        served.core.added.clear()
        answer = await served.http.post("/v1/rerank", json=asked(documents=["a fox", long], **fields))
        assert answer.status_code == 200
        lens = [len(add.prompt_ids) for add in served.core.added]
        around = len(served.ids(QWEN3.beginning(None, "hello world"))) + len(served.ids(QWEN3.behind))
        assert lens[1] == (around + 7 if most is None else most)
        ids = served.core.added[1].prompt_ids
        assert list(ids[-len(served.ids(QWEN3.behind)) :]) == served.ids(QWEN3.behind), "its end is whole"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": ""}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": ["a", {"text": ""}]}, "documents[1]"),
        ({"documents": [{"content": "a"}]}, "documents[0].text"),
        ({"documents": [["a"]]}, "documents[0]"),
        ({"top_n": -1}, "top_n"),
        ({"max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2001}, "truncate_prompt_tokens"),
        ({"rank_fields": ["text"]}, "rank_fields"),
        ({"instruct": "x"}, "instruct"),
        ({"query": "the quick brown fox " * 2000}, "query"),
    ],
)
async def test_what_cannot_be_ranked_is_refused_by_name(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    answer = await served.http.post("/v1/rerank", json=asked(**fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not served.core.added


async def test_unknown_fields_are_named(served: Served) -> None:
    documents = ["a", {"text": "b", "title": "c"}]
    answer = await served.http.post("/v1/rerank", json=asked(documents=documents, made_up=1))
    assert answer.headers["x-penstock-ignored-fields"] == "made_up, documents.title"


# -- some at a time -------------------------------------------------------------------------------


async def test_the_core_has_some_of_many_documents_at_a_time(served: Served) -> None:
    most = 0
    held = served.core.step

    def step() -> None:
        nonlocal most
        most = max(most, len(served.core.waiting) + len(served.core.running))
        held()

    served.core.step = step  # type: ignore[method-assign]
    served.core.scores = lambda add: [0.0, add.handle / 50]
    documents = [f"a fox {number}" for number in range(500)]
    answer = (await served.http.post("/v1/rerank", json=asked(documents=documents))).json()
    assert most <= AT_ONCE
    assert [one["index"] for one in answer["results"]] == [*range(500)][::-1]
    assert len(served.core.added) == 500


async def test_a_client_that_leaves_sends_no_more(served: Served) -> None:
    served.core.is_held = True
    documents = [f"a fox {number}" for number in range(500)]
    async with httpx.AsyncClient(base_url=served.http.base_url) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/rerank", json=asked(documents=documents), timeout=0.2)
    await until(lambda: served.engine.state.core.live == 0)
    assert len(served.core.added) == 1
    assert served.core.aborted == [1]


FULL = range(10_000, 10_004)
"""Handles of others that fill a queue of four."""


def fill_behind_the_first(served: Served) -> None:
    """Let others fill the queue as the first document begins."""
    queue, step = served.engine.state.core._queue, served.core.step

    def fill() -> None:
        if served.core.added and 10_000 not in queue._waiting:
            queue.leave(1)
            queue.enter(FULL[0], [1] * len(FULL), "", ServiceClass.DEFAULT)
            served.core.step = step  # type: ignore[method-assign]
        step()

    served.core.step = fill  # type: ignore[method-assign]


async def test_others_wait_for_room_and_no_longer(serve: Serve) -> None:
    documents = [f"a fox {number}" for number in range(200)]
    async with serve(core=ROOM, max_queue_len=len(FULL)) as served:
        fill_behind_the_first(served)
        client = served.engine.state.core
        task = asyncio.create_task(served.http.post("/v1/rerank", json=asked(documents=documents)))
        await until(lambda: len(client._parked) == 1)
        assert len(served.core.added) == 1
        for handle in FULL:
            client._queue.leave(handle)
        served.core.say(StepOutput(0, [], [], [], [], [], [], served.core._stats()))
        assert len((await task).json()["results"]) == 200
        assert not client._parked
        served.assert_nothing_leaks()


async def test_a_core_that_dies_fails_what_waits_for_room(serve: Serve) -> None:
    async with serve(core=ROOM, max_queue_len=len(FULL)) as served:
        fill_behind_the_first(served)
        client = served.engine.state.core
        task = asyncio.create_task(served.http.post("/v1/rerank", json=asked(documents=["a fox"] * 9)))
        await until(lambda: len(client._parked) == 1)
        served.core.die()
        answer = await task
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")
        assert not client._parked


async def test_who_leaves_waits_for_no_room(serve: Serve) -> None:
    async with serve(core=ROOM, max_queue_len=len(FULL)) as served:
        fill_behind_the_first(served)
        client = served.engine.state.core
        task = asyncio.create_task(served.http.post("/v1/rerank", json=asked(documents=["a fox"] * 9)))
        await until(lambda: len(client._parked) == 1)
        task.cancel()
        await until(lambda: not client._parked)
        assert len(served.core.added) == 1


async def test_one_that_fails_fails_the_request(served: Served) -> None:
    served.core.is_held = True
    task = asyncio.create_task(served.http.post("/v1/rerank", json=asked()))
    await until(lambda: bool(served.core.waiting))
    served.core.finish(1, FinishReason.NUMERIC)
    answer = await task
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")
    assert len(served.core.added) == 1


# -- which models rank ----------------------------------------------------------------------------


async def test_a_model_that_is_no_reranker_refuses_by_name(serve: Serve) -> None:
    async with serve(core=ROOM, reranker="none") as served:
        answer = await served.http.post("/v1/rerank", json=asked())
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "path_not_served")
        assert "no reranker" in answer.json()["error"]["message"]
        [card] = (await served.http.get("/v1/models")).json()["data"]
        assert card["capabilities"]["reranking"] is False


async def test_the_list_of_models_tells_it(served: Served) -> None:
    [card] = (await served.http.get("/v1/models")).json()["data"]
    assert card["capabilities"]["reranking"] is True


def load(directory: Path, setting: Any = "auto") -> Tokenizer:
    return load_model(directory, name="m", created=0, reranker=setting).tokenizer


def test_its_files_say_that_a_model_ranks(tmp_path: Path) -> None:
    assert load(write_reranker(tmp_path)).reranking is None
    assert load(tmp_path, "qwen3").reranking is not None
    for config in ({"is_original_qwen3_reranker": True}, {"classifier_from_token": ["no", "yes"]}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert load(tmp_path).reranking is not None
        assert load(tmp_path, "none").reranking is None
    (tmp_path / "config.json").write_text("{}")
    asks = {"chat_template": f"{QWEN3.before}{{{{ messages[0].content }}}}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(asks))
    assert load(tmp_path).reranking is not None


def test_a_module_of_another_question_is_refused_by_name(tmp_path: Path) -> None:
    write_reranker(tmp_path)
    kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "1_LogitScore", "type": kind}]))
    (tmp_path / "1_LogitScore").mkdir()
    own = tmp_path / "1_LogitScore" / "config.json"
    for config, told in (
        ({"true_token_id": 5, "false_token_id": None}, "false_token_id"),
        ({"true_token_id": 5, "false_token_id": 6}, "another question"),
    ):
        own.write_text(json.dumps(config))
        with pytest.raises(UnusableModel, match=told):
            load(tmp_path)
        assert load(tmp_path, "none").reranking is None
    asks = {"chat_template": QWEN3.before}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(asks))
    assert load(tmp_path).reranking is not None
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "../other", "type": kind}]))
    with pytest.raises(UnusableModel, match="no directory"):
        load(tmp_path)


def test_a_tokenizer_without_its_tokens_is_refused(tmp_path: Path) -> None:
    write_model_dir(tmp_path)
    with pytest.raises(UnusableTokenizer, match="no and yes"):
        load(tmp_path, "qwen3")
    bundle = msgspec.structs.replace(TokenizerBundle.from_dir(tmp_path), reranker="unheard-of")
    with pytest.raises(UnusableTokenizer, match="no format"):
        Tokenizer(bundle)
