"""Chooses a model's fastest matrix multiplications on the card, before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from engine.runtime.kernels.autotune import DeviceLinear, MatmulTable, Pair, Timer, once
from engine.runtime.kernels.folding import fold_norms
from engine.runtime.kernels.launching import compiling_in
from engine.runtime.setup.hardware import usable_cores


def tuned(
    linears: Sequence[DeviceLinear], timer: Timer, card: torch.device, pairs: Sequence[Pair] = ()
) -> MatmulTable:
    """The table of fastest kernels, for bfloat16. As at an engine's start, all candidates are compiled by all
    cores before any is measured."""
    with ThreadPoolExecutor(usable_cores()) as workers, compiling_in(workers, card):
        _filled(linears, once, pairs)
    return _filled(linears, timer, pairs)


def _filled(linears: Sequence[DeviceLinear], timer: Timer, pairs: Sequence[Pair]) -> MatmulTable:
    table = MatmulTable.fill(linears, torch.bfloat16, timer)
    return fold_norms(table, pairs, torch.bfloat16, timer)
