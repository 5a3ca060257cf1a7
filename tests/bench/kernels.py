"""The native kernels beside torch, and beside what the machine can do.

    python -m tests.bench.kernels MODEL_DIR... [--part kinds|floor] [--streams 1,8] [--kinds torch,native]

kinds: in one process and in turns, each with every usable core, a decode step and a prompt of 200 tokens.
Per kind, the best round's median step, its tokens per second, and the best prompt.

floor: what no kernel can go below. A decode step reads every weight once, and the keys and values of its
streams: so many bytes, at the rate at which the machine reads memory (machine.py), is the floor, and the
share is floor by step. Reading and stepping take turns, one by one, and both are medians of the one run, so
that a neighbour slows them alike. The target is for weights alone. A prompt has its own floor: its
multiplications, beside torch's rate of square bfloat16 products, which is no bound but a yardstick. For
models that no cache holds; of others the floor says nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from engine.contract.messages import Plan, SamplingParams, SlotAssignment, Want
from engine.runtime.host.host_runner import HostRunner
from engine.runtime.load import load_runner
from engine.runtime.models.decoder_config import read_model_config
from engine.runtime.models.spec import DecoderSpec
from engine.runtime.setup.hardware import usable_cores
from engine.runtime.setup.runner_config import RunnerConfig
from engine.runtime.weights.parameters import layer_parameters
from tests.bench.figures import Figure, at_least, exit_code, figure, write
from tests.bench.machine import Memory, Multiplier

PROMPT_LEN: Final = 200
KINDS: Final[dict[str, dict[str, Any]]] = {
    "torch": {"kernels": "torch"},
    "native": {"kernels": "native"},
    "int8": {"weights": "int8"},
}
FLOOR_SHARE_MIN: Final = 75.0
"""Percent, of a step of one stream."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--part", choices=["kinds", "floor"], default="kinds")
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="exit 1 when a figure misses its target")
    options = parser.parse_args()
    figures = []
    for model in options.models:
        for found in (_kinds if options.part == "kinds" else _floor)(model, options):
            figures.append(found)
            write([found], as_json=True)
            sys.stdout.flush()
    return exit_code(figures, check=options.check)


def _kinds(model: Path, options: argparse.Namespace) -> Iterator[Figure]:
    runners = {kind: _load(model, kind) for kind in options.kinds.split(",")}
    for streams in map(int, options.streams.split(",")):
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in runners}
        for _ in range(options.rounds):
            for kind, runner in runners.items():
                torch.set_num_threads(usable_cores() if kind == "torch" else 1)
                found[kind].append(_round(runner, streams, options.steps))
        for kind, rounds in found.items():
            step_s, prompt_s = (min(column) for column in zip(*rounds, strict=True))
            name = f"{model.name}: {_count(streams)}: {kind}"
            yield figure(f"{name}: step", step_s * 1e3, "ms")
            yield figure(f"{name}: output", streams / step_s, "tokens/s")
            yield figure(f"{name}: prompt of {PROMPT_LEN}", prompt_s * 1e3, "ms")


def _floor(model: Path, options: argparse.Namespace) -> Iterator[Figure]:
    runner, shape = _load(model, "native"), read_model_config(model)
    memory, multiplier = Memory(), Multiplier()
    weight_bytes = _matrix_elements(shape) * getattr(torch, runner.info.dtype).itemsize
    prompts_s: list[float] = []
    for streams in map(int, options.streams.split(",")):
        steps_s: list[float] = []
        memory.forget()
        for _ in range(options.rounds):
            multiplier.multiply()
            prompts_s += _seat(runner, streams, options.steps)
            for step in range(options.steps):
                steps_s.append(_step(runner, streams, step))
                memory.read()
            _leave(runner, streams)
        seen = streams * (PROMPT_LEN + options.steps / 2)
        pages_bytes = seen * runner.info.page_bytes / runner.info.page_size
        for found in _shares(streams, weight_bytes, pages_bytes, steps_s, memory):
            yield msgspec.structs.replace(found, name=f"{model.name}: {_count(streams)}: {found.name}")
    # lm_head is multiplied with one row of a prompt.
    operations = 2 * PROMPT_LEN * (_matrix_elements(shape) - shape.vocab_size * shape.hidden_size)
    rate = operations / statistics.median(prompts_s)
    yield figure(f"{model.name}: prompt of {PROMPT_LEN}: products", rate / 1e9, "GFLOP/s")
    yield figure("torch: square products", multiplier.rate / 1e9, "GFLOP/s")


