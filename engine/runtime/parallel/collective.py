"""What ranks do together: add up, and put together.

Every rank calls the same methods in the same order with tensors of the same shapes; a call returns once the
result may be used by what is launched after it. The result has the same bits on every rank: so ranks that
sample by it agree.
"""

from __future__ import annotations

from typing import Final, Protocol

from torch import Tensor

from engine.runtime.parallel.shard import WHOLE, Shard


class Collective(Protocol):
    @property
    def shard(self) -> Shard:
        """Which rank this is, of how many."""
        ...

    def all_reduce_(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place. Raises CollectiveFailed."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[S, n] -> [S, size * n], ranks in order. Raises CollectiveFailed."""
        ...


class Alone:
    """One rank: nothing to do."""

    shard: Final = WHOLE

    def all_reduce_(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


ALONE: Final = Alone()
