"""The native kernels beside torch, and beside what the machine can do.

    python -m tests.bench.kernels MODEL_DIR... [--part kinds|floor] [--streams 1,8] [--kinds torch,native]
        [--llama FILE]

kinds: in one process and in turns, each with every usable core, a decode step and a prompt of 200 tokens (or
of `--prompt`). Per kind, the best round's median step, its tokens per second, and the best prompt. The kind
`transformers` is its own forward passes, with its own cache. The kind `llama.cpp` is the same weights, in
bfloat16, by its `llama-batched-bench` (`--llama`, built as `tests.bench.against_llama_cpp` says), whose
prompts are computed together, so that one's time is its part.

floor: what no kernel can go below. A decode step reads every weight once, and the keys and values of its
streams, and it reads and writes their states: so many bytes, at the rate at which the machine reads memory
(machine.py), is the floor, and the share is floor by step. Reading and stepping take turns, one by one, and
both are medians of the one run, so that a neighbour slows them alike. The target is for weights alone. A
prompt has its own floor: its multiplications, beside torch's rate of square bfloat16 products, which is no
bound but a yardstick. For models that no cache holds; of others the floor says nothing.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import torch

from engine.contract.messages import Plan, SamplingParams, SlotAssignment, Want
from engine.runtime.host.host_runner import HostRunner
from engine.runtime.load import load_runner
from engine.runtime.models.decoder_config import read_model_config
from engine.runtime.models.spec import DecoderSpec
from engine.runtime.setup.hardware import usable_cores
from engine.runtime.setup.runner_config import RunnerConfig
from engine.runtime.start.starting import choose_dtype
from engine.runtime.weights.parameters import layer_parameters
from tests.bench.figures import Figure, at_least, exit_code, figure, write
from tests.bench.gguf_model import write_gguf
from tests.bench.machine import Memory, Multiplier

KINDS: Final[dict[str, dict[str, Any]]] = {
    "torch": {"kernels": "torch"},
    "native": {"kernels": "native"},
    "int8": {"weights": "int8"},
}
TRANSFORMERS: Final = "transformers"
LLAMA_CPP: Final = "llama.cpp"
LLAMA_BATCH: Final = 2048
"""Tokens of a step at most, as its own default is."""
FLOOR_SHARE_MIN: Final = 75.0
"""Percent, of a step of one stream."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--part", choices=["kinds", "floor"], default="kinds")
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument(
        "--llama", type=Path, metavar="FILE", help="llama-batched-bench, for the kind llama.cpp"
    )
    parser.add_argument("--prompt", type=int, default=200, metavar="TOKENS")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
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


class _Bench(Protocol):
    """Something that computes the model."""

    def run(self, streams: int, steps: int, prompt_len: int) -> tuple[float, float]:
        """Seconds of a median step of so many streams, and of the quickest prompt, alone."""
        ...


def _kinds(model: Path, options: argparse.Namespace) -> Iterator[Figure]:
    benches = {kind: _bench(model, kind, options) for kind in options.kinds.split(",")}
    for streams in map(int, options.streams.split(",")):
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in benches}
        for _ in range(options.rounds):
            for kind, bench in benches.items():
                torch.set_num_threads(usable_cores() if kind in ("torch", TRANSFORMERS) else 1)
                found[kind].append(bench.run(streams, options.steps, options.prompt))
        for kind, rounds in found.items():
            step_s, prompt_s = (min(column) for column in zip(*rounds, strict=True))
            name = f"{model.name}: {_count(streams)}: {kind}"
            yield figure(f"{name}: step", step_s * 1e3, "ms")
            yield figure(f"{name}: output", streams / step_s, "tokens/s")
            yield figure(f"{name}: prompt of {options.prompt}", prompt_s * 1e3, "ms")


