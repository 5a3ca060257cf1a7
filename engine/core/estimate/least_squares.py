"""Weighted least squares without negative weights, solved again and again as the evidence changes.

Given normal equations `A w = b` (A is the sum of x x^T over the rows x, b that of x y), the weights are
those that minimise

    sum of (x w - y)^2  +  DAMPING * sum of A_ii (w_i - last_i)^2,    all w_i >= 0

which is a step of the proximal point method from the last solution (Rockafellar, 1976). What the
equations determine is found in a few steps; where they say little or nothing, the last solution stands.
Coordinate descent needs no elimination, but where features hardly vary apart from each other, as those
of a step's decodes do, it takes thousands of sweeps, and until then one weight stands for another.

A weight that comes out negative is set to zero and the others are found again without it. The next
solution begins with all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import Final

DAMPING: Final = 1e-3
NEGLIGIBLE: Final = 1e-6
"""The root of a feature's summed squares up to which it counts as never seen."""


def nonnegative(equations: Sequence[Sequence[float]], last: Sequence[float]) -> list[float]:
    """The weights; row i of `equations` is row i of A followed by b_i. A feature that was never seen keeps
    its last weight."""
    scales = [math.sqrt(row[i]) for i, row in enumerate(equations)]
    weights = list(last)
    free = [i for i, scale in enumerate(scales) if scale > NEGLIGIBLE]
    held = [i for i, scale in enumerate(scales) if scale <= NEGLIGIBLE]
    while free:
        system: list[list[float]] = []
        for i in free:  # scaled so that A has ones on its diagonal
            *row, right = equations[i]
            right -= sum([row[j] * weights[j] for j in held])
            left = [row[j] / (scales[i] * scales[j]) for j in free]
            left[len(system)] += DAMPING
            system.append([*left, right / scales[i] + DAMPING * scales[i] * last[i]])
        solution = eliminate(system)
        for i, scaled in zip(free, solution, strict=True):
            weights[i] = max(0.0, scaled / scales[i])
        if min(solution) >= 0.0:
            break
        free = [i for i in free if weights[i] > 0.0]
    return weights


def eliminate(system: list[list[float]]) -> list[float]:
    """The solution of a linear system: rows of a positive definite matrix, each followed by its right side.
    Destroys `system`."""
    for i, pivot in enumerate(system):
        for row in system[i + 1 :]:
            factor = row[i] / pivot[i]
            row[i:] = [value - factor * other for value, other in zip(row[i:], pivot[i:], strict=True)]
    solution: list[float] = []
    for i in reversed(range(len(system))):
        *row, right = system[i]
        solution.insert(0, (right - sum(map(mul, row[i + 1 :], solution))) / row[i])
    return solution
