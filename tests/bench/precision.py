"""What bfloat16 and int8 weights do to a model: logits beside those of float32, and answers.

    python -m tests.bench.precision [MODEL_DIR ...]

Without a directory, the demo model. It answers the 400 questions in wordings that were held out of its
training, greedily, in each arithmetic; float32's answers are then given to all of them, with what they
answer to, and at every position the logits are compared. A model of which nobody knows what is right gets
made-up tokens instead, and only its logits are told.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.contract.messages import Plan, SamplingParams, SlotAssignment, Want
from engine.demo import MODEL_DIR
from engine.demo.train.evaluate import Probe, held_out
from engine.demo.train.text import ANSWER_TOKENS_MAX, END, render, token_id
from engine.runtime.host.host_runner import HostRunner
from engine.runtime.load import load_runner
from engine.runtime.setup.runner_config import RunnerConfig
from engine.runtime.step.batch import PackedBatch
from tests.bench.figures import Figure, figure, write
from tests.engine.runtime.driver import Driver

KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "float32, torch": {"dtype": "float32", "kernels": "torch"},
    "bfloat16, torch": {"dtype": "bfloat16", "kernels": "torch"},
    "bfloat16, native": {"dtype": "bfloat16", "kernels": "native"},
    "int8 weights, bfloat16, native": {"dtype": "bfloat16", "weights": "int8"},
}
"""The first is what the others are held against."""
SLOTS: Final = 50
MADE_UP, MADE_UP_LEN = 32, 128
GREEDY: Final = SamplingParams(seed=0, max_tokens=ANSWER_TOKENS_MAX, temperature=0.0)
Tokens = list[int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, default=[MODEL_DIR], metavar="MODEL_DIR")
    for model in parser.parse_args().models:
        for found in measure(model):
            write([found], as_json=True)
            sys.stdout.flush()


def measure(model: Path) -> Iterator[Figure]:
    runners = {kind: _load(model, settings) for kind, settings in KINDS.items()}
    reference = next(iter(runners.values()))
    name = model.name
    if model == MODEL_DIR:
        name, probes = "demo", held_out()
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        answered = {kind: answers(runner, tokenizer, probes) for kind, runner in runners.items()}
        texts = [[*prompt, *answer] for prompt, answer in answered[next(iter(runners))]]
        for kind, pairs in answered.items():
            right = sum(
                re.search(probe.check, tokenizer.decode(answer)) is not None
                for probe, (_, answer) in zip(probes, pairs, strict=True)
            )
            yield figure(f"{name}: {kind}: right answers of {len(probes)}", right, "answers")
    else:
        texts = made_up(reference.info.vocab_size)
    distances = compare(list(runners.values()), texts)
    for kind, distance in zip(runners, distances, strict=True):
        yield figure(f"{name}: {kind}: logits, relative L2", 100 * distance.relative, "%")
        yield figure(f"{name}: {kind}: same first choice", 100 * distance.agreement, "%")


def made_up(vocab_size: int) -> list[Tokens]:
    draw = random.Random(0)
    return [draw.choices(range(vocab_size), k=MADE_UP_LEN) for _ in range(MADE_UP)]


@dataclass(slots=True)
class Distance:
    """From the reference's logits, over all positions."""

    squares: float = 0.0
    reference_squares: float = 0.0
    same: int = 0
    positions: int = 0

    def add(self, logits: Tensor, reference: Tensor) -> None:
        self.squares += float((logits - reference).double().square().sum())
        self.reference_squares += float(reference.double().square().sum())
        self.same += int((logits.argmax(-1) == reference.argmax(-1)).sum())
        self.positions += len(logits)

    @property
    def relative(self) -> float:
        return math.sqrt(self.squares / self.reference_squares)

    @property
    def agreement(self) -> float:
        return self.same / self.positions


def compare(runners: Sequence[HostRunner], texts: Sequence[Tokens]) -> list[Distance]:
    """Each runner's distance from the first one."""
    distances = [Distance() for _ in runners]
    for text in texts:
        logits = [_logits(runner, text) for runner in runners]
        for distance, own in zip(distances, logits, strict=True):
            distance.add(own, logits[0])
    return distances


@torch.inference_mode()
def _logits(runner: HostRunner, text: Tokens) -> Tensor:
    """[len(text), vocab] float32"""
    pages = list(range(-(-len(text) // runner.info.page_size)))
    seat = SlotAssignment.of(0, text, len(text), GREEDY)
    plan = Plan(0, [], [seat], [(0, pages)], [0], [0], [len(text)], [Want.NOTHING])
    runner.slots.apply(plan)
    logits = runner.model.logits(runner.model.forward(PackedBatch.of(plan, runner.slots)))
    runner.slots.apply(Plan(0, [0], [], [], [], [], [], []))
    return logits


def answers(runner: HostRunner, tokenizer: Tokenizer, probes: Sequence[Probe]) -> list[tuple[Tokens, Tokens]]:
    """Of each probe the prompt and a greedy answer, without the token that ended it."""
    prompts = [tokenizer.encode(render(probe.messages, ask=True)).ids for probe in probes]
    end, driver, found = token_id(tokenizer, END), Driver(runner, poison=False), []
    for first in range(0, len(prompts), SLOTS):
        lives = {
            slot: driver.seat(slot, prompt, GREEDY)
            for slot, prompt in enumerate(prompts[first : first + SLOTS])
        }
        talking = list(lives)
        while talking:
            driver.step([(slot, len(lives[slot].tokens) - lives[slot].computed) for slot in talking])
            talking = [
                slot
                for slot in talking
                if lives[slot].tokens[-1] != end and len(lives[slot].output) < ANSWER_TOKENS_MAX
            ]
        for slot, life in lives.items():
            driver.leave(slot)
            output = life.output
            found.append((life.tokens[: life.prompt_len], output[:-1] if output[-1] == end else output))
    driver.step([])  # the last ones leave
    return found


def _load(model: Path, settings: Mapping[str, Any]) -> HostRunner:
    config = RunnerConfig(str(model), max_num_seqs=64, kv_cache_memory=1 << 30, device="cpu", **settings)
    runner = load_runner(config, lambda stage: None)
    assert isinstance(runner, HostRunner)
    return runner


if __name__ == "__main__":
    main()
