"""The comparisons with other engines: every tensor has a name and a form there."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from engine.runtime.models.decoder_config import parse_model_config
from engine.runtime.weights.parameters import read_all
from tests.bench.gguf_model import gguf_name, of_hybrid, of_rotated
from tests.bench.models import SHAPES, _config, _Hybrid


def test_every_tensor_of_a_hybrid_model_has_a_name_of_its_own_in_gguf() -> None:
    small = replace(SHAPES["qwen3.5-0.8B"], vocab=300, hidden=32, layers=4, intermediate=32)
    model = parse_model_config(json.dumps(_config(small, 0, 64)).encode())
    source = _Hybrid()
    read_all(model, source)
    names = [gguf_name(name, is_hybrid=True) for name in source.tensors]
    assert len(set(names)) == len(names) == 2 + 3 * 14 + 11
    assert {"blk.0.ssm_a", "blk.0.ssm_dt.bias", "blk.2.ssm_conv1d.weight", "blk.3.attn_q.weight"} < {*names}
    filters = "model.layers.0.linear_attn.conv1d.weight"
    assert of_hybrid(filters, source.tensors[filters]).shape == (3 * 16 * 128, 4)
    assert of_hybrid("a.A_log", torch.zeros(2)).tolist() == [-1, -1]
    assert of_hybrid("a.input_layernorm.weight", torch.zeros(2)).tolist() == [1, 1]
    assert of_hybrid("a.linear_attn.norm.weight", torch.ones(2)).tolist() == [1, 1]


def test_a_llamas_rotated_rows_take_turns_in_gguf() -> None:
    """Two heads of four rows: a head's first half, then its second, become neighbours."""
    assert of_rotated(torch.arange(8)[:, None], 4).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
