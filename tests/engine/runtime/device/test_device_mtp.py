"""Drafts by Qwen3.5's own MTP layer in the kernels of a device: what torch guesses on a CPU."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.contract.messages import SamplingParams
from engine.core.estimate.cost import StepCost
from engine.core.queue.newcomers import AddSequence
from engine.core.scheduler import Scheduler
from engine.runtime.device import device_decoder
from engine.runtime.device.device_mtp import DeviceMtp
from tests.bench.engine.core_window import draft_by, in_slot
from tests.engine.core.harness import knowing
from tests.engine.runtime.conftest import load
from tests.engine.runtime.device.card import FakeCard, load_fake
from tests.engine.runtime.device.test_with_scheduler import COMPANY, CONFIG, Unwaiting, seen
from tests.engine.runtime.guessing import MODEL, guessing_model, lead
from tests.engine.runtime.test_mtp import Silent
from tests.engine.runtime.test_oracle import TOLERANCE
from tests.engine.runtime.test_with_scheduler import all_said, serve, serve_overlapped

SETTINGS: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 128}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return guessing_model(tmp_path_factory.mktemp("mtp") / "model")


@pytest.mark.parametrize("way", ["eager", pytest.param("graphs", marks=pytest.mark.nightly)])
def test_it_guesses_what_it_guesses_on_a_cpu(checkpoint: Path, way: str) -> None:
    """Behind chunks, decodes, and rows that verified drafts of which some are right."""
    turns = 1 if way == "eager" else 5
    expected = lead(load(checkpoint, kernels="torch", **SETTINGS), turns)
    heard, card = list[str](), FakeCard()
    settings: dict[str, Any] = SETTINGS | {"max_drafts": 4, "enforce_eager": way == "eager"}
    runner = load_fake(checkpoint, card, heard.append, kv_cache_memory=1 << 20, **settings)
    assert runner.info.guesses_max == 4
    assert "drafting by the model's MTP layer" in heard
    assert any(line.startswith("kernels compiled meanwhile") for line in heard), heard
    assert lead(runner, turns) == expected
    assert {len(own) for _, guesses in expected for own in guesses} >= {0, 1, 2, 3}
    assert bool(card.captured.replays) == (way == "graphs")


def requests() -> list[AddSequence]:
    """Greedy, drawn, penalised, stopped; of a prompt twice."""
    rng, asked = random.Random(11), (*COMPANY, *COMPANY[:2])
    prompts = [rng.choices(range(MODEL.vocab), k=length) for length in (30, 31, 15, 1, 16)]
    added = []
    for handle, (prompt, own) in enumerate(zip([*prompts, prompts[0] + [7, 8]], asked, strict=True)):
        sampling = SamplingParams(**{"seed": handle, "max_tokens": 16, "logprobs": 0} | own)
        added.append(AddSequence(handle, f"req-{handle}", prompt, sampling))
    return added


@pytest.mark.nightly
@pytest.mark.parametrize("right_share", [0.7, 0.0, 1.0, None])
def test_no_token_depends_on_its_guesses(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, right_share: float | None
) -> None:
    """Whatever share of them is right, in a pool in which sequences are preempted and found again; steps
    overlap, and no launch waits. None: as the layer guesses."""
    settings: dict[str, Any] = {"max_num_seqs": 4, "max_step_tokens": 40, "max_model_len": 64}
    added = requests()
    host = load(checkpoint, kernels="torch", max_drafts=0, **settings)
    cost = StepCost(row_s=1e-5, fixed_s=1e-2, page_s=1e-9)
    said = all_said(serve(knowing(Scheduler(CONFIG, seen(host.info, swaps=False)), cost), host, added))
    device = load_fake(checkpoint, kv_cache_memory=1 << 20, max_drafts=4, enforce_eager=True, **settings)
    info = seen(device.info, swaps=False)
    scheduler = knowing(Scheduler(CONFIG, info), cost)
    draft_by(scheduler, lambda _: Silent())
    drafting = scheduler._drafting
    assert drafting is not None
    drafting.host_s = 1e-4
    wholes = {each.handle: [*each.prompt_ids, *said[0][each.handle][:-1]] for each in added}
    rng = random.Random(1)

    def drawn(self: DeviceMtp, hidden: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        found = []
        for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
            whole = wholes[in_slot(scheduler, slot).handle]
            token = int(whole[position]) if position < len(whole) else 0
            found.append(token if rng.random() < (right_share or 0.0) else (token + 1) % MODEL.vocab)
        guesses = torch.tensor(found)
        self.slots.tokens[slots.long(), positions.long()] = guesses.int()
        return guesses

    if right_share is not None:
        monkeypatch.setattr(DeviceMtp, "_drawn", drawn)
    runner = Unwaiting(device) if right_share is None else device
    steps = serve_overlapped(scheduler, runner, added, 0.0)
    tokens, logprobs = all_said(steps)
    assert tokens == said[0]
    for handle, values in said[1].items():
        assert logprobs[handle] == pytest.approx(values, abs=TOLERANCE)
    ends = [end for step in steps for end in step.finished]
    drafted, accepted = (sum(getattr(end, name) for end in ends) for name in ("drafted", "accepted"))
    assert drafted > 4
    assert right_share is None or accepted >= 0.3 * right_share * drafted
    assert right_share != 0.0 or not accepted
    assert steps[-1].stats.preemptions > 0


def test_a_start_says_that_torchs_operations_draft_nothing(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They leave no state behind each token, and compute no MTP layer on a device. It says nothing where none
    was asked for."""
    lacking = device_decoder.IMPLEMENTED - {"deltanet.gate silu"}
    monkeypatch.setattr(device_decoder, "IMPLEMENTED", lacking)
    for drafts in (4, 0):
        heard: list[str] = []
        settings: dict[str, Any] = {"kv_cache_memory": 1 << 20, "max_drafts": drafts, "max_num_seqs": 1}
        runner = load_fake(checkpoint, progress=heard.append, **settings)
        assert runner.mtp is None
        info = runner.info
        assert info.drafts_max == info.drafts_together == info.state_windows == info.guesses_max == 0
        assert not info.verify_shapes
        said = [line for line in heard if "drafts" in line or "MTP" in line]
        assert [line.split(":")[0] for line in said] == ["verifying no drafts"] * bool(drafts)
