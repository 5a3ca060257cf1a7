"""The bench `python -m tests.bench neighbours`: what a tenant notices of another one's attack.

A gateway and an engine on the demo model, with small limits, are attacked in all the ways of
`tests.bench.gateway.attacks`, one after another, while a victim streams and chats
(`tests.bench.gateway.victim`). Before each attack the victim is measured alone. The attack is repeated until
the victim has run enough rounds beside it.

    gap, first token   the victim's p99 beside the attack; its target is 1.5 times the one alone, and 50 ms
    longest block      of each service's event loop, as its metrics tell
    memory             the peak of each process above its memory at rest, as a fraction of
                       `tests.bench.memory_sums`
    charged            tokens that the gateway settled for the attacker, as a fraction of those that steps
                       computed for it: of all without those of the victim, by its answers' usage,
                       and those that the engine names as charged to nobody
    strength           the attack's requests, its answers and the bytes of its bodies, per second: an attacker
                       that is starved shows there

All share the machine, where attacker and victim stand for machines of their own. So the attacker runs only
while a core is idle (`SCHED_IDLE`), which costs it strength and the others nothing; and the services are
`SERVICES_NICE` nicer than the victim, so that it takes note of a token as soon as it has come.
What is left is the services' own: their processes and threads compete for the cores as they would without
attacker and victim, and the kernel's work for the attacker's bytes counts. The engine computes with one
thread.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.process.setting_values import to_toml
from tests.bench.cpu import descendants
from tests.bench.figures import Figure, at_least, at_most, figure, quantile
from tests.bench.gateway.attack import MIB, Attack, Law
from tests.bench.gateway.attackers import RequestOutcome, Sender
from tests.bench.gateway.attacks import ATTACKS
from tests.bench.gateway.neighbourhood import (
    CORE_MEMORY_MAX,
    ENGINE_MEMORY_MAX,
    ENGINE_OPTIONS,
    GATEWAY_MEMORY_MAX,
    STEP_TOKENS,
    forget_peak,
    gateway_config,
    peak_bytes,
    rest_bytes,
)
from tests.bench.gateway.victim import Account, Cost, Victim, VictimFailed
from tests.bench.services import demo_model, free_port, get, service
from tests.bench.streams import BenchFailed

__all__ = ["BenchFailed", "add_arguments", "run"]

TIMES_MAX: Final = 1.5
MORE_MS_MAX: Final = 50.0
"""Added to `TIMES_MAX` times the victim's time alone, it is the target beside an attack, in milliseconds."""
BLOCK_TARGET: Final = at_most(50)
MEMORY_TARGET: Final = at_most(1)
CHARGED_TARGET: Final = at_least(1)
COMPUTED_MIN: Final = 200
"""The fewest computed tokens for which a ratio is told."""
WARM_ROUNDS: Final = 5
ROUNDS: Final = 60
"""Four first tokens in each: with fewer than a hundred in all, their p99 would be the longest of them."""
REPEATS_MAX: Final = 36
SERVICES_NICE: Final = 10
"""The number that is added to the services' nice value."""
REST_POLL_S: Final = 0.02
REST_DEADLINE_S: Final = 60.0
_LAG: Final = "penstock_loop_lag_max_seconds"
_UNCHARGED: Final = "penstock_engine_uncharged_tokens_total{"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # the module's docstring has a list
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WORDS",
        help="attacks with any of these in their names or in the laws that they would break: "
        + "; ".join(Law),
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=ROUNDS,
        help="the victim's rounds of a stream and three chats, each time",
    )


async def run(options: argparse.Namespace) -> list[Figure]:
    attacks = [attack for attack in ATTACKS if _is_wanted(attack, options.only)]
    if not attacks:
        raise BenchFailed(f"no attack has any of {', '.join(options.only)} in its name or its law")
    figures: list[Figure] = []
    async with _house() as house, Sender.started(house.url) as sender:
        await house.warm_up()
        for attack in attacks:
            await sender.prepare(attack)
            try:
                seen = await house.measure(sender, options.rounds)
            except (VictimFailed, EOFError) as error:
                raise BenchFailed(f"beside {attack.name!r}: {error}") from None
            figures += _figures(attack.name, seen)
            sys.stderr.write(f"{attack.name}\n")
    return figures


def _is_wanted(attack: Attack, only: Sequence[str] | None) -> bool:
    return only is None or any(words in f"{attack.law}: {attack.name}" for words in only)


@dataclass(frozen=True, slots=True)
class _Process:
    name: str
    pid: int
    memory_max: int


@dataclass(slots=True)
class _Strength:
    """The requests, answers and bytes of an attacker."""

    requests: int = 0
    answers: int = 0
    sent_len: int = 0
    """Bytes sent of bodies."""
    seconds: float = 0.0

    def add(self, outcomes: Sequence[RequestOutcome], seconds: float) -> None:
        self.requests += len(outcomes)
        self.answers += sum(outcome.status is not None for outcome in outcomes)
        self.sent_len += sum(outcome.sent_len for outcome in outcomes)
        self.seconds += seconds


@dataclass(frozen=True, slots=True)
class _Seen:
    """The effects of one attack."""

    alone: Account
    beside: Account
    blocks_ms: dict[str, float]
    memory: dict[str, float]
    charged: float | None
    """The tokens charged per token computed. None where next to nothing was computed for the attacker."""
    strength: _Strength


