"""Training can be broken off and taken up again without a trace; what is written is what was trained."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from engine.demo.train import corpus
from engine.demo.train.__main__ import (
    BATCH_TOKENS,
    Example,
    batches,
    encode_corpus,
    learning_rate_factor,
    load_progress,
    optimizers,
    rounded,
    save_progress,
    tensors,
    train,
    weighted,
    write,
)
from engine.demo.train.network import DemoModel, Shape
from engine.demo.train.text import render, train_tokenizer

TINY = Shape(
    hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=1, head_dim=16, context_len=512
)
PAD_ID = 0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(render(c.messages()) for c in corpus.conversations(2000))


@pytest.fixture(scope="module")
def plan(tokenizer: Tokenizer) -> list[list[Example]]:
    examples = encode_corpus(tokenizer, TINY.context_len, count=300)
    return batches(examples, Random(1))[:4]


def fresh_model() -> DemoModel:
    torch.manual_seed(3)
    return DemoModel(TINY)


@pytest.mark.nightly
def test_taking_up_again_equals_not_stopping(plan: list[list[Example]], tmp_path: Path) -> None:
    straight = fresh_model()
    expected = list(train(straight, optimizers(straight), plan, PAD_ID, 0))

    broken_off = fresh_model()
    opts = optimizers(broken_off)
    steps = train(broken_off, opts, plan, PAD_ID, 0)
    first_half = [next(steps), next(steps)]
    save_progress(tmp_path / "progress", broken_off, opts, 2)

    taken_up = DemoModel(TINY)
    opts = optimizers(taken_up)
    done = load_progress(tmp_path / "progress", taken_up, opts)
    assert first_half + list(train(taken_up, opts, plan, PAD_ID, done)) == expected
    for name, value in straight.state_dict().items():
        assert torch.equal(value, taken_up.state_dict()[name]), name


def test_the_loss_sees_next_tokens_of_weighted_positions_only() -> None:
    batch = [weighted([5, 6, 7, 8], [range(2, 4)]), weighted([9, 10], [range(1, 2)])]
    ids, positions, targets, weights = tensors(batch, PAD_ID)
    counted = int((weights > 0).sum())
    assert targets[:counted].tolist() == [7, 8, 10]
    assert ids.flatten()[positions[:counted]].tolist() == [6, 7, 9]
    assert not weights[counted:].any()


def test_batches_keep_every_example_and_the_limit(tokenizer: Tokenizer) -> None:
    examples = encode_corpus(tokenizer, TINY.context_len, count=300)
    plan = batches(examples, Random(2))
    assert sorted(map(id, examples)) == sorted(id(example) for batch in plan for example in batch)
    assert all(len(batch) * max(len(e.ids) for e in batch) <= BATCH_TOKENS for batch in plan)


def test_the_learning_rate_rises_stays_and_falls_to_nothing() -> None:
    factors = [learning_rate_factor(step, 1000) for step in range(1001)]
    assert factors[0] < 0.1
    assert factors[200:600] == [1.0] * 400
    assert factors[600:] == sorted(factors[600:], reverse=True)
    assert factors[1000] == 0.0


def test_written_weights_are_the_rounded_ones(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = fresh_model()
    write(model, tokenizer, tmp_path)
    from transformers import LlamaForCausalLM  # its import takes seconds, in each process that collects

    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor([[3, 4, 5, 6]])
    ours = rounded(model)
    with torch.inference_mode():
        torch.testing.assert_close(ours.logits(ours.hidden(ids)[0]), loaded(ids).logits, atol=1e-5, rtol=1e-4)
