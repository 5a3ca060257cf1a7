"""Checkpoints that do not match are refused with every name; those that do arrive whole, fused, once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.runtime.setup.model_errors import ModelUnavailable, WeightsMismatch
from engine.runtime.setup.runner_config import RunnerConfig
from engine.runtime.start import starting
from engine.runtime.weights import checkpoint
from engine.runtime.weights.checkpoint import Checkpoint, Inspection, checkpoint_files
from tests.engine.runtime.conftest import MakeModel, load

A, B = torch.arange(6.0).reshape(2, 3), -torch.arange(9.0).reshape(3, 3)


def single(path: Path, **tensors: Tensor) -> Path:
    save_file(tensors, path / "model.safetensors")
    return path


def test_parts_are_stacked_in_order_and_converted(tmp_path: Path) -> None:
    files = checkpoint_files(single(tmp_path, a=A.half(), b=B.bfloat16()))
    stacked = Checkpoint(files, torch.float32).stack(["b", "a"], [3, 2], 3)
    assert torch.equal(stacked, torch.cat((B, A)))
    assert stacked.dtype == torch.float32


def test_what_a_device_is_to_have_is_put_together_there(tmp_path: Path) -> None:
    """Not in memory of ours first, which would copy every weight twice."""
    files = checkpoint_files(single(tmp_path, a=A.half(), b=B.bfloat16()))
    stacked = Checkpoint(files, torch.float32, device=torch.device("meta")).stack(["b", "a"], [3, 2], 3)
    assert stacked.is_meta
    assert stacked.shape == (5, 3)


def test_what_is_loaded_outlives_the_file(tmp_path: Path) -> None:
    """The mapped file is copied from, not kept."""
    files = checkpoint_files(single(tmp_path, a=A.clone()))
    loaded = Checkpoint(files, torch.float32).stack(["a"], [2], 3)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * (tmp_path / "model.safetensors").stat().st_size)
    assert torch.equal(loaded, A)


def test_everything_that_does_not_match_is_named_at_once(tmp_path: Path) -> None:
    packed = torch.zeros(2, 3, dtype=torch.int8)
    files = checkpoint_files(single(tmp_path, a=A, b=B, stranger=B.clone(), packed=packed))
    inspection = Inspection(files, torch.float32)
    assert inspection.stack(["a"], [2], 3).is_meta
    inspection.stack(["b"], [4], 3)
    inspection.stack(["absent.1", "absent.2"], [1, 1], 3)
    inspection.stack(["packed"], [2], 3)
    with pytest.raises(WeightsMismatch) as caught:
        inspection.verify()
    message = str(caught.value)
    for part in (
        "absent.1, absent.2",
        "b is [3, 3], not [4, 3]",
        "packed is I8",
        "unexpected tensors: stranger",
    ):
        assert part in message
    assert "a is" not in message


def test_tensors_that_follow_from_the_config_are_passed_over(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    Inspection(checkpoint_files(single(tmp_path, **{name: A})), torch.float32).verify()


def test_only_safetensors(tmp_path: Path) -> None:
    torch.save({"a": A}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelUnavailable, match="safetensors"):
        checkpoint_files(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not tensors at all, but long enough to have a header"])
def test_a_broken_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelUnavailable, match=r"model\.safetensors"):
        checkpoint_files(tmp_path)


def test_shards_that_are_missing_broken_or_elsewhere(tmp_path: Path) -> None:
    def index(**places: str) -> None:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    index(a="one.safetensors", b="two.safetensors")
    with pytest.raises(WeightsMismatch, match=r"one\.safetensors, two\.safetensors"):
        checkpoint_files(tmp_path)
    save_file({"a": A}, tmp_path / "one.safetensors")
    (tmp_path / "two.safetensors").write_bytes(b"cut short")
    with pytest.raises(WeightsMismatch, match=r"two\.safetensors"):
        Inspection(checkpoint_files(tmp_path), torch.float32)
    (tmp_path / "inner").mkdir()
    save_file({"a": A}, tmp_path / "inner" / "one.safetensors")
    index(a="inner/../one.safetensors")
    with pytest.raises(WeightsMismatch, match="outside"):
        checkpoint_files(tmp_path)


def test_an_index_that_was_left_beside_a_whole_file_is_passed_over(tmp_path: Path) -> None:
    """As transformers does: the shards that it names are gone."""
    stale = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(stale))
    said = list[str]()
    files = checkpoint_files(single(tmp_path, a=A, b=B), said.append)
    assert files == dict.fromkeys("ab", tmp_path / "model.safetensors")
    assert "model.safetensors.index.json" in said.pop()
    (tmp_path / "model.safetensors.index.json").unlink()
    checkpoint_files(tmp_path, said.append)
    assert not said


def test_a_name_that_the_index_puts_in_the_wrong_shard(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "one.safetensors")
    save_file({"b": B}, tmp_path / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    inspection = Inspection(checkpoint_files(tmp_path), torch.float32)
    inspection.stack(["a", "b"], [2, 3], 3)
    with pytest.raises(WeightsMismatch, match=r"b is in two\.safetensors, not in one\.safetensors"):
        inspection.verify()


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "COMPARED_ROWS", 100)


@pytest.mark.usefixtures("few_rows")
def test_a_head_that_equals_the_embedding_is_tied(tiny_model: MakeModel, tmp_path: Path) -> None:
    """Compared in the compute type, block by block, and the last row counts."""
    path, said = tiny_model("llama"), list[str]()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((path / name).read_bytes())
    tensors = load_file(path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()

    def is_tied(head: Tensor, dtype: torch.dtype = torch.float32) -> bool:
        save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
        settings = RunnerConfig(str(tmp_path), device="cpu")
        model = starting.read_model(settings, said.append)
        return starting.checked_checkpoint(settings, model, dtype, said.append)[0].tied_embeddings

    assert is_tied(head)
    assert not said
    head[-1, -1] += 1e-4
    assert not is_tied(head)
    assert "head" in said.pop()
    assert is_tied(head, torch.bfloat16)
    with pytest.raises(WeightsMismatch, match=r"lm_head\.weight is \[319, 64\]"):
        is_tied(head[:-1].clone())


def test_a_model_with_a_tensor_less(tiny_model: MakeModel, tmp_path: Path) -> None:
    path = tiny_model("qwen2")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((path / name).read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsMismatch, match=r"missing tensors: model\.layers\.1\.self_attn\.k_proj\.bias$"):
        load(tmp_path)