def _shares(
    streams: int, weight_bytes: int, pages_bytes: float, steps_s: Sequence[float], memory: Memory
) -> Iterator[Figure]:
    step_s = statistics.median(steps_s)
    weights_s, pages_s = weight_bytes / memory.bandwidth, pages_bytes / memory.bandwidth
    yield figure(f"memory, read {memory.way}, median", memory.bandwidth / 1e9, "GB/s")
    yield figure("memory, the best reading", memory.bandwidth_max / 1e9, "GB/s")
    yield figure("floor of the weights", weights_s * 1e3, "ms")
    yield figure("floor with keys and values", (weights_s + pages_s) * 1e3, "ms")
    yield figure("step, median", step_s * 1e3, "ms")
    yield figure("step, the best", min(steps_s) * 1e3, "ms")
    target = at_least(FLOOR_SHARE_MIN) if streams == 1 else None
    yield figure("share, weights alone", 100 * weights_s / step_s, "%", target)
    yield figure("share, with keys and values", 100 * (weights_s + pages_s) / step_s, "%")


def _count(streams: int) -> str:
    return "1 stream" if streams == 1 else f"{streams} streams"


def _matrix_elements(shape: DecoderSpec) -> int:
    """Of all that a token is multiplied with; embeddings are looked up."""
    own = sum(matrix.elements for matrix in layer_parameters(shape, 0).matrices.values())
    return len(shape.layers) * own + shape.vocab_size * shape.hidden_size


def _load(model: Path, kind: str) -> HostRunner:
    config = RunnerConfig(str(model), max_model_len=512, kv_cache_memory=1 << 30, device="cpu", **KINDS[kind])
    runner = load_runner(config, lambda stage: None)
    assert isinstance(runner, HostRunner)
    return runner


def _round(runner: HostRunner, streams: int, steps: int) -> tuple[float, float]:
    """Seconds of a median step, and of the quickest prompt."""
    prompts_s = _seat(runner, streams, steps)
    steps_s = [_step(runner, streams, step) for step in range(steps)]
    _leave(runner, streams)
    return statistics.median(steps_s), min(prompts_s)


def _seat(runner: HostRunner, streams: int, steps: int) -> list[float]:
    """Seconds of each stream's prompt, computed alone. There is room for so many steps."""
    pages = -(-(PROMPT_LEN + steps + 1) // runner.info.page_size)
    sampling = SamplingParams(seed=1, max_tokens=steps + 1, temperature=0.0)
    taken_s = []
    for slot in range(streams):
        ids = [(7 * slot + 3 * i) % runner.info.vocab_size for i in range(PROMPT_LEN)]
        own = list(range(slot * pages, (slot + 1) * pages))
        seat = SlotAssignment.of(slot, ids, PROMPT_LEN, sampling)
        plan = Plan(0, [], [seat], [(slot, own)], [slot], [0], [PROMPT_LEN], [Want.SAMPLE])
        taken_s.append(_timed(runner, plan))
    return taken_s


def _step(runner: HostRunner, streams: int, step: int) -> float:
    slots = list(range(streams))
    plan = Plan(
        step, [], [], [], slots, [PROMPT_LEN + step] * streams, [1] * streams, [Want.SAMPLE] * streams
    )
    return _timed(runner, plan)


def _leave(runner: HostRunner, streams: int) -> None:
    runner.run(Plan(0, list(range(streams)), [], [], [], [], [], []))


def _timed(runner: HostRunner, plan: Plan) -> float:
    started_s = time.perf_counter()
    runner.run(plan)
    return time.perf_counter() - started_s


if __name__ == "__main__":
    sys.exit(main())