@dataclass(frozen=True, slots=True)
class _Reading:
    """The values of a service's metrics, by name with labels."""

    values: dict[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values.get(name, 0.0)


class _House:
    def __init__(self, url: str, metrics_urls: dict[str, str], processes: Sequence[_Process]) -> None:
        self.url = url
        self._metrics_urls = metrics_urls
        self._processes = processes
        self._rest: dict[str, int] = {}
        self._victim = Victim(url)

    async def warm_up(self) -> None:
        await self._victim.alone(WARM_ROUNDS)
        self._rest = {process.name: rest_bytes(process.pid) for process in self._processes}

    async def measure(self, sender: Sender, rounds: int) -> _Seen:
        """Run the attack that the sender has prepared, beside the victim. Raises VictimFailed, EOFError."""
        alone, beside = await self._victim.alone(rounds), Account()
        for process in self._processes:
            forget_peak(process.pid)
        before, strength = _cost(await self._at_rest()), _Strength()
        for _ in range(REPEATS_MAX):
            cue, began_s = asyncio.Event(), time.perf_counter()
            account, outcomes = await self._victim.beside(sender.send(cue), cue)
            strength.add(outcomes, time.perf_counter() - began_s)
            beside.merge(account)
            if beside.rounds >= rounds:
                break
        during = await self._read()
        in_all = _cost(await self._at_rest()).less(before)
        return _Seen(
            alone,
            beside,
            {name: 1e3 * reading[_LAG] for name, reading in during.items()},
            {process.name: self._share(process) for process in self._processes},
            _charged(in_all.less(beside.cost)),
            strength,
        )

    def _share(self, process: _Process) -> float:
        return max(0, peak_bytes(process.pid) - self._rest[process.name]) / process.memory_max

    async def _read(self) -> dict[str, _Reading]:
        return {
            name: _parsed((await get(f"{url}/metrics")).decode()) for name, url in self._metrics_urls.items()
        }

    async def _at_rest(self) -> dict[str, _Reading]:
        """Both services' metrics, once neither has an open request."""
        async with asyncio.timeout(REST_DEADLINE_S):
            while True:
                read = await self._read()
                held = read["gateway"]["penstock_gateway_requests_in_flight"]
                if not held and not read["engine"]["penstock_engine_open_sequences"]:
                    return read
                await asyncio.sleep(REST_POLL_S)


def _parsed(text: str) -> _Reading:
    """The values in a text of Prometheus' format, by name with labels."""
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return _Reading({name: float(value) for name, _, value in lines})


def _cost(read: dict[str, _Reading]) -> Cost:
    """The cost of all requests since the services' start, without computed tokens charged to nobody."""
    steps = read["engine"]["penstock_engine_step_budget_use_sum"] * STEP_TOKENS
    named = sum(value for name, value in read["engine"].values.items() if name.startswith(_UNCHARGED))
    return Cost(read["gateway"]['penstock_gateway_quota_tokens_total{kind="settled"}'], steps - named)


def _charged(attackers: Cost) -> float | None:
    return attackers.settled / attackers.computed if attackers.computed >= COMPUTED_MIN else None


def _figures(name: str, seen: _Seen) -> Iterable[Figure]:
    for what, values in (("gap p99", "gaps_ms"), ("first token p99", "first_ms")):
        alone_ms, beside_ms = (
            quantile(getattr(account, values), 0.99) for account in (seen.alone, seen.beside)
        )
        target = at_most(round(TIMES_MAX * alone_ms + MORE_MS_MAX, 1))
        yield figure(f"{name}: {what}", beside_ms, "ms", target)
        yield figure(f"{name}: {what}, beside / alone", beside_ms / alone_ms, "x")
    for loop, block_ms in seen.blocks_ms.items():
        yield figure(f"{name}: {loop}'s longest block", block_ms, "ms", BLOCK_TARGET)
    for process, share in seen.memory.items():
        yield figure(f"{name}: {process}'s memory, of its bound", share, "x", MEMORY_TARGET)
    if seen.charged is not None:
        yield figure(f"{name}: charged / computed", seen.charged, "x", CHARGED_TARGET)
    strength = seen.strength
    yield figure(f"{name}: its requests", strength.requests / strength.seconds, "1/s")
    yield figure(f"{name}: its answers", strength.answers / strength.seconds, "1/s")
    yield figure(f"{name}: its bodies", strength.sent_len / MIB / strength.seconds, "MiB/s")


@contextlib.asynccontextmanager
async def _house() -> AsyncIterator[_House]:
    engine_port, port, admin_port, rogue_port = (free_port() for _ in range(4))
    engine_url, url = f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{port}"
    nicely = ["nice", "-n", str(SERVICES_NICE), sys.executable, "-m"]
    rogue_url = f"http://127.0.0.1:{rogue_port}"
    rogue = [
        *nicely,
        "tests.bench.gateway.rogue_engine",
        "--port",
        str(rogue_port),
        "--tokenizer",
        demo_model(),
    ]
    argv = [*nicely, "engine", "serve", "--model", demo_model(), "--port", str(engine_port)]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "gateway.toml"
        config = gateway_config([engine_url], port, admin_port, rogue_url=rogue_url)
        file.write_text(to_toml(config))
        async with (
            service([*argv, *ENGINE_OPTIONS], f"{engine_url}/readyz") as engine,
            service(rogue, f"{rogue_url}/v1/models"),
        ):
            argv = [*nicely, "gateway", "--config", str(file)]
            async with service(argv, f"{url}/readyz") as gateway:
                _, core = descendants(engine.pid)
                processes = [
                    _Process("gateway", gateway.pid, GATEWAY_MEMORY_MAX),
                    _Process("engine", engine.pid, ENGINE_MEMORY_MAX),
                    _Process("core", core, CORE_MEMORY_MAX),
                ]
                metrics_urls = {"gateway": f"http://127.0.0.1:{admin_port}", "engine": engine_url}
                yield _House(url, metrics_urls, processes)
