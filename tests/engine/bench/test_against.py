"""The comparisons with other engines: every tensor has a name there, and every row has its pieces."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from engine.runtime.models.decoder_config import parse_model_config
from engine.runtime.weights.parameters import read_all
from tests.bench import against, against_llama_cpp
from tests.bench.against import Other, Piece, compare, show
from tests.bench.engine import served
from tests.bench.figures import at_least
from tests.bench.gguf_model import gguf_name, of_hybrid, of_rotated
from tests.bench.models import SHAPES, _config, _Hybrid, make_model

STAND_IN = """
import json, sys
print(json.dumps({"name": "8 streams: output, ratio", "value": 2.0, "unit": "x", "target": None, "ok": None}))
"""


def test_every_tensor_of_a_random_model_has_a_name_of_its_own_in_gguf(tmp_path: Path) -> None:
    model = make_model(tmp_path / "small", SHAPES["0.9M"])
    with safe_open(model / "model.safetensors", "pt") as weights:
        names = [gguf_name(name) for name in weights.keys()]  # noqa: SIM118
    assert len(set(names)) == len(names) == 2 + 11 * SHAPES["0.9M"].layers
    assert "blk.2.attn_q_norm.weight" in names


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


def test_no_row_begins_after_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    against.add_arguments(parser, SHAPES)
    options = parser.parse_args(["--models", "0.9M", "--dir", str(tmp_path)])
    options.streams, options.prompts, options.formats, options.limit_s = [8, 1], [200], ["bf16"], -1.0
    assert not list(against_llama_cpp.measured(options))
    said = "not begun: 0.9M bf16, prompts of 200, {} streams\n"
    assert capsys.readouterr().err == said.format(1) + said.format(8), "the quickest first"


def test_figures_are_printed_with_the_models_name_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in for Python prints a figure; a target is that of the comparison."""
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!{sys.executable}\n{STAND_IN}")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    parser = argparse.ArgumentParser()
    against.add_arguments(parser, SHAPES)
    options = parser.parse_args(["--out", str(tmp_path / "out"), "--check"])
    others, pieces = [Other("other", "http://127.0.0.1:1/v1", os.getpid())], [Piece(["load"])]
    assert show(compare("29M", tmp_path, others, pieces, options), options) == 0
    bounds = {"29M: 8 streams: output, ratio": at_least(3)}
    assert show(compare("29M", tmp_path, others, pieces, options, (), bounds), options) == 1
    assert '"29M: 8 streams: output, ratio"' in (tmp_path / "out").read_text() + capsys.readouterr().out


def test_a_llamas_rotated_rows_take_turns_in_gguf() -> None:
    """Two heads of four rows: a head's first half, then its second, become neighbours."""
    assert of_rotated(torch.arange(8)[:, None], 4).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_others_are_named_one_by_one() -> None:
    parser = argparse.ArgumentParser()
    served.add_arguments(parser)
    urls = ["--against", "http://a/v1", "http://b/v1"]
    two = parser.parse_args([*urls, "--against-name", "A", "B", "--against-pid", "1", "2"])
    assert [(each.name, each.model, each.pids) for each in served._others(two, "m")] == [
        ("A, ", "m", (1,)),
        ("B, ", "m", (2,)),
    ]
    assert [each.name for each in served._others(parser.parse_args(urls[:2]), "m")] == ["against, "]
    assert not served._others(parser.parse_args([]), "m")
    for wrong in (urls, [*urls, "--against-name", "A", "B", "--against-pid", "1"]):
        with pytest.raises(served.BenchFailed):
            served._others(parser.parse_args(wrong), "m")
