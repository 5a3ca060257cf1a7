"""The runner says what transformers says: all families, whole, chunked, together, wherever pages lie.

Greedy outputs are checked by teacher forcing: one forward pass of the oracle over prompt and output
must name every output token as its own best, which by induction is what it would have generated.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.contract.messages import SamplingParams, TokenLogprobs
from tests.engine.models import VOCAB_SIZE, reference_logprobs, reference_model
from tests.engine.runtime.conftest import MakeModel, load
from tests.engine.runtime.driver import Driver, Life

pytestmark = pytest.mark.parametrize("kernels", ["native", "torch"])

TOLERANCE = 1e-4
OUTPUTS = 64
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied, llama3 rope": ("llama", {}),
    "llama, untied, biases": (
        "llama",
        {
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": PLAIN_ROPE,
        },
    ),
    "mistral, window": ("mistral", {}),
    "mistral, group of 4": ("mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "qwen2, group of 7": ("qwen2", {}),
    "qwen2, window in one layer, a head beside tied embeddings": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, "own_head": True},
    ),
    "qwen3, group of 1": ("qwen3", {}),
    "qwen3, sharded, tied, biases": (
        "qwen3",
        {
            "shard_bytes": 100_000,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}


@pytest.fixture(params=list(VARIANTS.values()), ids=list(VARIANTS))
def path(request: pytest.FixtureRequest, tiny_model: MakeModel) -> Path:
    family, overrides = request.param
    return tiny_model(family, **overrides)


def greedy(outputs: int = OUTPUTS) -> SamplingParams:
    return SamplingParams(seed=0, max_tokens=outputs, temperature=0.0, logprobs=3)


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(VOCAB_SIZE), k=length)


def check_against(model: Any, life: Life) -> None:
    expected = reference_logprobs(model, life.tokens)[life.prompt_len - 1 : -1]
    assert life.output == expected.argmax(dim=-1).tolist()
    assert distance(life.logprobs, life.output, expected) < TOLERANCE


def distance(entries: list[TokenLogprobs], tokens: list[int], expected: Tensor) -> float:
    """The largest difference, over the tokens themselves and all the top ones."""
    assert len(entries) == len(tokens) == len(expected)
    differences = [
        abs(logprob - float(expected[i, token]))
        for i, entry in enumerate(entries)
        for token, logprob in zip(
            (tokens[i], *entry.top_ids), (entry.logprob, *entry.top_logprobs), strict=True
        )
    ]
    return max(differences)


def test_greedy_tokens_and_logprobs(path: Path, kernels: str) -> None:
    """Whole, then in chunks that cut pages and windows, then together with strangers of mixed lengths."""
    model, driver = reference_model(path), Driver(load(path, kernels=kernels))
    whole, chunked = driver.seat(0, prompt_of(60), greedy()), driver.seat(1, prompt_of(60), greedy())
    driver.finish([0], OUTPUTS)
    check_against(model, whole)
    driver.finish([1], OUTPUTS, chunk=7)
    assert chunked.output == whole.output
    check_against(model, chunked)
    driver.leave(0)
    lives = [
        driver.seat(slot, prompt_of(length), greedy()) for slot, length in ((0, 1), (2, 2), (3, 33), (4, 60))
    ]
    driver.leave(1)
    driver.finish([0, 2, 3, 4], OUTPUTS, chunk=19)
    for life in lives:
        check_against(model, life)
    assert lives[-1].output == whole.output


def test_several_prompts_in_one_step(tiny_model: MakeModel, kernels: str) -> None:
    """Packed prefill, beside decodes that are far ahead."""
    path = tiny_model("llama")
    model, driver = reference_model(path), Driver(load(path, kernels=kernels))
    early = driver.seat(5, prompt_of(300), greedy(80))
    driver.finish([5], 3)
    late = [driver.seat(slot, prompt_of(10 + slot), greedy()) for slot in range(4)]
    driver.finish(range(4), OUTPUTS)
    driver.finish([5], 20)
    for life in (early, *late):
        check_against(model, life)


def test_a_preempted_sequence_takes_up_where_it_was(tiny_model: MakeModel, kernels: str) -> None:
    path = tiny_model("qwen3")
    model, driver = reference_model(path), Driver(load(path, kernels=kernels))
    life = driver.seat(0, prompt_of(20), greedy())
    driver.finish([0], 30)
    driver.leave(0)
    again = driver.seat(3, life.tokens, greedy(), prompt_len=20)
    driver.finish([3], OUTPUTS, chunk=9)
    again.logprobs[:0] = life.logprobs
    check_against(model, again)


@pytest.mark.parametrize("chunk", [200, 13])
def test_prompt_logprobs(tiny_model: MakeModel, chunk: int, kernels: str) -> None:
    """Of every prompt token but the first, whatever the chunks; of output tokens, none."""
    path = tiny_model("mistral")
    prompt, driver = prompt_of(150), Driver(load(path, kernels=kernels))
    params = SamplingParams(seed=0, max_tokens=2, temperature=0.0, prompt_logprobs=4)
    life, silent = driver.seat(1, prompt, params), driver.seat(2, prompt_of(8), greedy())
    driver.finish([1, 2], 2, chunk=chunk)
    expected = reference_logprobs(reference_model(path), prompt)[:-1]
    assert distance(life.prompt_logprobs, prompt[1:], expected) < TOLERANCE
    assert all(len(entry.top_ids) == 4 for entry in life.prompt_logprobs)
    assert not silent.prompt_logprobs
    assert not life.logprobs


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_bfloat16_is_as_close_to_fp32_as_transformers_is(
    tiny_model: MakeModel, family: str, kernels: str
) -> None:
    """Teacher-forced, half by prefill and half by decode; L2 over whole distributions."""
    path = tiny_model(family)
    tokens = prompt_of(120)
    exact = reference_logprobs(reference_model(path), tokens)[:-1]
    theirs = reference_logprobs(reference_model(path, torch.bfloat16), tokens)[:-1]
    driver = Driver(load(path, dtype="bfloat16", kernels=kernels))
    params = SamplingParams(seed=0, max_tokens=1, prompt_logprobs=VOCAB_SIZE)
    life = driver.seat(0, tokens, params)
    driver.step([(0, 60)])
    while life.computed < len(tokens):
        driver.step([(0, 1)])
    ours = torch.stack([distribution(entry) for entry in life.prompt_logprobs])
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()


def distribution(entry: TokenLogprobs) -> Tensor:
    """[vocab], from an entry that lists every token."""
    logprobs = torch.empty(VOCAB_SIZE)
    logprobs[entry.top_ids] = torch.tensor(entry.top_logprobs)
    return logprobs
