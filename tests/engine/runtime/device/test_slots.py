"""The tables on the device follow the plans, and little is sent for it: in one copy each way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.contract.messages import Plan, SamplingParams, SlotAssignment, Want
from engine.contract.packing import Biases
from engine.runtime.device import device_sampling
from engine.runtime.device import slots as module
from engine.runtime.device.slots import DeviceBatch, DeviceSlots
from engine.runtime.device.transfer import ALIGNMENT, DeviceArrival, download, upload

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


# -- drafts ---------------------------------------------------------------------------------------

VERIFY: dict[str, Any] = {
    "slots": [3, 0, 2, 1],
    "positions": [1, 2, 4, 0],
    "lengths": [1, 3, 2, 4],
    "wants": [Want.SAMPLE, Want.VERIFY, Want.VERIFY, Want.SAMPLE],
    "drafts": [[40, 41], [42]],
}
"""A decode, rows that verify two drafts and one, and a prompt."""


def verifying(own: DeviceSlots) -> None:
    known = {0: [7, 8, 9], 1: [1, 2, 3, 4], 2: [5] * 5, 3: [9, 8]}
    seated = [start(slot, ids, 2, frequency_penalty=slot / 2) for slot, ids in known.items()]
    own.apply(plan(seated=seated, grown=[(slot, [slot + 10]) for slot in known]))


def test_a_batch_with_drafts_is_gathered_from_one_copy_beside_that_of_the_drafts(uploads: list[int]) -> None:
    own = slots()
    verifying(own)
    uploads.clear()
    step = plan(**VERIFY)
    own.apply(step)
    batch = DeviceBatch.of(step, own)
    assert own.tokens[0, :5].tolist() == [7, 8, 9, 40, 41]
    assert own.tokens[2, :6].tolist() == [5] * 5 + [42]
    assert batch.token_ids.tolist() == [8, 9, 40, 41, 5, 42, 1, 2, 3, 4]
    assert batch.positions.tolist() == [1, 2, 3, 4, 4, 5, 0, 1, 2, 3]
    assert batch.sampled_at.tolist() == [0, 1, 2, 3, 4, 5, 9]
    assert batch.sampled_slots.tolist() == [3, 0, 0, 0, 2, 2, 1]
    assert batch.sampled_lengths.tolist() == [2, 3, 4, 5, 5, 6, 4]
    assert batch.stream_lengths.tolist() == [2, 3, 4, 5, 5, 6]
    assert batch.token_tables[:6, 0].tolist() == [13, 10, 10, 10, 12, 12]
    assert batch.ahead is not None
    assert batch.ahead.before.tolist() == [0, 0, 1, 2, 0, 1, 0]
    assert batch.ahead.behind.tolist() == [0, 2, 1, 0, 1, 0, 0]
    assert batch.ahead.masked_by.tolist() == [-1] * 7
    assert (batch.ahead.most, batch.is_decode, batch.stream_tokens) == (3, False, 6)
    assert len(uploads) == 2


def test_streams_alone_have_a_row_for_each_token() -> None:
    own = slots()
    verifying(own)
    step = plan(**{name: column[:3] if name != "drafts" else column for name, column in VERIFY.items()})
    own.apply(step)
    batch = DeviceBatch.of(step, own)
    assert batch.is_decode
    assert batch.streams == ([3, 0, 0, 0, 2, 2], [2, 3, 4, 5, 5, 6])


def test_where_the_next_row_begins_says_how_many_drafts_were_right() -> None:
    own = slots()
    verifying(own)
    step = plan(**VERIFY)
    own.apply(step)
    own.extend(step)
    assert [own.seat(slot).known_len for slot in range(4)] == [3, 5, 5, 3]
    rows = {"slots": [0, 2], "positions": [4, 5], "lengths": [1, 1], "wants": [Want.SAMPLE] * 2}
    own.apply(plan(**rows))
    assert [own.seat(slot).known_len for slot in (0, 2)] == [5, 6], "one right of two, and one of one"
    own.extend(step)
    rows["positions"] = [8, 7]
    with pytest.raises(AssertionError, match="slot 0: 9 tokens known"):
        own.apply(plan(**rows))


def test_an_heir_does_not_learn_from_the_drafts_before() -> None:
    own = slots()
    verifying(own)
    step = plan(**VERIFY)
    own.apply(step)
    own.extend(step)
    rows = {"slots": [0], "positions": [0], "lengths": [2], "wants": [Want.SAMPLE]}
    own.apply(plan(left=[0], seated=[start(0, [1, 2], 2)], grown=[(0, [9])], **rows))
    assert own.seat(0).known_len == 2


def test_masks_behind_drafts_lie_behind_those_of_all_slots(uploads: list[int]) -> None:
    own = DeviceSlots(4, 64, 16, 50, PADDING_PAGE, CPU, drafts=3)
    verifying(own)
    uploads.clear()
    masks = [b"", b"\x01\0\0\0", b"\x02\0\0\0", b"", b"", b"", b"\x04\0\0\0"]
    step = plan(**VERIFY, masks=masks)
    own.apply(step)
    assert uploads == [2, 2]
    assert own.masked_by == [-1, 0, 5, -1, -1, -1, 1]
    assert [own.sampling.masks[place, 0].item() for place in (0, 5, 1)] == [1, 2, 4]
    assert own.sampling.are_masked.tolist() == [1, 1, 0, 0, 0]
    ahead = DeviceBatch.of(step, own).ahead
    assert ahead is not None
    assert ahead.masked_by.tolist() == own.masked_by


def test_shapes_types_and_values_arrive() -> None:
    arrays: list[NDArray[Any]] = [
        np.array([[1, -2, 3]], np.int32),
        np.array([], np.int64),
        np.array([2**63 - 1, -(2**63)], np.int64),
        np.array([[0.5], [1e-9]], np.float64),
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
    ]
    found = upload(arrays, CPU)
    for array, tensor in zip(arrays, found, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array.copy()))
        assert tensor.data_ptr() % ALIGNMENT == 0 or not len(tensor)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1, "one copy"


def test_every_upload_has_memory_of_its_own() -> None:
    """What an earlier step sent is left alone by later ones."""
    first = upload([np.array([1, 2])], CPU)[0]
    for value in range(5):
        upload([np.array([value, value])], CPU)
    assert first.tolist() == [1, 2]


def test_what_comes_back_is_a_copy() -> None:
    on_device = torch.tensor([1, 2])
    host, arrival = download(on_device), DeviceArrival.on(CPU)
    on_device.zero_()
    arrival.wait()
    assert host.tolist() == [1, 2]
