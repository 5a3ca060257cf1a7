"""A model's matrix multiplications made as fast as they get on the card, before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from engine.runtime.hardware import usable_cores
from engine.runtime.kernels.autotune import DeviceLinear, MatmulTable, Timer, once
from engine.runtime.kernels.launching import compiling_in


def tuned(linears: Sequence[DeviceLinear], timer: Timer, card: torch.device) -> MatmulTable:
    """In bfloat16. As at an engine's start, all candidates are compiled before one is measured, and by all
    cores."""
    with ThreadPoolExecutor(usable_cores()) as workers, compiling_in(workers, card):
        MatmulTable.fill(linears, torch.bfloat16, once)
    return MatmulTable.fill(linears, torch.bfloat16, timer)
