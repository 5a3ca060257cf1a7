"""What goes to a device in one copy, and what comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.runtime.device.transfer import ALIGNMENT, DeviceArrival, download, upload

CPU = torch.device("cpu")


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
