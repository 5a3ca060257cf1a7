"""The place of this process among ranks that somebody else started: torchrun, a LeaderWorkerSet, or a shell.

Such a runner starts every rank by the same command line and tells each its place in the environment, by the
variables that torchrun sets. Rank 0 serves. The others execute what it tells them and end when it does.

    RANK, WORLD_SIZE              this rank's number, and how many there are, on all machines together
    MASTER_ADDR, MASTER_PORT      where rank 0 listens, so that the others find it
    LOCAL_RANK, LOCAL_WORLD_SIZE  the same two numbers on this machine: its card, and its share of the cores.
                                  Without them a machine has one rank

Without RANK and WORLD_SIZE the engine starts its ranks itself, on this machine. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from shared.process.setting_values import ConfigError

PORT_MAX: Final = 65535
ADDRESS_LEN_MAX: Final = 253
"""Characters of a host's name, as DNS has them."""
NEEDS: Final = {"MASTER_PORT": "where WORLD_SIZE is more than 1"}
NEEDED: Final = "as RANK and WORLD_SIZE must be together"
_COUNT_LEN_MAX: Final = 6
_AGENT: Final = "TORCHELASTIC_USE_AGENT_STORE"
_RESTARTS: Final = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """One rank's place."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    """Rank 0's host, by name or number."""
    port: int
    is_hosted: bool = False
    """True if the runner itself serves the store at `port`, as torchrun's agent does. Else rank 0 does."""
    attempt: int = 0
    """The number of times that the runner has started the ranks anew: a store that it serves outlives
    them."""


def rendezvous_in(env: Mapping[str, str], tensor_parallel_size: int) -> Rendezvous | None:
    """The place that the environment gives to this process; None where it gives none, or the process is
    alone. Raises ConfigError, which names each variable that is wrong."""
    given = {name: value for name, value in env.items() if value}
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return None
    found = _Numbers(given)
    world_size = found.number("WORLD_SIZE", 1, None)
    rank = found.number("RANK", 0, None)
    local_world_size = found.number("LOCAL_WORLD_SIZE", 1, 1)
    local_rank = found.number("LOCAL_RANK", 0, 0)
    port = found.number("MASTER_PORT", 1, None) if world_size != 1 else 0
    attempt = found.number(_RESTARTS, 0, 0)
    address = given.get("MASTER_ADDR", "")
    problems = found.problems or [
        *_contradictions(rank, world_size, local_rank, local_world_size, tensor_parallel_size),
        *_misplaced(address, port, world_size),
    ]
    if problems:
        raise ConfigError(problems)
    if world_size == 1:
        return None
    return Rendezvous(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        address=address,
        port=port,
        is_hosted=given.get(_AGENT) == "True",
        attempt=attempt,
    )


class _Numbers:
    """Reads whole numbers, and collects what is wrong with them."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self.problems: list[str] = []

    def number(self, name: str, least: int, default: int | None) -> int:
        """The variable's value. `default`: None where it must be set."""
        text = self._env.get(name)
        if text is None:
            if default is None:
                self.problems.append(f"{name}: must be set, {NEEDS.get(name, NEEDED)}")
            return least if default is None else default
        if not (text.isascii() and text.isdecimal() and len(text) <= _COUNT_LEN_MAX and int(text) >= least):
            self.problems.append(f"{name}: must be a whole number from {least}, got {text[:40]!r}")
            return least
        return int(text)


def _contradictions(
    rank: int, world_size: int, local_rank: int, local_world_size: int, tensor_parallel_size: int
) -> Iterator[str]:
    if world_size != tensor_parallel_size:
        yield (
            f"WORLD_SIZE: must be --tensor-parallel-size, which is {tensor_parallel_size}, got {world_size}"
        )
    if rank >= world_size:
        yield f"RANK: must be below WORLD_SIZE, which is {world_size}, got {rank}"
    if local_world_size > world_size:
        yield f"LOCAL_WORLD_SIZE: must be at most WORLD_SIZE, which is {world_size}, got {local_world_size}"
    if local_rank >= local_world_size:
        yield f"LOCAL_RANK: must be below LOCAL_WORLD_SIZE, which is {local_world_size}, got {local_rank}"


def _misplaced(address: str, port: int, world_size: int) -> Iterator[str]:
    if world_size == 1:
        return
    if not address:
        yield "MASTER_ADDR: must be set, to the host of rank 0"
    elif len(address) > ADDRESS_LEN_MAX or not address.isascii() or not address.isprintable():
        yield f"MASTER_ADDR: must be a host's name or number, got {address[:40]!r}"
    if port > PORT_MAX:
        yield f"MASTER_PORT: must be at most {PORT_MAX}, got {port}"
