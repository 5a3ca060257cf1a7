"""The tables on the device follow the plans, and little is sent for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.contract.messages import Plan, SamplingParams, SlotAssignment, Want
from engine.contract.packing import Biases
from engine.runtime.device import device_sampling
from engine.runtime.device import slots as module
from engine.runtime.device.slots import DeviceBatch, DeviceSlots
from engine.runtime.device.transfer import upload

CPU = torch.device("cpu")
PADDING_PAGE = 40


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many arrays each copy to the device held."""
    seen: list[int] = []

    def counted(arrays: Any, device: torch.device) -> Any:
        seen.append(len(arrays))
        return upload(arrays, device)

    for place in (module, device_sampling):
        monkeypatch.setattr(place, "upload", counted)
    return seen


def start(slot: int, ids: list[int], prompt_len: int, **asked: Any) -> SlotAssignment:
    return SlotAssignment.of(slot, ids, prompt_len, SamplingParams(**{"seed": slot, "max_tokens": 9} | asked))


def plan(**changes: Any) -> Plan:
    nothing: dict[str, Any] = {name: [] for name in Plan.__struct_fields__ if name != "step"}
    return Plan(**{"step": 0} | nothing | changes)


def slots() -> DeviceSlots:
    return DeviceSlots(4, 64, 16, 50, PADDING_PAGE, CPU)


def test_a_plan_of_many_is_as_few_copies_as_a_plan_of_one(uploads: list[int]) -> None:
    own = slots()
    own.apply(plan(seated=[start(0, [7, 8, 9], 3)], grown=[(0, [5])]))
    one = len(uploads)
    uploads.clear()
    seated = [start(slot, [slot, 20 + slot], 2, temperature=slot / 2, top_k=slot) for slot in (1, 2, 3)]
    own.apply(plan(seated=seated, grown=[(slot, [slot + 10, slot + 20]) for slot in (1, 2, 3)]))
    assert len(uploads) == one == 3  # tokens, parameters, pages
    assert own.tokens[:4, :3].tolist() == [[7, 8, 9], [1, 21, 0], [2, 22, 0], [3, 23, 0]]
    assert own.page_table[:4, :2].tolist() == [[5, 0], [11, 21], [12, 22], [13, 23]]
    assert own.sampling.temperature.tolist()[1:4] == [0.5, 1.0, 1.5]
    assert own.sampling.top_k.tolist()[:4] == [50, 1, 2, 3]
    uploads.clear()
    own.apply(plan(grown=[(1, [30]), (3, [31])]))
    assert uploads == [2]
    uploads.clear()
    own.apply(plan(left=[0]))
    assert not uploads


def test_an_heir_has_nothing_of_the_one_before() -> None:
    """Counts, biases and held stop tokens are the new one's own."""
    own = slots()
    greedy = {
        "frequency_penalty": 1.0,
        "logit_bias": Biases.of(((3, 2.0), (4, 1.0))),
        "stop_token_ids": (5, 6),
    }
    own.apply(plan(seated=[start(1, [3, 3, 4, 7], 2, min_tokens=4, **greedy)]))
    columns = own.sampling
    assert columns.counts[1].nonzero().tolist() == [[0, 4], [0, 7], [1, 3]]
    assert columns.counts[1, 1, 3] == 2
    found = columns.biases[1].item(), columns.stops[1].item(), columns.held_until[1].item()
    assert found == (2, 2, 2 + 4)
    assert columns.bias_ids[1, :2].tolist() == [3, 4]
    own.apply(plan(left=[1], seated=[start(1, [8], 1, presence_penalty=0.5)]))
    assert columns.counts[1].nonzero().tolist() == [[1, 8]]
    assert (columns.biases[1].item(), columns.stops[1].item()) == (0, 0)
    assert columns.penalties[1].tolist() == [1.0, 0.0, 0.5]


def test_a_batch_is_gathered_from_one_copy(uploads: list[int]) -> None:
    own = slots()
    ids = list(range(30, 50))
    own.apply(plan(seated=[start(0, ids, 20), start(3, [9, 8], 2)], grown=[(0, [6, 2]), (3, [4])]))
    uploads.clear()
    rows = {"slots": [3, 0], "positions": [1, 14], "lengths": [1, 6], "wants": [Want.SAMPLE] * 2}
    batch = DeviceBatch.of(plan(**rows), own)
    assert batch.token_ids.tolist() == [8, *ids[14:20]]
    assert batch.positions.tolist() == [1, *range(14, 20)]
    assert batch.places.pages.tolist() == [4, 6, 6, 2, 2, 2, 2]
    assert batch.places.offsets.tolist() == [1, 14, 15, 0, 1, 2, 3]
    assert batch.page_tables[:, :2].tolist() == [[4, 0], [6, 2]]
    assert (batch.sampled_at.tolist(), batch.sampled_slots.tolist()) == ([0, 6], [3, 0])
    assert batch.sampled_lengths.tolist() == [2, 20]
    assert len(uploads) == 1
    assert not batch.is_decode


def test_masks_are_sent_for_the_rows_that_have_one_and_an_heir_has_none(uploads: list[int]) -> None:
    own = slots()
    rows = {"slots": [2, 0, 3], "positions": [1, 0, 0], "lengths": [1, 1, 1]}
    wants = [Want.SAMPLE, Want.NOTHING, Want.SAMPLE]
    seated = [start(slot, [1, 2], 2) for slot in (0, 2, 3)]
    own.apply(plan(seated=seated))
    uploads.clear()
    masks = [bytes([5, 0, 0, 128, 1, 0, 0, 0]), b""]
    own.apply(plan(**rows, wants=wants, masks=masks))
    assert uploads == [2]
    assert own.sampling.are_masked.tolist() == [0, 0, 1, 0, 0]
    assert own.sampling.masks[2].tolist() == [5 - (1 << 31), 1]
    own.apply(plan(**rows, wants=wants, masks=[b"\x03\0\0\0", b""]))
    assert own.sampling.masks[2].tolist() == [3, 0], "of tokens beyond its end none is allowed"
    own.apply(plan(left=[2, 3], seated=[start(2, [1], 1), start(3, [1], 1)]))
    assert own.sampling.are_masked.tolist() == [0] * 5
