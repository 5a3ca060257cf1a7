"""A small model with an MTP layer, and steps in which it guesses, on whatever runner computes them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from engine.contract.messages import Plan, RunResult, SamplingParams, SlotAssignment, Want, agreed
from engine.runtime.device.device_runner import DeviceRunner
from engine.runtime.host.host_runner import HostRunner
from tests.engine.runtime.config_oracle import Weights
from tests.engine.runtime.test_mtp import mtp_tensors

MODEL = Weights("qwen3_5_text", heads=4, kv_heads=2)


def guessing_model(path: Path) -> Path:
    path.mkdir()
    config = MODEL.config(max_position_embeddings=128, mtp_num_hidden_layers=1)
    (path / "config.json").write_text(json.dumps(config))
    save_file(MODEL.tensors() | mtp_tensors(), path / "model.safetensors", {"format": "pt"})
    return path


def lead(runner: HostRunner | DeviceRunner, turns: int) -> list[tuple[list[int], list[list[int]]]]:
    """The tokens and guesses of steps in which two prompts are computed in chunks, of which the longer one
    then verifies its guesses and a token more, and the other decodes."""
    rng, said = random.Random(3), list[RunResult]()
    drafts: list[int] = []
    known = [rng.choices(range(MODEL.vocab), k=length) for length in (9, 3)]
    asked = [SamplingParams(seed=slot, max_tokens=40, temperature=slot / 2) for slot in range(2)]
    seated = [SlotAssignment.of(slot, own, len(own), asked[slot]) for slot, own in enumerate(known)]
    pages = [(slot, [2 * slot, 2 * slot + 1]) for slot in range(2)]

    def run(slots: list[int], starts: list[int], lengths: list[int], wants: list[Want], **rest: Any) -> None:
        own_seated, own_pages = ([], []) if said else (seated, pages)
        plan = Plan(len(said), [], own_seated, own_pages, slots, starts, lengths, wants, **rest)
        said.append(runner.run(plan))

    run([0], [0], [5], [Want.NOTHING])
    run([1, 0], [0, 5], [3, 4], [Want.SAMPLE] * 2, guesses=[1, 3])
    for turn in range(turns):
        sampled, (guessed, *_) = said[-1].tokens, said[-1].guesses[::-1]
        known[1].append(sampled[0])
        row, right = sampled[1:], 0
        if turn:
            right = agreed(drafts, row)
        known[0] += row[: right + 1]
        drafts = [*guessed, turn]
        starts, lengths = [len(known[1]) - 1, len(known[0]) - 1], [1, len(drafts) + 1]
        wants = [Want.SAMPLE, Want.VERIFY]
        run([1, 0], starts, lengths, wants, drafts=[drafts], guesses=[turn % 3, 2])
    return [(each.tokens, each.guesses) for each in said]
