"""The Triton back ends in the place of torch's, over whole batches and a whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.core.messages import SamplingParams
from engine.runtime.attention import AttentionSpec
from engine.runtime.kernels.attention import TritonDecode, TritonPrefill
from engine.runtime.kv_cache import KVCache, KVGeometry
from engine.runtime.model import TorchModel
from engine.runtime.model_runner import ModelRunner
from engine.runtime.models.config import read_model_config
from tests.engine.runtime.conftest import MakeModel, load
from tests.engine.runtime.driver import Driver


def load_with(path: Path, *, triton: bool) -> ModelRunner:
    runner = load(path, max_num_seqs=4, max_model_len=128, kernels="torch")
    if triton:
        config, info, model = read_model_config(path), runner.info, runner.model
        assert isinstance(model, TorchModel)
        spec = AttentionSpec(config.heads, config.kv_heads, config.head_dim, config.windows)
        decode = TritonDecode(
            runner.cache, spec, rows_max=info.slots, length_max=info.max_model_len, programs=2
        )
        runner.model = TorchModel(model.decoder, runner.cache, decode, TritonPrefill(runner.cache, spec))
    return runner


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_a_model_says_the_same_with_either(tiny_model: MakeModel, family: str) -> None:
    """Chunked prompts, mixed batches, poisoned pages; a window of 24, a group of 7, a group of 1."""
    greedy = SamplingParams(seed=0, max_tokens=8, temperature=0.0)
    outputs = []
    for triton in (False, True):
        driver = Driver(load_with(tiny_model(family), triton=triton))
        lives = [driver.seat(slot, range(2, 2 + length), greedy) for slot, length in enumerate((50, 3, 17))]
        driver.finish([0, 1, 2], 3, chunk=20)
        outputs.append([life.output for life in lives])
    assert outputs[0] == outputs[1]


def test_decode_prepares_from_the_device_alone() -> None:
    """As a graph does: no batch, no host; and layers of different windows share the preparation."""
    torch.manual_seed(0)
    cache = KVCache(KVGeometry(2, 2, 16, 16, torch.float32), pages=4)
    for part in (*cache.keys, *cache.values):
        part.normal_()
    spec = AttentionSpec(4, 2, 16, [None, 8])
    decode = TritonDecode(cache, spec, rows_max=2, length_max=64, programs=3)
    tables, lengths = torch.tensor([[3, 1], [2, 0]]), torch.tensor([20, 7], dtype=torch.int32)
    q = torch.randn(2, 4, 16)
    together = decode.on_device(tables, lengths)
    both = [together(layer, q) for layer in range(2)]
    alone = decode.on_device(tables[1:], lengths[1:])
    assert all(torch.equal(both[layer][1:], alone(layer, q[1:])) for layer in range(2))
    cache.keys[1].copy_(cache.keys[0])
    cache.values[1].copy_(cache.values[0])
    step = decode.on_device(tables, lengths)
    full, windowed = step(0, q), step(1, q)
    torch.testing.assert_close(full[1], windowed[1])  # 7 keys, all within the window
    assert not torch.allclose(full[0], windowed[0])
