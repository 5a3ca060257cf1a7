"""The probabilities of decisions and rankings as a caller gets them, through the gateway and the engine, are
those of transformers' logits."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch

from engine.api.http.server import Engine
from engine.config import EngineConfig
from engine.core.scheduler_config import SchedulerConfig
from gateway.app import Gateway
from gateway.config.whole import load as loaded
from gateway.identity.keys import hash_key
from shared.process.clock import SYSTEM_CLOCK
from tests.engine.api.test_rerank import whole, write_reranker
from tests.engine.models import make_tiny_model, reference_logprobs, reference_model
from tests.engine.runtime.conftest import load
from tests.histories.core import InProcessCore
from tests.waiting import until

APART_MAX = 1e-4
LEN_MAX = 1024
STEP_TOKENS = 64
"""Fewer than a ranking's prompt has."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, whose tokenizer has the words of both kinds of question."""
    path, files = tmp_path_factory.mktemp("model"), write_reranker(tmp_path_factory.mktemp("tokenizer"))
    vocab_size = tokenizers.Tokenizer.from_file(str(files / "tokenizer.json")).get_vocab_size()
    make_tiny_model("qwen3", path, vocab_size=vocab_size, max_position_embeddings=LEN_MAX)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(files / name, path)
    return path


@pytest.fixture
async def caller(model: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway before an engine that computes."""
    runner = load(model, kernels="native", max_step_tokens=STEP_TOKENS)
    settings = SchedulerConfig(step_tokens_max=STEP_TOKENS)
    config = EngineConfig(model=str(model), served_model_name="m", port=0, reranker="qwen3")

    def make_core(*_: object) -> InProcessCore:
        return InProcessCore(runner.info, settings, SYSTEM_CLOCK, step_s=0.0, overlap=False, runner=runner)

    engine = Engine(config, lambda _: model, make_core)
    await engine.start()
    stated = loaded(
        {
            "listen": {"port": 0},
            "models": [{"name": "m", "replicas": [f"http://127.0.0.1:{engine.port}"]}],
            "tenants": [{"id": "t"}],
            "keys": [{"id": "t", "hash": hash_key("key"), "tenant": "t"}],
        },
        {},
    )
    try:
        async with Gateway(stated, env={}) as gateway:
            await until(lambda: gateway.engines.of(stated.models[0]).profile is not None)
            url, headers = f"http://127.0.0.1:{gateway.port}", {"authorization": "Bearer key"}
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=20, verify=False) as http:
                yield http
    finally:
        await engine.stop()


async def answered(caller: httpx.AsyncClient, path: str, **fields: Any) -> Any:
    answer = await caller.post(path, json={"model": "m", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


class Reference:
    """transformers, asked for what comes behind a text."""

    def __init__(self, path: Path) -> None:
        self._model = reference_model(path)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))

    def logprobs(self, text: str, labels: Sequence[str]) -> torch.Tensor:
        """The log-probabilities of tokens behind a text, among all tokens."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return reference_logprobs(self._model, ids)[-1][[self._tokenizer.token_to_id(one) for one in labels]]


def near(values: torch.Tensor) -> Any:
    return pytest.approx(values.tolist(), abs=APART_MAX)


@pytest.mark.slow
async def test_probabilities_over_http_are_those_of_transformers(
    caller: httpx.AsyncClient, model: Path
) -> None:
    reference = Reference(model)
    choice = {
        "type": "choice",
        "instructions": "Who?",
        "choices": [{"value": one} for one in ("fox", "dog", "jug")],
    }
    score = {
        "type": "score",
        "instructions": "How lazy?",
        "levels": [{"label": one} for one in ("not", "very")],
    }
    predicate = {"type": "predicate", "instructions": "The fox jumps."}
    before, behind = "<|user|>a fox and a dog\n\n", "<|end|><|assistant|>"
    asked: dict[Sequence[str], str] = {
        ("no", "yes"): "Is the following true? The fox jumps.\nAnswer with yes or no only.",
        "ABC": 'Question: Who?\nA: "fox"\nB: "dog"\nC: "jug"\nAnswer with the letter of one option only.',
        "01": "Question: How lazy?\n0: not\n1: very\nAnswer with the number of one level only.",
    }
    expected = [reference.logprobs(f"{before}{one}{behind}", labels) for labels, one in asked.items()]
    shares = [one.softmax(-1) for one in expected]
    for _ in range(2):  # cold, and with all of it in the cache
        told = await answered(
            caller, "/v1/decisions", input="a fox and a dog", questions=[predicate, choice, score]
        )
        found, chosen, scored = told["answers"]
        assert found["probability"] == near(shares[0][1])
        assert [one["probability"] for one in chosen["probabilities"]] == near(shares[1])
        assert chosen["confidence"] == near(expected[1].max().exp())
        assert [one["probability"] for one in scored["probabilities"]] == near(shares[2])
        assert scored["score"] == near(shares[2][1])

    documents = ["a fox", "the lazy dog jumps", "liquor jugs", "five dozen"]
    pairs = [reference.logprobs(whole("hello world", one), ["no", "yes"]).softmax(-1)[1] for one in documents]
    for path in ("/v1/rerank", "/v2/rerank"):
        told = await answered(caller, path, query="hello world", documents=documents)
        relevance = {one["index"]: one["relevance_score"] for one in told["results"]}
        assert [relevance[at] for at in range(len(documents))] == near(torch.stack(pairs))
        assert [*relevance.values()] == sorted(relevance.values(), reverse=True)
