"""The scheduler against simpler ones, on the same seeded traffic, in virtual time.

Every figure comes from the engine's real scheduler; only the runner is a model of cost, so it takes no
GPU and gives the same numbers everywhere. Ratios are to first come, first served.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

from engine.bench import plot
from engine.bench.virtual import Engine, Request, Run
from engine.bench.virtual import run as simulate
from engine.core.cost import StepCost
from engine.core.messages import ServiceClass
from engine.core.policy import RESPONSE_RATIO, Circumstances, Discipline
from engine.core.sequence import Sequence as Waiting
from engine.core.sequence import Status
from shared.bench.figures import Figure, at_least, at_most, figure, quantile
from shared.bench.streams import BenchFailed

__all__ = ["BenchFailed", "add_arguments", "run"]

COST: Final = StepCost(token_s=1e-4, row_s=1e-4, pair_s=2e-9, fixed_s=5e-3)
"""10,000 prompt tokens/s, 5 ms for the weights: a model of 8B parameters on an older GPU."""
LOAD: Final = 0.9
"""Of the rate that the engine reaches when everything is there at once."""
NEVER: Final = 1 << 60


# -- the disciplines ------------------------------------------------------------------------------


def _seated_before(sequence: Waiting) -> int:
    return {Status.RUNNING: 0, Status.STALLED: 0, Status.PREEMPTED: 1, Status.WAITING: 2}[sequence.status]


def _simple(key: Callable[[Waiting], float]) -> Discipline:
    def order(waiting: Iterable[Waiting], _: Circumstances) -> list[Waiting]:
        return sorted(waiting, key=lambda s: (_seated_before(s), key(s), s.arrived_at, s.handle))

    return Discipline(order, NEVER)


OURS: Final = "penstock"
FIFO: Final = "FIFO"
DISCIPLINES: Final = {
    FIFO: _simple(lambda _: 0.0),
    "priority": _simple(lambda sequence: -sequence.service_class),
    "shortest": _simple(lambda sequence: sequence.expected_len),
    OURS: RESPONSE_RATIO,
}


# -- the workloads --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """Of a workload's requests, one sort."""

    name: str
    share: float
    prompt_len: Callable[[random.Random], int]
    output_len: int
    tenant: Callable[[random.Random], str] = lambda _: ""
    service_class: ServiceClass = ServiceClass.DEFAULT


def _always(length: int) -> Callable[[random.Random], int]:
    return lambda _: length


def _heavy_tailed(rng: random.Random) -> int:
    """Lengths as chat traces have them: a median of 500, and one in a hundred above 8,000."""
    return max(16, min(16_000, round(500 * math.exp(1.2 * rng.gauss(0.0, 1.0)))))


CHAT: Final = (
    Kind("short", 0.85, _always(200), 32),
    Kind("long", 0.15, _always(4000), 64),
)
LONG_IN_SHORT: Final = (
    Kind("short", 0.98, _always(200), 32),
    Kind("long", 0.02, _always(30_000), 32),
)
TAIL: Final = (
    Kind("priority", 0.2, _heavy_tailed, 64, service_class=ServiceClass.PRIORITY),
    Kind("default", 0.6, _heavy_tailed, 64),
    Kind("flex", 0.2, _heavy_tailed, 64, service_class=ServiceClass.FLEX),
)
TENANTS: Final = 10


def traffic(seed: int, kinds: Sequence[Kind], count: int, per_s: float) -> list[Request]:
    """`count` requests, arriving at random."""
    rng, now, requests = random.Random(seed), 0.0, []
    for kind in rng.choices(kinds, [kind.share for kind in kinds], k=count):
        now += rng.expovariate(per_s)
        prompt_len, tenant = kind.prompt_len(rng), kind.tenant(rng)
        requests.append(Request(now, prompt_len, kind.output_len, tenant, kind.service_class))
    return requests


@cache
def capacity(kinds: tuple[Kind, ...], count: int, engine: Engine) -> float:
    """Requests/s of these kinds that the engine reaches when all are there at once."""
    everything = [replace(request, at_s=0.0) for request in traffic(0, kinds, min(count, 600), 1.0)]
    fifo = replace(engine, discipline=DISCIPLINES[FIFO])
    return len(everything) / simulate(everything, fifo).makespan_s


def _p99(runs: Sequence[Run], chosen: Callable[[Request], bool]) -> float:
    """Of the first tokens of all that are chosen, in seconds."""
    return quantile([o.first_token_s for run in runs for o in run.outcomes if chosen(o.request)], 0.99)


def _is_short(request: Request) -> bool:
    return request.prompt_len == 200


def _is_long(request: Request) -> bool:
    return request.prompt_len == 4000


def _bound_use(runs: Sequence[Run]) -> float:
    return max(run.bound_use for run in runs)


# -- the figures ----------------------------------------------------------------------------------


