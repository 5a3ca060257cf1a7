"""What fp8 does to a model: weights by row, block and matrix, and the KV cache, beside float32.

    python -m tests.bench.precision_fp8 [MODEL_DIR ...]

Needs no GPU: rounding to e4m3 is exact in torch on a CPU, so the numbers that a GPU would hold are made here,
and everything else is float32. It is fp8's own error, then, without bfloat16's, which comes on top and which
`tests.bench.precision` tells; the texts and the distances are that module's. Matrices are rounded as the
product rounds them; the embedding and the head stay as they are. Keys and values are rounded as they are
stored, prompts' own among them, as a device's kernels read them from the cache.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from engine.demo import MODEL_DIR
from engine.demo.train.evaluate import held_out
from engine.runtime.host.host_runner import HostRunner
from engine.runtime.host.model import TorchModel
from engine.runtime.load import load_runner
from engine.runtime.setup.runner_config import RunnerConfig
from engine.runtime.step.batch import PackedBatch
from engine.runtime.weights.fp8 import FP8_MAX, quantise
from tests.bench.figures import Figure, figure, write
from tests.bench.precision import Tokens, answers, compare, made_up

BLOCK: Final = 128
CALIBRATION_TEXTS: Final = 8
Rounding = Callable[[Tensor], Tensor]
Scales = Sequence[tuple[float, float]]


def by_row(weight: Tensor) -> Tensor:
    held = quantise(weight)
    return held.values.float() * held.scales[:, None]


def by_matrix(weight: Tensor) -> Tensor:
    """One scale for all."""
    return by_row(weight.reshape(1, -1)).view_as(weight)


def by_block(weight: Tensor) -> Tensor:
    found = torch.empty_like(weight)
    for down in range(0, weight.shape[0], BLOCK):
        for across in range(0, weight.shape[1], BLOCK):
            own = slice(down, down + BLOCK), slice(across, across + BLOCK)
            found[own] = by_matrix(weight[own])
    return found


WEIGHTS: Final[Mapping[str, Rounding]] = {
    "weights by row": by_row,
    "weights by block of 128": by_block,
    "weights by block, then by row": lambda weight: by_row(by_block(weight)),
    "weights by matrix": by_matrix,
}
KV, KV_CALIBRATED = "KV, scale 1", "KV, calibrated scales"
BOTH: Final = "weights by row, KV, scale 1"


@dataclass(frozen=True, slots=True)
class RoundedCache:
    """A `Model` that sees keys and values as a cache in e4m3 keeps them."""

    model: TorchModel
    scales: Scales

    def forward(self, batch: PackedBatch) -> Tensor:
        model = self.model
        attention = model.attend(batch)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k_scale, v_scale = self.scales[layer]
            return attention(layer, q, rounded(k, k_scale), rounded(v, v_scale))

        return model.decoder.forward(batch.token_ids, batch.positions, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


@dataclass(slots=True)
class Watched:
    """The same, unrounded, and the largest key and value of each layer."""

    model: TorchModel
    largest: list[list[float]]

    def forward(self, batch: PackedBatch) -> Tensor:
        model = self.model
        attention = model.attend(batch)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for which, part in enumerate((k, v)):
                self.largest[layer][which] = max(self.largest[layer][which], float(part.abs().max()))
            return attention(layer, q, k, v)

        return model.decoder.forward(batch.token_ids, batch.positions, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


def rounded(x: Tensor, scale: float) -> Tensor:
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, default=[MODEL_DIR], metavar="MODEL_DIR")
    with tempfile.TemporaryDirectory() as directory:
        for model in parser.parse_args().models:
            for found in measure(model, Path(directory)):
                write([found], as_json=True)
                sys.stdout.flush()


def measure(model: Path, scratch: Path) -> Iterator[Figure]:
    reference, is_demo = _load(model), model == MODEL_DIR
    texts = _demo_texts(reference) if is_demo else made_up(reference.info.vocab_size)
    runners = {"float32": reference} | {
        kind: _load(_with_weights(model, scratch / f"{model.name} {kind}", rounding))
        for kind, rounding in WEIGHTS.items()
    }
    layers = reference.cache.geometry.layers
    ones, calibrated = [(1.0, 1.0)] * layers, _calibrated(_load(model), texts[:CALIBRATION_TEXTS])
    for kind, directory, scales in (
        (KV, model, ones),
        (KV_CALIBRATED, model, calibrated),
        (BOTH, scratch / f"{model.name} weights by row", ones),
    ):
        runners[kind] = _load(directory)
        runners[kind].model = RoundedCache(_torch_model(runners[kind]), scales)
    name = "demo" if is_demo else model.name
    distances = compare(list(runners.values()), texts)
    for kind, distance in zip(runners, distances, strict=True):
        yield figure(f"{name}: fp8 {kind}: logits, relative L2", 100 * distance.relative, "%")
        yield figure(f"{name}: fp8 {kind}: same first choice", 100 * distance.agreement, "%")
    if is_demo:
        for kind in ("float32", "weights by row", BOTH):
            right, of = _right_answers(runners[kind])
            yield figure(f"{name}: fp8 {kind}: right answers of {of}", right, "answers")


def _demo_texts(runner: HostRunner) -> list[Tokens]:
    """Every eighth question with float32's answer."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    return [[*prompt, *answer] for prompt, answer in answers(runner, tokenizer, held_out()[::8])]


def _right_answers(runner: HostRunner) -> tuple[int, int]:
    tokenizer, probes = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")), held_out()
    said = answers(runner, tokenizer, probes)
    return sum(
        re.search(probe.check, tokenizer.decode(answer)) is not None
        for probe, (_, answer) in zip(probes, said, strict=True)
    ), len(probes)


def _calibrated(runner: HostRunner, texts: Sequence[Tokens]) -> Scales:
    """So that the largest key and the largest value of these texts are the largest e4m3."""
    largest = [[0.0, 0.0] for _ in range(runner.cache.geometry.layers)]
    runner.model = Watched(_torch_model(runner), largest)
    compare([runner], texts)
    return [(k / FP8_MAX, v / FP8_MAX) for k, v in largest]


def _with_weights(source: Path, directory: Path, rounding: Rounding) -> Path:
    """A copy whose layers' matrices went through fp8 and back, in float32."""
    directory.mkdir()
    for file in source.glob("*.json"):
        (directory / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    save_file(
        {
            name: rounding(tensor.float()) if name.endswith("_proj.weight") else tensor
            for name, tensor in tensors.items()
        },
        directory / "model.safetensors",
    )
    return directory


def _load(model: Path) -> HostRunner:
    config = RunnerConfig(
        str(model), device="cpu", dtype="float32", kernels="torch", max_num_seqs=64, kv_cache_memory=1 << 28
    )
    runner = load_runner(config, lambda stage: None)
    assert isinstance(runner, HostRunner)
    return runner


def _torch_model(runner: HostRunner) -> TorchModel:
    assert isinstance(runner.model, TorchModel)
    return runner.model


if __name__ == "__main__":
    main()
