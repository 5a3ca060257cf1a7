"""The native kernels beside torch, in one process and in turns: a decode step, and a prompt of 200 tokens.

    python -m tests.bench.kernels MODEL_DIR [--streams 1,8] [--kinds torch,native,int8]

Prints, per kind, the best round's median step, its tokens per second, and the best prompt.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, Final

from engine.core.messages import Plan, SamplingParams, SlotStart
from engine.runtime.config import RunnerConfig
from engine.runtime.load import load_runner
from engine.runtime.model_runner import ModelRunner

PROMPT_LEN: Final = 200
KINDS: Final[dict[str, dict[str, Any]]] = {
    "torch": {"kernels": "torch"},
    "native": {"kernels": "native"},
    "int8": {"weights": "int8"},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    runners = {kind: _load(options.model, KINDS[kind]) for kind in options.kinds.split(",")}
    for streams in map(int, options.streams.split(",")):
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in runners}
        for _ in range(options.rounds):
            for kind, runner in runners.items():
                found[kind].append(_round(runner, streams, options.steps))
        for kind, rounds in found.items():
            step_s, prompt_s = (min(column) for column in zip(*rounds, strict=True))
            print(  # noqa: T201
                f"{options.model} streams={streams} {kind}: step {step_s * 1e3:.2f} ms, "
                f"{streams / step_s:.0f} tokens/s, prompt {prompt_s * 1e3:.1f} ms"
            )


def _load(model_dir: str, settings: dict[str, Any]) -> ModelRunner:
    config = RunnerConfig(model_dir, max_model_len=512, kv_cache_bytes=1 << 30, **settings)
    return load_runner(config, lambda stage: None)


def _round(runner: ModelRunner, streams: int, steps: int) -> tuple[float, float]:
    """Seconds of a median step, and of the quickest prompt."""
    pages = -(-(PROMPT_LEN + steps + 1) // runner.info.page_size)
    sampling = SamplingParams(seed=1, max_tokens=steps + 1, temperature=0.0)
    prompts_s, steps_s = [], []
    for slot in range(streams):
        ids = [(7 * slot + 3 * i) % runner.info.vocab_size for i in range(PROMPT_LEN)]
        own = list(range(slot * pages, (slot + 1) * pages))
        seat = SlotStart(slot, ids, PROMPT_LEN, sampling)
        prompts_s.append(
            _timed(runner, Plan(0, [], [seat], [(slot, own)], [slot], [0], [PROMPT_LEN], [True]))
        )
    slots = list(range(streams))
    for step in range(steps):
        plan = Plan(step, [], [], [], slots, [PROMPT_LEN + step] * streams, [1] * streams, [True] * streams)
        steps_s.append(_timed(runner, plan))
    runner.run(Plan(steps, slots, [], [], [], [], [], []))
    return statistics.median(steps_s), min(prompts_s)


def _timed(runner: ModelRunner, plan: Plan) -> float:
    started_s = time.perf_counter()
    runner.run(plan)
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
