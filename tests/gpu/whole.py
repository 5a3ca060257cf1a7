"""The whole engine measured, random weights of true shapes, bf16.

    engine 256 requests     nano-vllm's benchmark: 256 prompts of 100 to 1,024 random tokens, as many out,
                            temperature 0.6, all at once; no API in between, as there
    transformers ...        the same requests through its continuous batching
    engine start ...        from starting the process to ready, weights on disk, kernels compiled before: once
                            on a machine, which a row is about; then the same decodes through the API, a
                            connection each: its gap beside `graph_ms` of the row about idling is what the
                            whole engine adds
    engine 4k prompt ...    the gaps of 32 streams in the core while a prompt is computed beside them, at the
                            gap target that an engine has by default
    engine idle batch 32    the time between one decode graph's end and the next one's start, in the core

The floor of the first: every prompt's prefill at the card's matrix rate, and every decode step of all who
still run at its bandwidth, as if all ran from the start (`decode_floor_s`, `prefill_floor_s`).
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import torch

from engine.contract.messages import SamplingParams
from engine.core.queue.newcomers import AddSequence
from engine.runtime.device.device_runner import DeviceRunner
from engine.runtime.device.graphs import Captured, StepShape
from engine.runtime.load import load_runner
from engine.runtime.models.spec import DecoderSpec
from engine.runtime.setup.runner_config import RunnerConfig
from tests.bench.engine.gpu.measuring import check
from tests.bench.engine.gpu.results import floors
from tests.bench.engine.gpu.shapes import LLAMA_8B, QWEN3_06B, decode_floor_s, prefill_floor_s
from tests.bench.figures import quantile
from tests.gpu.loop import Joined, join, serve, vacate
from tests.gpu.weights import write_model

CUDA = torch.device("cuda")
STEP_TOKENS_MAX = 8192
TEMPERATURE = 0.6
STREAMS = 32
"""Of the rows about idling."""
CONTEXT, DECODES = 1024, 512
GAP_TARGET_S = 0.1
"""What an engine has by default."""
TOKEN_MAX = 10_000
"""The largest token of a prompt."""
HF_DEADLINE_S = 60.0
ROW_LIMIT_S = 150.0
"""The first that wants the large model writes it."""

LoadRunner = Callable[[Path, int, int], DeviceRunner]
"""(model directory, sequences at once, longest sequence)"""


def on_gpu(path: Path, slots: int, longest: int) -> DeviceRunner:
    config = RunnerConfig(
        str(path), "cuda", max_num_seqs=slots, max_model_len=longest, max_step_tokens=STEP_TOKENS_MAX
    )
    runner = load_runner(config, lambda stage: None)
    assert isinstance(runner, DeviceRunner)
    return runner


@dataclass(frozen=True, slots=True)
class Wanted:
    prompt: list[int]
    outputs: int


def nano_vllm(count: int = 256, shortest: int = 100, longest: int = 1024) -> list[Wanted]:
    """bench.py of nano-vllm draws its requests like this."""
    rng = random.Random(0)
    prompts = [
        [rng.randint(2, TOKEN_MAX) for _ in range(rng.randint(shortest, longest))] for _ in range(count)
    ]
    return [Wanted(prompt, rng.randint(shortest, longest)) for prompt in prompts]


def sequences(wanted: Sequence[Wanted]) -> list[AddSequence]:
    """Nothing but `max_tokens` ends them."""
    return [
        AddSequence(
            handle,
            f"req-{handle}",
            request.prompt,
            SamplingParams(seed=handle, max_tokens=request.outputs, temperature=TEMPERATURE),
        )
        for handle, request in enumerate(wanted)
    ]


def requests_floor_s(config: DecoderSpec, wanted: Sequence[Wanted], limits: tuple[float, float]) -> float:
    total = sum(prefill_floor_s(config, len(request.prompt), limits[1]) for request in wanted)
    for step in range(1, max(request.outputs for request in wanted)):
        contexts = [len(r.prompt) + step for r in wanted if r.outputs > step]
        total += decode_floor_s(config, len(contexts), round(sum(contexts) / len(contexts)), limits)
    return total


def throughput(
    path: Path,
    config: DecoderSpec,
    wanted: Sequence[Wanted],
    limits: tuple[float, float],
    load: LoadRunner = on_gpu,
) -> dict[str, Any]:
    longest = max(len(request.prompt) + request.outputs for request in wanted)
    runner = load(path, len(wanted), longest)
    steps_max = max(STEP_TOKENS_MAX, len(wanted)) if load is on_gpu else len(wanted)
    serve(runner, sequences(wanted[:2]), step_tokens_max=steps_max)  # what is left to be compiled
    vacate(runner)
    served = serve(runner, sequences(wanted), step_tokens_max=steps_max)
    assert [len(served.tokens[i]) for i in range(len(wanted))] == [r.outputs for r in wanted]
    outputs, floor_s = sum(request.outputs for request in wanted), requests_floor_s(config, wanted, limits)
    assert served.stats is not None
    return {
        "s": served.took_s,
        "steps": served.steps,
        "floor_s": floor_s,
        "share": floor_s / served.took_s,
        "output_tokens": outputs,
        "tokens_per_s": outputs / served.took_s,
        "preemptions": served.stats.preemptions,
        "pages": runner.info.pages,
    }


def transformers(path: Path, wanted: Sequence[Wanted], device: torch.device = CUDA) -> dict[str, Any]:
    """What it finishes in HF_DEADLINE_S, which with this attention is not all. Measure it last. Raises
    RuntimeError where this version of transformers has no continuous batching."""
    import transformers

    hf: Any = transformers  # typed in part
    model = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device).eval()
    if not hasattr(model, "continuous_batching_context_manager"):
        raise RuntimeError(f"transformers {hf.__version__} has no continuous batching")
    generation = hf.GenerationConfig(
        do_sample=True,
        temperature=TEMPERATURE,
        max_new_tokens=max(r.outputs for r in wanted),
        eos_token_id=-1,
    )
    with model.continuous_batching_context_manager(generation_config=generation, timeout=5.0) as manager:
        began_s = time.perf_counter()
        for request in wanted:
            manager.add_request(request.prompt, max_new_tokens=request.outputs, eos_token_id=-1)
        done = outputs = 0
        while done < len(wanted) and time.perf_counter() - began_s < HF_DEADLINE_S:
            assert manager.is_running(), "transformers' batching has ended"
            result = manager.get_result(timeout=1.0)
            if result is not None:
                done, outputs = done + 1, outputs + len(result.generated_tokens)
        took_s = time.perf_counter() - began_s
    version = {"transformers": hf.__version__, "attention": model.config._attn_implementation}
    return version | {
        "s": took_s,
        "finished": done,
        "output_tokens": outputs,
        "tokens_per_s": outputs / took_s,
    }


class Mark(Protocol):
    """A moment on the device's stream, as `torch.cuda.Event` is."""

    def record(self) -> None: ...

    def elapsed_time(self, end: Any) -> float:
        """ms"""
        ...


