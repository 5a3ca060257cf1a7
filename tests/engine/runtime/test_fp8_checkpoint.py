"""Checkpoints whose matrices are in fp8: every writer's grain, on a CPU and held in fp8; what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.contract.messages import SamplingParams
from engine.runtime.models.decoder_config import parse_model_config, read_model_config
from engine.runtime.models.quantization import Fp8Scheme, read_fp8_scheme
from engine.runtime.reference.torch_decoder import TorchDecoder
from engine.runtime.setup.model_errors import UnsupportedModel, WeightsMismatch
from engine.runtime.weights.checkpoint import Checkpoint, Inspection, TensorPart, checkpoint_files
from engine.runtime.weights.fp8 import quantise
from tests.engine.models import make_tiny_model, reference_greedy
from tests.engine.runtime.conftest import MakeModel, load
from tests.engine.runtime.driver import Driver

FP8 = torch.float8_e4m3fn
BLOCK = (16, 32)
Quantiser = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A matrix -> its values, and its scale as it is stored."""


def per_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().max() / 448
    return (weight / scale).to(FP8), scale


def per_row(weight: Tensor) -> tuple[Tensor, Tensor]:
    held = quantise(weight)
    return held.values, held.scales[:, None]


def per_row_flat(weight: Tensor) -> tuple[Tensor, Tensor]:
    held = quantise(weight)
    return held.values, held.scales


