"""One shape for every benchmark's output.

A figure is `name value unit target ok`. Piped, figures are JSON lines, one each; on a terminal they are a
table. `ok` is null where there is no target. `value` and `ok` are null where nothing was measured, which is
shown as such and is no failure.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Literal, TextIO

import msgspec


class Target(msgspec.Struct, frozen=True):
    relation: Literal["<=", ">="]
    bound: float

    def met_by(self, value: float) -> bool:
        return value <= self.bound if self.relation == "<=" else value >= self.bound

    def __str__(self) -> str:
        return f"{self.relation} {self.bound:g}"


class Figure(msgspec.Struct, frozen=True):
    name: str
    value: float | None
    unit: str
    target: str | None
    ok: bool | None


def figure(name: str, value: float, unit: str, target: Target | None = None) -> Figure:
    rounded = float(f"{value:.4g}")
    if target is None:
        return Figure(name, rounded, unit, None, None)
    return Figure(name, rounded, unit, str(target), target.met_by(value))


def unmeasured(name: str, unit: str, target: Target | None = None) -> Figure:
    return Figure(name, None, unit, None if target is None else str(target), None)


def at_most(bound: float) -> Target:
    return Target("<=", bound)


def at_least(bound: float) -> Target:
    return Target(">=", bound)


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile by nearest rank. NaN without values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def write(figures: Iterable[Figure], out: TextIO | None = None, *, as_json: bool | None = None) -> None:
    """Print figures: JSON lines, or a table when `out` is a terminal and JSON was not asked for."""
    out = sys.stdout if out is None else out
    if as_json is None:
        as_json = not out.isatty()
    if as_json:
        for item in figures:
            out.write(msgspec.json.encode(item).decode() + "\n")
        return
    rows = [(f.name, _shown(f.value), f.unit, f.target or "", _MARK[f.ok]) for f in figures]
    header = ("figure", "value", "unit", "target", "")
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for name, value, unit, target, mark in [header, *rows]:
        line = (
            f"{name:<{widths[0]}}  {value:>{widths[1]}}  {unit:<{widths[2]}}  {target:<{widths[3]}}  {mark}"
        )
        out.write(line.rstrip() + "\n")


def _shown(value: float | None) -> str:
    return "not measured" if value is None else f"{value:g}"


_MARK = {None: "", True: "ok", False: "FALLS SHORT"}


def exit_code(figures: Iterable[Figure], *, check: bool) -> int:
    """The process's exit code: with `check`, 1 when a figure falls short of its target, else 0."""
    return 1 if check and any(item.ok is False for item in figures) else 0