def _floor(model: Path, options: argparse.Namespace) -> Iterator[Figure]:
    runner, shape, prompt_len = _load(model, "native", options), read_model_config(model), options.prompt
    memory, multiplier = Memory(), Multiplier()
    weight_bytes = _matrix_elements(shape) * getattr(torch, runner.info.dtype).itemsize
    prompts_s: list[float] = []
    for streams in map(int, options.streams.split(",")):
        steps_s: list[float] = []
        memory.forget()
        for _ in range(options.rounds):
            multiplier.multiply()
            prompts_s += _seat(runner, streams, options.steps, prompt_len)
            for step in range(options.steps):
                steps_s.append(_step(runner, streams, prompt_len + step))
                memory.read()
            _leave(runner, streams)
        seen = streams * (prompt_len + options.steps / 2)
        kept_bytes = seen * runner.info.page_bytes / runner.info.page_size
        kept_bytes += 2 * streams * runner.info.state_bytes
        for found in _shares(streams, weight_bytes, kept_bytes, steps_s, memory):
            yield msgspec.structs.replace(found, name=f"{model.name}: {_count(streams)}: {found.name}")
    # lm_head is multiplied with one row of a prompt.
    operations = 2 * prompt_len * (_matrix_elements(shape) - shape.vocab_size * shape.hidden_size)
    rate = operations / statistics.median(prompts_s)
    yield figure(f"{model.name}: prompt of {prompt_len}: products", rate / 1e9, "GFLOP/s")
    yield figure("torch: square products", multiplier.rate / 1e9, "GFLOP/s")


def _shares(
    streams: int, weight_bytes: int, kept_bytes: float, steps_s: Sequence[float], memory: Memory
) -> Iterator[Figure]:
    step_s = statistics.median(steps_s)
    weights_s, kept_s = weight_bytes / memory.bandwidth, kept_bytes / memory.bandwidth
    yield figure(f"memory, read {memory.way}, median", memory.bandwidth / 1e9, "GB/s")
    yield figure("memory, the best reading", memory.bandwidth_max / 1e9, "GB/s")
    yield figure("floor of the weights", weights_s * 1e3, "ms")
    yield figure("floor with keys, values and states", (weights_s + kept_s) * 1e3, "ms")
    yield figure("step, median", step_s * 1e3, "ms")
    yield figure("step, the best", min(steps_s) * 1e3, "ms")
    target = at_least(FLOOR_SHARE_MIN) if streams == 1 else None
    yield figure("share, weights alone", 100 * weights_s / step_s, "%", target)
    yield figure("share, with keys, values and states", 100 * (weights_s + kept_s) / step_s, "%")


def _count(streams: int) -> str:
    return "1 stream" if streams == 1 else f"{streams} streams"


def _matrix_elements(shape: DecoderSpec) -> int:
    """Of all that a token is multiplied with; embeddings are looked up."""
    layers = (layer_parameters(shape, index).matrices.values() for index in range(len(shape.layers)))
    own = sum(matrix.elements for matrices in layers for matrix in matrices)
    return own + shape.vocab_size * shape.hidden_size


def _bench(model: Path, kind: str, options: argparse.Namespace) -> _Bench:
    if kind == TRANSFORMERS:
        return _Transformers(model, options.dtype)
    if kind == LLAMA_CPP:
        return _LlamaCpp(options.llama, write_gguf(model, "bf16"))
    return _Runner(_load(model, kind, options))


def _load(model: Path, kind: str, options: argparse.Namespace) -> HostRunner:
    config = RunnerConfig(
        str(model),
        max_model_len=options.prompt + options.steps + 1,
        max_num_seqs=max(map(int, options.streams.split(","))),
        max_step_tokens=max(options.prompt, 512),
        kv_cache_memory=3 << 29,
        dtype=options.dtype,
        device="cpu",
        **KINDS[kind],
    )
    runner = load_runner(config, lambda stage: None)
    assert isinstance(runner, HostRunner)
    return runner


@dataclass(frozen=True, slots=True)
class _Runner:
    """This engine's."""

    runner: HostRunner

    def run(self, streams: int, steps: int, prompt_len: int) -> tuple[float, float]:
        prompts_s = _seat(self.runner, streams, steps, prompt_len)
        steps_s = [_step(self.runner, streams, prompt_len + step) for step in range(steps)]
        _leave(self.runner, streams)
        return statistics.median(steps_s), min(prompts_s)


