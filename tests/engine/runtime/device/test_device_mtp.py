"""Drafts by Qwen3.5's own MTP layer in the kernels of a device: what torch guesses on a CPU."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from engine.contract.messages import Plan, RunResult, SamplingParams, SlotAssignment, Want, agreed
from engine.runtime.device.device_runner import DeviceRunner
from engine.runtime.host.host_runner import HostRunner
from tests.engine.runtime.config_oracle import Weights
from tests.engine.runtime.conftest import load
from tests.engine.runtime.device.card import FakeCard, load_fake
from tests.engine.runtime.test_mtp import mtp_tensors

MODEL = Weights("qwen3_5_text", heads=4, kv_heads=2)
SETTINGS: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 128}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mtp")
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
        changes = ([], seated, pages) if not said else ([], [], [])
        said.append(runner.run(Plan(len(said), *changes, slots, starts, lengths, wants, **rest)))

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


@pytest.mark.parametrize("way", ["eager", "graphs"])
def test_it_guesses_what_it_guesses_on_a_cpu(checkpoint: Path, way: str) -> None:
    """Behind chunks, decodes, and rows that verified drafts of which some are right."""
    expected = lead(load(checkpoint, kernels="torch", **SETTINGS), 4)
    heard, card = list[str](), FakeCard()
    settings: dict[str, Any] = SETTINGS | {"max_drafts": 4, "enforce_eager": way == "eager"}
    runner = load_fake(checkpoint, card, heard.append, kv_cache_memory=1 << 20, **settings)
    assert runner.info.guesses_max == 4
    assert "drafting by the model's MTP layer" in heard
    assert lead(runner, 4) == expected
    assert {len(own) for _, guesses in expected for own in guesses} >= {0, 1, 2, 3}
    assert bool(card.captured.replays) == (way == "graphs")
