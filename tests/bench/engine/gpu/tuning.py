"""Chooses a model's fastest matrix multiplications on the card, before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from engine.runtime.kernels.autotune import DeviceLinear, MatmulTable, Timer, once
from engine.runtime.kernels.launching import compiling_in
from engine.runtime.setup.hardware import usable_cores


def tuned(linears: Sequence[DeviceLinear], timer: Timer, card: torch.device) -> MatmulTable:
    """The table of fastest kernels, for bfloat16. As at an engine's start, all candidates are compiled by all
    cores before any is measured."""
    with ThreadPoolExecutor(usable_cores()) as workers, compiling_in(workers, card):
        MatmulTable.fill(linears, torch.bfloat16, once)
    return MatmulTable.fill(linears, torch.bfloat16, timer)