def cuda_mark() -> Mark:
    return torch.cuda.Event(enable_timing=True)


@dataclass
class Timed:
    """A graph between two marks: the first is put on the stream right before it. When the host is late the
    stream has nothing else to do, so the mark is then as late as the graph."""

    graph: Captured[Any]
    mark: Callable[[], Mark]
    spans: list[tuple[Mark, Mark]] = field(default_factory=list)

    @property
    def output(self) -> Any:
        return self.graph.output

    def replay(self) -> None:
        begin, end = self.mark(), self.mark()
        begin.record()
        self.graph.replay()
        end.record()
        self.spans.append((begin, end))


def idle(
    path: Path,
    streams: int = STREAMS,
    context: int = CONTEXT,
    decodes: int = DECODES,
    load: LoadRunner = on_gpu,
    mark: Callable[[], Mark] = cuda_mark,
) -> dict[str, Any]:
    """Of the time in which all streams decode, the share between graphs."""
    runner = load(path, streams, context + decodes)
    graphs, shape = runner.steps._graphs, StepShape(streams)
    timed = graphs[shape] = Timed(graphs[shape], mark)
    rng = random.Random(1)
    wanted = [Wanted([rng.randint(2, TOKEN_MAX) for _ in range(context)], decodes) for _ in range(streams)]
    steps_max = STEP_TOKENS_MAX if load is on_gpu else max(streams, 8)
    serve(runner, sequences(wanted), step_tokens_max=steps_max)
    spans = timed.spans[len(timed.spans) // 4 :]  # the first come beside prompts
    assert len(spans) > 2, "hardly a step had all streams"
    if mark is cuda_mark:
        torch.cuda.synchronize()
    gaps = [before[1].elapsed_time(after[0]) for before, after in pairwise(spans)]
    whole = spans[0][0].elapsed_time(spans[-1][0])
    busy = whole - sum(gaps)
    return {
        "idle": sum(gaps) / whole,
        "step_ms": whole / len(gaps),
        "graph_ms": busy / len(gaps),
        "gap_p50_us": quantile(gaps, 0.5) * 1e3,
        "gap_p99_us": quantile(gaps, 0.99) * 1e3,
        "steps": len(gaps),
    }


def beside(
    path: Path,
    streams: int = STREAMS,
    context: int = CONTEXT,
    prompt: int = 4 * CONTEXT,
    decodes: int = DECODES,
    load: LoadRunner = on_gpu,
) -> dict[str, Any]:
    """The gaps of streams while a long prompt is computed beside them."""
    runner = load(path, streams + 1, max(context + decodes, prompt + 2))
    rng = random.Random(3)
    wanted = [
        Wanted([rng.randint(2, TOKEN_MAX) for _ in range(length)], outputs)
        for length, outputs in [(context, decodes)] * streams + [(prompt, 2)]
    ]
    *before, late = sequences(wanted)
    joined = Joined(before, late=late, after=decodes // 4)
    steps_max = STEP_TOKENS_MAX if load is on_gpu else max(streams + 1, 8)
    join(runner, joined, GAP_TARGET_S, step_tokens_max=steps_max)
    assert joined.first_s, "the prompt never had a token"
    gaps = [(end, (end - begin) * 1e3) for begin, end in pairwise(joined.steps_s)]
    ends_s = joined.first_s + gaps[-1][1] / 1e3
    during = [gap for end, gap in gaps if joined.sent_s <= end <= ends_s]
    alone = [gap for end, gap in gaps if not joined.sent_s <= end <= ends_s]
    return {
        "streams": streams,
        "prompt": prompt,
        "gap_target_ms": GAP_TARGET_S * 1e3,
        "gap_max_ms": max(during),
        "gap_p50_ms": quantile(during, 0.5),
        "gap_alone_p50_ms": quantile(alone, 0.5),
        "steps": len(during),
        "first_token_ms": (joined.first_s - joined.sent_s) * 1e3,
    }


@contextmanager
def freed() -> Any:
    """What a row held is given back before the next."""
    try:
        yield
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Streams:
    count: int = STREAMS
    prompt: int = CONTEXT
    outputs: int = DECODES


async def served(path: Path, streams: Streams, options: Sequence[str]) -> dict[str, Any]:
    """An engine as its operators start it: how long until it is ready, and a load through its API."""
    # The other rows need nothing that speaks HTTP.
    from tests.bench.client import ApiServer
    from tests.bench.engine.load import Load, Sample, Server, measure, warm_up
    from tests.bench.services import free_port, service

    load = Load(streams.count, rounds=1, prompt_len=streams.prompt, output_len=streams.outputs)
    port = free_port()
    argv = [sys.executable, "-m", "engine", "serve", "--model", str(path), "--port", str(port), *options]
    began_s = time.perf_counter()
    async with service(argv, f"http://127.0.0.1:{port}/readyz") as process:
        ready_s = time.perf_counter() - began_s
        server = Server("", ApiServer(f"http://127.0.0.1:{port}/v1"), path.name, (process.pid,))
        sample, rng = Sample(), random.Random(2)
        await warm_up(server, load.prompt_len)
        await measure(server, load, rng, sample)
    return {
        "ready_s": ready_s,
        "streams": load.streams,
        "tokens_per_s": sample.tokens_per_s,
        "gap_p50_ms": quantile(sample.gaps_ms, 0.5),
        "gap_p99_ms": quantile(sample.gaps_ms, 0.99),
        "ttft_p50_ms": quantile(sample.first_ms, 0.5),
    }


def start(path: Path, streams: Streams = Streams(), device: str = "cuda") -> dict[str, Any]:
    longest = streams.prompt + streams.outputs
    options = {"--device": device, "--max-num-seqs": streams.count, "--max-model-len": longest}
    return asyncio.run(served(path, streams, [str(word) for pair in options.items() for word in pair]))


def start_cold(path: Path) -> dict[str, Any]:
    """As on a machine on which nothing was ever compiled; the row before it finds what was compiled."""
    with tempfile.TemporaryDirectory() as directory, patch.dict(os.environ, TRITON_CACHE_DIR=directory):
        return start(path, replace(Streams(), outputs=16))


def main() -> int:
    ok = True
    with tempfile.TemporaryDirectory() as directory:
        # Written when the first row wants it: a full disk costs the rows of the large model alone.
        small = cache(partial(write_model, QWEN3_06B, Path(directory) / "qwen", CUDA))
        large = cache(partial(write_model, LLAMA_8B, Path(directory) / "llama", CUDA))
        for row, run in (
            ("engine 256 requests Qwen3-0.6B", lambda: throughput(small(), QWEN3_06B, nano_vllm(), floors())),
            ("engine start 8B", lambda: start(large())),
            ("engine 4k prompt beside 32 streams", lambda: beside(large())),
            ("engine idle batch 32", lambda: idle(large())),
            ("engine start 8B, kernels compiled anew", lambda: start_cold(large())),
            ("engine idle batch 32 Qwen3-0.6B", lambda: idle(small())),
            ("engine start Qwen3-0.6B", lambda: start(small())),
            ("transformers 256 requests Qwen3-0.6B", lambda: transformers(small(), nano_vllm())),
        ):
            with freed():
                ok &= check("whole", row, run, limit_s=ROW_LIMIT_S)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