class _Transformers:
    """transformers' own forward passes, greedy. All streams go on from one prompt, computed once."""

    def __init__(self, model: Path, dtype: str) -> None:
        import transformers

        chosen = choose_dtype(dtype)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=chosen).eval()

    @torch.inference_mode()
    def run(self, streams: int, steps: int, prompt_len: int) -> tuple[float, float]:
        ids = torch.tensor([_prompt(0, prompt_len, self._model.config.vocab_size)])
        started_s = time.perf_counter()
        out = self._model(ids, use_cache=True, logits_to_keep=1)
        tokens = out.logits[:, -1:].argmax(-1)
        prompt_s = time.perf_counter() - started_s
        cache, tokens, steps_s = out.past_key_values, tokens.expand(streams, 1), []
        cache.reorder_cache(torch.zeros(streams, dtype=torch.int64))
        for _ in range(steps):
            started_s = time.perf_counter()
            out = self._model(tokens, past_key_values=cache, use_cache=True)
            tokens = out.logits[:, -1:].argmax(-1)
            steps_s.append(time.perf_counter() - started_s)
        return statistics.median(steps_s), prompt_s


class _Batched(msgspec.Struct, frozen=True):
    """A line of llama-batched-bench."""

    pl: int
    t_pp: float
    t_tg: float


@dataclass(frozen=True, slots=True)
class _LlamaCpp:
    """llama.cpp's own bench of batches, with all cores."""

    program: Path
    weights: Path

    def run(self, streams: int, steps: int, prompt_len: int) -> tuple[float, float]:
        context_len, cores = streams * (prompt_len + steps + 1), str(usable_cores())
        argv = [str(self.program), "-m", str(self.weights), "-c", str(context_len), "-b", str(LLAMA_BATCH)]
        argv += ["-npp", str(prompt_len), "-ntg", str(steps), "-npl", str(streams), "-fa", "on"]
        argv += ["-t", cores, "-tb", cores, "--output-format", "jsonl"]
        done = subprocess.run(argv, capture_output=True, check=True)
        [found] = [line for line in done.stdout.splitlines() if line.startswith(b"{")]
        measured = msgspec.json.decode(found, type=_Batched)
        return measured.t_tg / steps, measured.t_pp / measured.pl


def _prompt(stream: int, length: int, vocab_size: int) -> list[int]:
    return [(7 * stream + 3 * i) % vocab_size for i in range(length)]


def _seat(runner: HostRunner, streams: int, steps: int, prompt_len: int) -> list[float]:
    """Seconds of each stream's prompt, computed alone. There is room for so many steps."""
    pages = -(-(prompt_len + steps + 1) // runner.info.page_size)
    sampling = SamplingParams(seed=1, max_tokens=steps + 1, temperature=0.0)
    taken_s = []
    for slot in range(streams):
        ids = _prompt(slot, prompt_len, runner.info.vocab_size)
        own = list(range(slot * pages, (slot + 1) * pages))
        seat = SlotAssignment.of(slot, ids, prompt_len, sampling)
        plan = Plan(0, [], [seat], [(slot, own)], [slot], [0], [prompt_len], [Want.SAMPLE])
        taken_s.append(_timed(runner, plan))
    return taken_s


def _step(runner: HostRunner, streams: int, position: int) -> float:
    slots = list(range(streams))
    wanted = [Want.SAMPLE] * streams
    return _timed(runner, Plan(position, [], [], [], slots, [position] * streams, [1] * streams, wanted))


def _leave(runner: HostRunner, streams: int) -> None:
    runner.run(Plan(0, list(range(streams)), [], [], [], [], [], []))


def _timed(runner: HostRunner, plan: Plan) -> float:
    started_s = time.perf_counter()
    runner.run(plan)
    return time.perf_counter() - started_s


if __name__ == "__main__":
    sys.exit(main())
