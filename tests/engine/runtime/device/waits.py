"""What makes a host wait for a device, forbidden. Where both are a CPU nothing waits; what would is known."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
VALUE_DEPENDENT = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten.bincount,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
}
"""Operations whose result the host has to know before it can go on."""
READS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
INTERPRETER = "triton."
"""It plays the device, and may look at what is on it."""


class _Forbid(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        masks = func.overloadpacket is aten.index and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if (masks or func.overloadpacket in VALUE_DEPENDENT) and not _in_interpreter():
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def _in_interpreter() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(INTERPRETER):
            return True
        frame = frame.f_back
    return False


def _guarded(name: str) -> Callable[..., Any]:
    read = getattr(Tensor, name)

    def guard(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert _in_interpreter(), f"Tensor.{name} waits for the device"
        return read(self, *args, **kwargs)

    return guard


@contextmanager
def no_waits() -> Iterator[None]:
    """Raises AssertionError from whatever reads a tensor's values, or has a size that depends on them."""
    guards: dict[str, Any] = {name: _guarded(name) for name in READS}
    with patch.multiple(Tensor, **guards), _Forbid():  # type: ignore[no-untyped-call]  # torch has no type for it
        yield
