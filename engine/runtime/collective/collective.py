"""The operations that ranks do together: sums, and gathered columns.

Every rank calls the same methods in the same order with tensors of the same shapes; a call returns once the
result may be used by what is launched after it. The result has the same bits on every rank: so ranks that
sample from it agree.
"""

from __future__ import annotations

from typing import Final, Protocol

from torch import Tensor

from engine.runtime.collective.shard import WHOLE, Shard


class Collective(Protocol):
    """One rank's end of the operations that all ranks do together."""

    @property
    def shard(self) -> Shard:
        """This rank's part of the model: its number, and the number of ranks."""
        ...

    @property
    def neighbours(self) -> int:
        """The ranks that share this machine's cores and memory, this one included."""
        ...

    def all_reduce_(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place. Raises CollectiveFailed."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """The columns of all ranks side by side, in order: x [S, n] -> [S, size * n]. Raises
        CollectiveFailed."""
        ...


class Alone:
    """The `Collective` of a single rank, which has nothing to do, or of one that does not talk to the
    others."""

    def __init__(self, shard: Shard = WHOLE) -> None:
        self.shard: Final = shard
        self.neighbours: Final = shard.size

    def all_reduce_(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x if self.shard == WHOLE else x.repeat(1, self.shard.size)


ALONE: Final = Alone()
