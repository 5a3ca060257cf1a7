"""What an agent is asked to do: read a file, change a number in it, run it, and say what it printed.

The number that it prints is in no prompt before the agent has run the changed file, so an answer that has it
is one of which every step was done. A task has two orders, the second for a process of its own.
"""

from __future__ import annotations

import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

FILE: Final = "ledger.py"
ENTRIES: Final = 12
FACTORS: Final = (17, 23, 31)
SEED: Final = 20261129

ORDER: Final = re.compile(
    r"Read the file (\S+) and change its FACTOR from (\d+) to (\d+)\. Then run: (.+?) Then tell me"
)
TOTAL: Final = re.compile(r"ledger sum: (\d+)")


class Order(NamedTuple):
    """One order of a session, as `ORDER` finds it in a prompt."""

    path: str
    old: int
    new: int
    command: str

    @property
    def text(self) -> str:
        return (
            f"Read the file {self.path} and change its FACTOR from {self.old} to {self.new}. "
            f"Then run: {self.command} Then tell me in one sentence which sum it printed."
        )


class Task(NamedTuple):
    """A folder for an agent to work in."""

    folder: Path
    pause_s: int = 0
    """The time that the command waits before it runs the file."""

    @property
    def file(self) -> Path:
        return self.folder / FILE

    @property
    def orders(self) -> tuple[Order, ...]:
        wait = f"sleep {self.pause_s} && " if self.pause_s else ""
        command = f"{wait}python3 {self.file}"
        return tuple(Order(str(self.file), old, new, command) for old, new in pairwise(FACTORS))

    def prepare(self) -> None:
        """Write the file that is to be changed."""
        self.file.write_text(source(FACTORS[0]))

    def is_done(self, order: Order, printed: str) -> bool:
        """Whether the file is as the order wants it, and the agent printed the answer that has the total."""
        return self.file.read_text() == source(order.new) and told(total(order.new)) in printed


def told(sum_: int | str) -> str:
    """The text of an order's last answer."""
    return f"The sum that it printed is {sum_}."


def entries() -> list[tuple[str, int]]:
    chance = random.Random(SEED)
    return [(f"{chance.choice(_WARES)} {number}", chance.randrange(10, 1000)) for number in range(ENTRIES)]


_WARES: Final = ("valve", "turbine blade", "gate", "bearing", "cable drum", "pump", "trash rack", "spindle")


def source(factor: int) -> str:
    """The file's text. It has no total in it."""
    lines = "\n".join(f"    ({ware!r}, {price})," for ware, price in entries())
    return (
        f'"""What is in store, and what it costs."""\n\nFACTOR = {factor}\nENTRIES = [\n{lines}\n]\n\n'
        'print("ledger sum:", sum(FACTOR * price for _, price in ENTRIES))\n'
    )


def total(factor: int) -> int:
    return sum(factor * price for _, price in entries())