class Bench:
    def __init__(self, *, count: int, seeds: int) -> None:
        self._count = count
        self._seeds = range(1, seeds + 1)
        self._engine = Engine(COST)
        self.chat: dict[str, list[Run]] = {}
        """By discipline, for the plot."""

    def figures(self) -> list[Figure]:
        return [*self._chat(), *self._long_in_short(), *self._flood(), *self._pressed(), *self._tail()]

    def _runs(self, kinds: tuple[Kind, ...], discipline: Discipline, load: float = LOAD) -> list[Run]:
        per_s = load * capacity(kinds, self._count, self._engine)
        engine = replace(self._engine, discipline=discipline)
        return [simulate(traffic(seed, kinds, self._count, per_s), engine) for seed in self._seeds]

    def _chat(self) -> list[Figure]:
        self.chat = {name: self._runs(CHAT, discipline) for name, discipline in DISCIPLINES.items()}
        found = []
        for name, runs in self.chat.items():
            found.append(figure(f"chat: short TTFT p99, {name}", _p99(runs, _is_short), "s"))
            found.append(figure(f"chat: long TTFT p99, {name}", _p99(runs, _is_long), "s"))
        fifo, ours = self.chat[FIFO], self.chat[OURS]
        short, long = (_p99(ours, kind) / _p99(fifo, kind) for kind in (_is_short, _is_long))
        makespan = max(a.makespan_s / b.makespan_s for a, b in zip(ours, fifo, strict=True))
        return [
            *found,
            figure("chat: short TTFT p99 / FIFO's", short, "x", at_most(0.2)),
            figure("chat: long TTFT p99 / FIFO's", long, "x", at_most(1.4)),
            figure("chat: makespan / FIFO's", makespan, "x", at_most(1.05)),
            figure("chat: use of the bound on waiting", _bound_use(ours), "x", at_most(1.0)),
            figure("chat: the same, shortest first", _bound_use(self.chat["shortest"]), "x"),
        ]

    def _long_in_short(self) -> list[Figure]:
        fifo, ours = (self._runs(LONG_IN_SHORT, DISCIPLINES[name]) for name in (FIFO, OURS))
        ratio = _p99(ours, _is_short) / _p99(fifo, _is_short)
        found = [figure("long in short: short TTFT p99 / FIFO's", ratio, "x", at_most(0.2))]
        untimed = replace(self._engine, discipline=RESPONSE_RATIO, step_time_target_s=math.inf)
        per_s = LOAD * capacity(LONG_IN_SHORT, self._count, untimed)
        whole = [simulate(traffic(seed, LONG_IN_SHORT, self._count, per_s), untimed) for seed in self._seeds]
        for name, runs, target in (
            ("a stream's longest gap, p99", ours, at_most(1.1e3 * self._engine.step_time_target_s)),
            ("the same, by a token budget alone", whole, None),
        ):
            gap_s = quantile([o.gap_s_max for run in runs for o in run.outcomes], 0.99)
            found.append(figure(f"long in short: {name}", gap_s * 1e3, "ms", target))
        return found

    def _flood(self) -> list[Figure]:
        kinds = (Kind("chat", 1.0, _always(400), 32, lambda rng: f"tenant-{rng.randrange(TENANTS)}"),)
        per_s = 0.7 * capacity(kinds, self._count, self._engine)
        found = []
        for name in (FIFO, OURS):
            engine = replace(self._engine, discipline=DISCIPLINES[name])
            calm, flooded = [], []
            for seed in self._seeds:
                requests = traffic(seed, kinds, self._count, per_s)
                flood = traffic(1000 + seed, kinds, self._count, per_s)
                more = [replace(request, tenant="tenant-0") for request in flood[: self._count * 9 // 10]]
                calm.append(simulate(requests, engine))
                flooded.append(simulate(sorted([*requests, *more], key=lambda r: r.at_s), engine))
            others = [_p99(runs, lambda r: r.tenant != "tenant-0") for runs in (calm, flooded)]
            target = at_most(1.3) if name == OURS else None
            ratio = others[1] / others[0]
            found.append(figure(f"flood: others' TTFT p99 / without it, {name}", ratio, "x", target))
        return found

    def _pressed(self) -> list[Figure]:
        """The pool holds 1 / 1.2 of what as many average sequences as there are slots need at their ends."""
        kinds = (Kind("chat", 1.0, lambda rng: rng.randint(100, 1500), 400),)
        roomy = replace(self._engine, pages=100_000, slots=64)
        requests = traffic(1, kinds, min(self._count, 600), 1e6)
        need = sum(-(-(r.prompt_len + r.output_len) // roomy.page_size) for r in requests) / len(requests)
        pressed = replace(roomy, pages=round(need * roomy.slots / 1.2))
        fast, tight = simulate(requests, roomy), simulate(requests, pressed)
        most = max(outcome.preemptions for outcome in tight.outcomes)
        goodput = fast.makespan_s / tight.makespan_s
        return [
            figure("KV at 1.2x need: goodput / with room", goodput, "x", at_least(0.9)),
            figure("KV at 1.2x need: preemptions of one request, most", most, "", at_most(3)),
        ]

    def _tail(self) -> list[Figure]:
        found = []
        for name in (FIFO, "priority", OURS):
            runs = self._runs(TAIL, DISCIPLINES[name])
            for service_class in reversed(ServiceClass):
                p99 = _p99(runs, lambda r, of=service_class: r.service_class is of)  # type: ignore[misc]
                found.append(figure(f"heavy tail: {service_class.name.lower()} TTFT p99, {name}", p99, "s"))
            if name == OURS:
                use = _bound_use(runs)
                found.append(figure("heavy tail: use of the bound on waiting", use, "x", at_most(1.0)))
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=1500, metavar="N", help="of each run (default: 1500)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each sort (default: 3)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the chat workload's waits as PNG")


async def run(options: argparse.Namespace) -> list[Figure]:
    if options.plot is not None:
        plot.check()
    bench = Bench(count=options.requests, seeds=options.seeds)
    figures = bench.figures()
    if options.plot is not None:
        plot.draw(bench.chat, options.plot)
    return figures
