"""A `Collective` of several processes, over torch's gloo or NCCL.

Both reduce each element in one place and copy it, which is why all ranks have the same bits. Where there are
more than two, gloo adds up different parts of a tensor in different orders, so there every rank adds up by
itself, in the ranks' order: a token's bits must not depend on its place in a step. Both are driven directly,
without torch.distributed's process-global group. Ranks that rank 0 started find each other by a file and talk
over the loopback interface (NCCL's data go from device to device). Ranks on several machines have a
`Meeting`. The libraries' own deadlines are not used: rank 0's watch ends a rank that waits for a dead one
long before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor

from engine.runtime.collective.shard import Shard
from engine.runtime.setup.model_errors import CollectiveFailed

RENDEZVOUS_DEADLINE: Final = timedelta(seconds=60)
"""The time in which ranks, all of which have started, find each other."""
NEVER: Final = timedelta(days=1)
LOOPBACK: Final = "lo"
_c10d: Final[Any] = torch._C._distributed_c10d
"""The parts of which torch.distributed builds its process-global group. The module is private: a release of
torch that lacks any of it fails the group, by its name."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The way to the other ranks where these are on several machines."""

    store: Any
    """torch's store, the same for all ranks."""
    address: str
    """This machine's address, as a number, at which the other machines reach it."""
    local_rank: int
    """This rank's number among those of this machine."""
    neighbours: int
    """The ranks of this machine."""


class Group:
    """A `Collective` over gloo where tensors are on the CPU, over NCCL on a GPU.

    NCCL's calls are put on the current stream and can be part of a CUDA graph, once the same group has been
    used outside of one.
    """

    def __init__(
        self, shard: Shard, store_file: str, device: torch.device, meeting: Meeting | None = None
    ) -> None:
        """Waits for the other ranks. `store_file`: the file by which they find each other, the same for all,
        unless there is a `meeting`. `device`: a CPU, or this rank's own card. Raises CollectiveFailed."""
        self.shard: Final = shard
        self.device: Final = device
        self.neighbours: Final = shard.size if meeting is None else meeting.neighbours
        with _translated():
            store = _c10d.FileStore(store_file, shard.size) if meeting is None else meeting.store
            store.set_timeout(RENDEZVOUS_DEADLINE)
            address = None if meeting is None else meeting.address
            is_cuda = device.type == "cuda"
            self._backend: Any = (
                _nccl(shard, store, device, address) if is_cuda else _gloo(shard, store, address)
            )
        self._reduce: Any = _c10d.AllreduceOptions()
        self._gather: Any = _c10d.AllgatherOptions()
        for options in (self._reduce, self._gather):
            options.timeout = NEVER
            options.asyncOp = False

    def all_reduce_(self, x: Tensor) -> Tensor:
        if self.shard.size > 2 and self.device.type == "cpu":
            return x.copy_(_in_order(self._parts(x)))
        with _translated():
            _done(self._backend.allreduce([x], self._reduce))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return self._parts(x).movedim(0, 1).flatten(1)

    def _parts(self, x: Tensor) -> Tensor:
        """The parts of all ranks, [size, *x's shape]."""
        parts = x.new_empty(self.shard.size * len(x), *x.shape[1:])
        with _translated():
            _done(self._backend._allgather_base(parts, x.contiguous(), self._gather))
        return parts.view(self.shard.size, *x.shape)


def _in_order(parts: Tensor) -> Tensor:
    """The sum over the ranks, in their order, in float32."""
    total = parts[0].to(torch.float32, copy=True)
    for other in parts[1:]:
        total += other
    return total


def _done(work: Any) -> None:
    """Waits for what gloo began. NCCL, asked for no handle (`asyncOp`), has put the call on the current
    stream and gives none."""
    if work is not None:
        work.wait()


def _gloo(shard: Shard, store: Any, address: str | None) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    create = _c10d.ProcessGroupGloo.create_device
    options._devices = [create(interface=LOOPBACK) if address is None else create(hostname=address)]
    options._timeout = RENDEZVOUS_DEADLINE
    return _c10d.ProcessGroupGloo(store, shard.rank, shard.size, options)


def _nccl(shard: Shard, store: Any, device: torch.device, address: str | None) -> Any:
    if address is None:
        os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK  # all ranks are processes of this machine
    backend = _c10d.ProcessGroupNCCL(store, shard.rank, shard.size, _c10d.ProcessGroupNCCL.Options())
    backend.eager_connect_single_device(device)
    return backend


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's DistError and its kin among them
        raise CollectiveFailed(" ".join(str(error).split())) from error
    except (AttributeError, TypeError) as error:
        raise CollectiveFailed(f"torch {torch.__version__} is not as expected: {error}") from error
