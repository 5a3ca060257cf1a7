"""`python -m engine.runtime.device.shipping FOLDER`: compile common kernels for common cards, without a GPU.

An image runs it while it is built, and `engine.runtime.kernels.shipped` finds the kernels when a model is
first served. Each model is walked through as at a start (`rehearsal.py`), once for each card, with plain
weights and with fp8 weights. Kernels hardly depend on a model: they are specialised for sizes that are
divisible by 16, for the head size and for the norm's width. Of the kernels of Llama 3.1 8B all but 3 of 51
are those of Qwen3 8B. What is not shipped is compiled at the start, as it would be without all this.

The walks are the work of one process for each card: Triton keeps one driver for a process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import torch

from engine.runtime.collective.shard import WHOLE
from engine.runtime.device.device_shard import Design, rehearse
from engine.runtime.device.rehearsal import META, Blueprint
from engine.runtime.kernels.absent_card import compile_as_for, keep_compiled_in
from engine.runtime.kernels.launching import compiling_in
from engine.runtime.models.decoder_config import parse_model_config
from engine.runtime.models.spec import DecoderSpec
from engine.runtime.setup.runner_config import RunnerConfig, Weights
from shared.process.child_python import environment


@dataclass(frozen=True, slots=True)
class Make:
    """A make of card: what kernels are compiled for, and how many programs it runs beside each other."""

    capability: tuple[int, int]
    multiprocessors: int

    @property
    def has_fp8(self) -> bool:
        return self.capability >= (8, 9)


MAKES: Final = {
    "a100": Make((8, 0), 108),
    "l40s": Make((8, 9), 142),
    "h100": Make((9, 0), 132),
    "b200": Make((10, 0), 148),
}
QWEN3: Final = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
}
LLAMA: Final = QWEN3 | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000,
}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "qwen3-8b": QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "llama-3.1-8b": LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
"""Each model's config.json, as far as kernels depend on it."""


@dataclass(slots=True)
class KernelCount:
    """The kernels that Triton was asked for."""

    compiled: int = 0
    found: int = 0

    def listen(self, *, cache_hit: bool, **_: object) -> None:
        if cache_hit:
            self.found += 1
        else:
            self.compiled += 1


def compile_for(make: Make, model: DecoderSpec, weights: Weights, threads: int) -> None:
    """Compile everything that a start launches, into Triton's cache. The active driver is the card's."""
    blueprint = Blueprint("absent", make.capability, make.multiprocessors)
    config = RunnerConfig(model="absent", device="cuda", weights=weights)
    design = Design.of(config, model, blueprint, WHOLE)
    with (
        torch.inference_mode(),
        ThreadPoolExecutor(threads, "compile") as workers,
        compiling_in(workers, META),
    ):
        rehearse(design, blueprint, WHOLE, all_products=True)


def compile_all(make: Make, models: Sequence[str], threads: int) -> KernelCount:
    """Compile each model's kernels for one card. Takes this process' driver for good."""
    count = KernelCount()
    compile_as_for(make.capability, count.listen)
    for name in models:
        model = parse_model_config(msgspec.json.encode(MODELS[name]))
        for weights in _kinds_of_weights(make):
            compile_for(make, model, weights, threads)
    return count


def _kinds_of_weights(make: Make) -> Iterator[Weights]:
    yield "plain"
    if make.has_fp8:
        yield "fp8"


def _said(card: str, models: Sequence[str], threads: int) -> int:
    count = compile_all(MAKES[card], models, threads)
    sys.stdout.write(f"{card}: {count.compiled} kernels compiled, {count.found} there already\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile common kernels for common cards.")
    parser.add_argument("folder", type=Path, help="where compiled kernels go; those that are there stay")
    parser.add_argument("--cards", default=",".join(MAKES), help=f"with commas between: {', '.join(MAKES)}")
    parser.add_argument(
        "--models", default=",".join(MODELS), help=f"with commas between: {', '.join(MODELS)}"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    cards, models = options.cards.split(","), options.models.split(",")
    for names, known in ((cards, MAKES), (models, MODELS)):
        if unknown := [name for name in names if name not in cast(dict[str, object], known)]:
            parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}")
    if len(cards) == 1:
        keep_compiled_in(options.folder)
        return _said(cards[0], models, options.threads)
    for card in cards:
        command = [sys.executable, "-P", "-m", "engine.runtime.device.shipping", str(options.folder)]
        command += ["--cards", card, "--models", options.models, "--threads", str(options.threads)]
        if (status := subprocess.run(command, env=environment()).returncode) != 0:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