def per_block(weight: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """Also of a matrix that is no multiple of the block."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    values = torch.empty(rows, columns, dtype=FP8)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            own = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scale[i, j] = weight[own].abs().max() / 448
            values[own] = (weight[own] / scale[i, j]).to(FP8)
    return values, scale


def group(**weights: Any) -> dict[str, Any]:
    known = {"type": "float", "num_bits": 8, "strategy": "channel", "dynamic": False}
    return {"targets": ["Linear"], "weights": known | weights, "input_activations": {"dynamic": True}}


GRAINS: dict[str, tuple[dict[str, Any], Quantiser, str]] = {
    "autofp8": ({"quant_method": "fp8", "activation_scheme": "static"}, per_tensor, "weight_scale"),
    "deepseek": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)},
        per_block,
        "weight_scale_inv",
    ),
    "qwen": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 64]},
        lambda weight: per_block(weight, (16, 64)),
        "weight_scale_inv",
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, per_row, "weight_scale"),
    "compressed": (
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"0": group()}},
        per_row_flat,
        "weight_scale",
    ),
    "compressed blocks": (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"0": group(strategy="block", block_structure="16x32")},
        },
        per_block,
        "weight_scale",
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, per_tensor, "weight_scale"),
}


def make_fp8(source: Path, path: Path, grain: str, **extra: Tensor) -> tuple[Path, Path]:
    """The model in `source` with its matrices in fp8 -> that, and a plain one of the numbers it means."""
    settings, quantiser, suffix = GRAINS[grain]
    plain = path / "plain"
    stored: dict[str, Tensor] = dict(extra)
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = meant[name] = tensor
        if name.endswith("_proj.weight"):
            values, scale = quantiser(tensor)
            stored[name] = values
            stored[name.removesuffix("weight") + suffix] = scale
            stored[name.removesuffix("weight") + "input_scale"] = torch.tensor(1.0)
            meant[name] = values.float() * expanded(scale, tensor, settings.get("weight_block_size", BLOCK))
    for directory, tensors, more in (
        (path / "fp8", stored, {"quantization_config": settings}),
        (plain, meant, {}),
    ):
        directory.mkdir(parents=True)
        for file in source.iterdir():
            if file.suffix == ".json":
                (directory / file.name).write_bytes(file.read_bytes())
        config = json.loads((source / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | more))
        save_file(tensors, directory / "model.safetensors")
    return path / "fp8", plain


def expanded(scale: Tensor, like: Tensor, block: Sequence[int]) -> Tensor:
    """By definition: to every number its scale."""
    rows, columns = like.shape
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(rows, columns)
    if scale.numel() == rows:
        return scale.reshape(rows, 1).expand(rows, columns)
    blown = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return blown[:rows, :columns]


@pytest.mark.parametrize("grain", GRAINS)
def test_on_a_cpu_it_is_the_model_that_its_numbers_mean(
    tiny_model: MakeModel, tmp_path: Path, grain: str
) -> None:
    """transformers, on the plain numbers, is the oracle; the whole engine loads what is in fp8."""
    stored, meant = make_fp8(tiny_model("qwen3"), tmp_path, grain)
    prompt = list(range(2, 22))
    runner = load(stored, kernels="torch")
    driver = Driver(runner)
    life = driver.seat(0, prompt, SamplingParams(seed=0, max_tokens=8, temperature=0.0))
    driver.finish([0], 8)
    assert life.output == reference_greedy(meant, [prompt], 8)[0]


@pytest.mark.parametrize("grain", GRAINS)
def test_held_in_fp8_it_is_what_the_file_holds(tiny_model: MakeModel, tmp_path: Path, grain: str) -> None:
    """To the bit, but for blocks that no tile of a kernel fits, which become rows: off by half a step."""
    stored, meant = make_fp8(tiny_model("llama"), tmp_path, grain)
    names = [f"model.layers.1.self_attn.{which}_proj.weight" for which in "qkv"]
    files, scheme = checkpoint_files(stored), read_model_config(stored).fp8
    assert scheme is not None
    held = Checkpoint(files, torch.bfloat16, scheme).stack_fp8(names, (64, 32, 32), 64)
    assert held is not None
    found = held.restored(torch.float32)
    expected = Checkpoint(checkpoint_files(meant), torch.float32).stack(names, (64, 32, 32), 64)
    assert held.group == (64 if grain == "qwen" else 0)
    if scheme.block != BLOCK:
        assert torch.equal(found, expected)
    else:
        largest = expected.abs().amax(1, keepdim=True)
        assert ((found - expected).abs() <= largest * 16 / 448 * 1.001).all()
        assert (found - expected).norm() / expected.norm() < 0.03
    # A rank's part is the same part of the same numbers.
    part = TensorPart(columns=(16, 48))
    shared = Checkpoint(files, torch.float32, scheme).stack(names[:1], (64,), 64, part=part)
    assert torch.equal(shared, expected[:64, 16:48])
    part = TensorPart(rows=((32, 64),))
    shared = Checkpoint(files, torch.float32, scheme).stack(names[:1], (64,), 64, part=part)
    assert torch.equal(shared, expected[32:64])


def test_a_plain_matrix_among_them_is_no_fp8(tiny_model: MakeModel, tmp_path: Path) -> None:
    stored, _ = make_fp8(tiny_model("llama"), tmp_path, "fbgemm")
    scheme = read_model_config(stored).fp8
    source = Checkpoint(checkpoint_files(stored), torch.float32, scheme)
    assert source.stack_fp8(["model.embed_tokens.weight"], (320,), 64) is None


def test_scales_that_are_missing_or_misshapen_are_named(tiny_model: MakeModel, tmp_path: Path) -> None:
    stored, _ = make_fp8(tiny_model("llama"), tmp_path, "deepseek")
    tensors = load_file(stored / "model.safetensors")
    at = "model.layers.0.mlp."
    del tensors[at + "up_proj.weight_scale_inv"]
    tensors[at + "down_proj.weight_scale_inv"] = torch.ones(3, 3)
    tensors[at + "gate_proj.weight_scale_inv"] = torch.ones(6, 2, dtype=torch.int32)
    tensors[at + "gate_proj.weird_scale"] = torch.ones(1)
    save_file(tensors, stored / "model.safetensors")
    config = read_model_config(stored)

    def inspect(scheme: Fp8Scheme | None) -> str:
        inspection = Inspection(checkpoint_files(stored), torch.float32, scheme)
        TorchDecoder(config, inspection)
        with pytest.raises(WeightsMismatch) as caught:
            inspection.verify()
        return str(caught.value)

    message = inspect(config.fp8)
    assert f"missing tensors: {at}up_proj.weight_scale" in message
    assert f"{at}down_proj.weight_scale_inv is [3, 3], for a matrix of [64, 96]" in message
    assert f"{at}gate_proj.weight_scale_inv is I32" in message
    assert f"unexpected tensors: {at}gate_proj.weird_scale" in message
    assert "input_scale" not in message
    assert "is F8_E4M3, not a float" in inspect(None)


def test_scales_of_the_cache(tiny_model: MakeModel, tmp_path: Path) -> None:
    """Either spelling; all layers or none."""
    scales = {
        "model.layers.0.self_attn.k_scale": torch.tensor(0.5),
        "model.layers.0.self_attn.v_scale": torch.tensor([2.0]),
        "model.layers.1.self_attn.k_proj.k_scale": torch.tensor(0.25),
        "model.layers.1.self_attn.v_proj.v_scale": torch.tensor(3.0),
    }
    stored, meant = make_fp8(tiny_model("llama"), tmp_path / "all", "autofp8", **scales)
    config = read_model_config(stored)
    inspection = Inspection(checkpoint_files(stored), torch.float32, config.fp8)
    TorchDecoder(config, inspection)
    inspection.verify()
    source = Checkpoint(checkpoint_files(stored), torch.float32, config.fp8)
    assert source.kv_scales(range(2)) == [(0.5, 2.0), (0.25, 3.0)]
    assert Checkpoint(checkpoint_files(meant), torch.float32).kv_scales(range(2)) is None
    del scales["model.layers.1.self_attn.v_proj.v_scale"]
    stored, _ = make_fp8(tiny_model("llama"), tmp_path / "some", "autofp8", **scales)
    with pytest.raises(WeightsMismatch, match="missing in layers 1"):
        Checkpoint(checkpoint_files(stored), torch.float32, config.fp8).kv_scales(range(2))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"\(gptq\) is not supported, only fp8, fbgemm_fp8"),
        ({}, r"\(unnamed\) is not supported"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": group(type="int", num_bits=4)}},
            "g has weights of type int with 4 bits",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": group(strategy="group")}},
            "g has weights by group",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
            "format 'pack-quantized'",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config is not supported",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": group(strategy="block")}},
            "block_structure is not one pair",
        ),
    ],
)
def test_other_quantisations_are_refused_by_name(
    tiny_model: MakeModel, config: dict[str, Any], said: str
) -> None:
    plain = json.loads((tiny_model("llama") / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=said):
        parse_model_config(json.dumps(plain | {"quantization_config": config}).encode())


def test_a_scheme_says_what_it_is() -> None:
    scheme = read_fp8_scheme(GRAINS["deepseek"][0])
    assert isinstance(scheme, Fp8Scheme)
    assert str(scheme) == "fp8 (fp8 in blocks of 16x32)"
    assert str(replace(scheme, method="fbgemm_fp8", block=None)) == "fp8 (fbgemm_fp8)"


def test_the_quantised_models_are_other_models(tmp_path: Path) -> None:
    """Or the tests above would show nothing."""
    source = make_tiny_model("llama", tmp_path / "source")
    _, meant = make_fp8(source, tmp_path / "made", "deepseek")
    name = "model.layers.0.mlp.up_proj.weight"
    original, rounded = (load_file(p / "model.safetensors")[name] for p in (source, meant))
    assert 0.005 < (original - rounded).norm() / original.norm() < 0.04
