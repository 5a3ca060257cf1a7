"""Random worlds of `engine.core.estimate.pace`: `python -m tests.pace_worlds N [FIRST] [--out FILE]` runs N,
in both loops, without drafts and with.

A world has a runner of random cost, gap targets, streams of random classes and prompts of random lengths that
arrive beside them. The scheduler is the real one, in virtual time. The laws:

- no step with decodes takes longer than the largest of the gap target of those that stream, twice its decodes
  and their time over one less the share, but for copies, for a single token whose context takes longer to
  read than that, and for the host's time for the last admission; also where streams verify as many drafts as
  they may, of which all are wrong, or all are right;
- prompts that wait beside decodes get their share of the time: over the steps in which they wait, at least
  0.85 of it, apart from what one chunk takes. A step owes them no more than it gave where it has as many
  tokens as a step may have, or where one token more would make it longer than the rule allows, which leaves
  room for the error of the estimate (a second token may take far more than the first one, which counts as a
  decode: world 924);
- every request is answered in full.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from engine.contract.messages import Plan, RunResult, SamplingParams, ServiceClass
from engine.core.estimate.cost import StepCost, Work
from engine.core.queue.newcomers import AddSequence
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.core.sequence import Sequence
from tests.bench import figures
from tests.bench.engine.core_window import draft_by
from tests.bench.engine.virtual import SAMPLED, DraftedAs, SureDrafts, timed_steps, work_of
from tests.bench.figures import at_most, figure
from tests.fake_runner import runner_info

UNBOUNDED: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class World:
    cost: StepCost
    gap_targets_s: tuple[float, ...]
    prompt_share: float
    step_tokens_max: int
    requests: tuple[tuple[float, int, int, ServiceClass], ...]
    """For each request: when it arrives, its prompt's and its answer's length, its class."""


def random_world(seed: int) -> World:
    rng = random.Random(seed)
    token_s = 10 ** rng.uniform(-5.0, -2.5)
    cost = StepCost(
        token_s=token_s,
        row_s=token_s * rng.uniform(0.1, 2.0),
        pair_s=token_s * rng.choice([0.0, 10 ** rng.uniform(-5.0, -3.0)]),
        context_s=token_s * rng.choice([0.0, 10 ** rng.uniform(-4.0, -2.0)]),
        fixed_s=token_s * 10 ** rng.uniform(0.0, 2.5),
    )
    target_s = cost.fixed_s * 10 ** rng.uniform(-0.5, 1.5)
    requests, now = [], 0.0
    for _ in range(rng.randint(2, 20)):
        prompt_len = rng.choice([rng.randint(1, 100), rng.randint(100, 2000), rng.randint(1000, 6000)])
        requests.append((now, prompt_len, rng.randint(1, 150), rng.choice(list(ServiceClass))))
        now += rng.expovariate(1.0) * cost.service_s(rng.randint(1, 2000)) * rng.choice([0.0, 1.0, 3.0])
    seats = random.Random(-seed - 1)  # the rest is as in worlds where the host's time is nothing
    return World(
        cost=replace(cost, seat_s=cost.fixed_s * seats.choice([0.0, 10 ** seats.uniform(-3.0, 0.0)])),
        gap_targets_s=(target_s * rng.uniform(1.0, 10.0), target_s, target_s * rng.uniform(0.3, 1.0)),
        prompt_share=rng.choice([0.5, 0.5, 0.1, 0.3, 0.8]),
        step_tokens_max=rng.choice([256, 2048, 8192]),
        requests=tuple(requests),
    )


@dataclass(slots=True)
class Seen:
    """What one world showed."""

    steps: int = 0
    mixed: int = 0
    """Steps with decodes and prompts."""
    waited_s: float = 0.0
    """The time of steps with decodes beside which a prompt waited or was computed."""
    computed_s: float = 0.0
    """The part of it that prompts had."""
    owed_s: float = 0.0
    """The part of it that prompts were to have by their share."""
    longest_chunk_s: float = 0.0
    drafted: int = 0
    finished: set[int] = field(default_factory=set)


def run_world(seed: int, *, overlap: bool = False, drafts: DraftedAs | None = None) -> Seen:
    """Run one world to its end. Raises AssertionError when a law is broken. Where steps overlap, no stream
    drafts."""
    return _Running(random_world(seed), overlap=overlap, drafts=drafts).run()


@dataclass(frozen=True, slots=True)
class Checked:
    """What one plan showed."""

    waits: bool
    """True if a prompt waits for more of the step."""
    is_full: bool = False
    """True if the step has no place for one token more of a prompt."""


class _Running:
    def __init__(self, world: World, *, overlap: bool, drafts: DraftedAs | None) -> None:
        self._world = world
        drafts_max = 0 if drafts is None else 15
        info = runner_info(
            pages=4096, page_size=64, slots=64, max_model_len=8192, vocab_size=10, drafts_max=drafts_max
        )
        info = msgspec.structs.replace(info, timed_steps=timed_steps(world.cost))
        config = SchedulerConfig(
            step_tokens_max=world.step_tokens_max,
            queue_len_max=UNBOUNDED,
            prefix_cache=False,
            gap_targets_s=world.gap_targets_s,
            prompt_share=world.prompt_share,
        )
        self._scheduler = Scheduler(config, info)
        if drafts is not None:
            draft_by(self._scheduler, lambda _: SureDrafts(drafts))
        self._overlap = overlap
        self._now = 0.0
        self._arrived = 0
        self._flying: list[tuple[Plan, Checked]] = []
        self._seen = Seen()

    def run(self) -> Seen:
        requests = self._world.requests
        while self._arrived < len(requests) or self._scheduler.has_work or self._flying:
            if not (self._scheduler.has_work or self._flying):
                self._now = max(self._now, requests[self._arrived][0])
            self._arrive()
            plan = self._scheduler.plan(self._now)
            if plan is not None:
                self._flying.append((plan, self._check(plan)))
            if self._flying and (plan is None or len(self._flying) > self._overlap):
                self._land(*self._flying.pop(0))
            output = self._scheduler.report()
            self._seen.finished |= {each.handle for each in output.finished} if output else set()
        assert self._seen.finished == set(range(len(requests))), "a request was not answered"
        self._check_share()
        return self._seen

    def _arrive(self) -> None:
        while self._arrived < len(self._world.requests):
            at_s, prompt_len, output_len, service_class = self._world.requests[self._arrived]
            if at_s > self._now:
                return
            sampling = SamplingParams(seed=1, max_tokens=output_len)
            handle = self._arrived
            message = AddSequence(
                handle, str(handle), [1] * prompt_len, sampling, service_class=service_class
            )
            self._scheduler.add(message, at_s)
            self._arrived += 1

    def _land(self, plan: Plan, checked: Checked) -> None:
        work = work_of(plan)
        step_s = self._world.cost.seconds(work)
        decodes = self._decodes(plan)
        decodes_s = self._world.cost.seconds(decodes)
        self._now += step_s
        self._seen.steps += 1
        drafted_s = self._world.cost.seconds(self._verifying(plan)) - decodes_s
        self._seen.drafted += work.drafts
        given_s = step_s - decodes_s - drafted_s
        if decodes.decode_rows and (checked.waits or given_s > 1e-6 * step_s):
            self._seen.waited_s += step_s
            self._seen.computed_s += given_s
            by_share_s = self._world.prompt_share * step_s
            self._seen.owed_s += min(by_share_s, given_s) if checked.is_full else by_share_s
        self._scheduler.commit(plan, RunResult([SAMPLED] * plan.sampled, [], []), self._now)

    def _decodes(self, plan: Plan) -> Work:
        rows = [i for i, sequence in enumerate(self._rows(plan)) if sequence is not None]
        return Work.of([plan.positions[i] for i in rows], [1] * len(rows))

    def _verifying(self, plan: Plan) -> Work:
        """The decodes with their drafts."""
        rows = [i for i, sequence in enumerate(self._rows(plan)) if sequence is not None]
        return work_of(plan, rows)

    def _rows(self, plan: Plan) -> list[Sequence | None]:
        """The sequence of each row that is a decode, and None for a chunk of a prompt."""
        flight = self._scheduler._in_flight[plan.step]
        chunks = {id(sequence) for sequence in flight.prefills}
        return [None if id(sequence) in chunks else sequence for sequence in flight.rows]

    def _check(self, plan: Plan) -> Checked:
        """Check a plan's time."""
        world, rows = self._world, self._rows(plan)
        streams = [sequence for sequence in rows if sequence is not None]
        flight = self._scheduler._in_flight[plan.step]
        waits = any(sequence.pending_len > 1 for sequence in flight.prefills)
        if not streams:
            return Checked(waits)
        step_s = world.cost.seconds(work_of(plan))
        decodes_s = world.cost.seconds(self._decodes(plan))
        target_s = min(world.gap_targets_s[sequence.service_class] for sequence in streams)
        by_share_s = max(2.0 * decodes_s, decodes_s / (1.0 - world.prompt_share))
        most_s = max(target_s, by_share_s)
        if step_s > decodes_s:
            chunks_s = step_s - world.cost.seconds(self._verifying(plan))
            self._seen.mixed += chunks_s > 0.0
            self._seen.longest_chunk_s = max(self._seen.longest_chunk_s, chunks_s)
            excess = self._excess_s(plan)
            assert step_s <= 1.02 * most_s + excess, f"{step_s} s, and not {most_s} s"
        error = self._scheduler._learner.error
        room_s = max(target_s / (1.0 + error), decodes_s + (by_share_s - decodes_s) / (1.0 + error))
        return Checked(waits, self._is_full(plan, room_s))

    def _is_full(self, plan: Plan, room_s: float) -> bool:
        """True if no prompt gets one token more into a step of at most `room_s`."""
        if sum(plan.lengths) >= self._world.step_tokens_max:
            return True
        chunks = {id(sequence) for sequence in self._scheduler._in_flight[plan.step].prefills}
        longer_s = []
        for i, sequence in enumerate(self._scheduler._in_flight[plan.step].rows):
            if id(sequence) in chunks and sequence.pending_len:
                longer_s.append(self._world.cost.seconds(work_of(plan, longer=i)))
        return bool(longer_s) and min(longer_s) > room_s

    def _excess_s(self, plan: Plan) -> float:
        """The time of the chunks that have a single token, or of the one that the eldest has in any case; of
        the last admission, and of all of them as far as it is not learned yet."""
        rows, seat_s = self._rows(plan), self._world.cost.seat_s
        unknown_s = max(0.0, seat_s - self._scheduler._learner.cost.seat_s)
        seats_s = len(plan.seated) * unknown_s + bool(plan.seated) * seat_s
        return seats_s + sum(
            self._world.cost.chunk_s(position, length)
            for position, length, sequence in zip(plan.positions, plan.lengths, rows, strict=True)
            if sequence is None and length == 1
        )

    def _check_share(self) -> None:
        seen = self._seen
        if seen.waited_s > 20 * seen.longest_chunk_s > 0.0:
            least_s = 0.85 * seen.owed_s - seen.longest_chunk_s
            assert seen.computed_s >= least_s, f"prompts had {seen.computed_s} s, and not {least_s} s"


KINDS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "overlapped": {"overlap": True},
    "drafts, all wrong": {"drafts": DraftedAs.WRONG},
    "drafts, all right": {"drafts": DraftedAs.RIGHT},
}


def broken_laws(seed: int) -> tuple[int, list[str]]:
    """The steps with streams and prompts of one world of each kind, and what broke a law in it."""
    mixed, broken = 0, []
    for name, kind in KINDS.items():
        try:
            mixed += run_world(seed, **kind).mixed
        except AssertionError as error:
            broken.append(f"world {seed}, {name}: {error}")
    return mixed, broken


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Run random worlds of a step's time in both loops.")
    parser.add_argument("count", type=int)
    parser.add_argument("first", type=int, nargs="?", default=0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures to FILE as JSON lines")
    options = parser.parse_args(argv)
    mixed, worlds_broken = 0, 0
    for seed in range(options.first, options.first + options.count):
        steps, broken = broken_laws(seed)
        mixed, worlds_broken = mixed + steps, worlds_broken + bool(broken)
        sys.stderr.writelines(f"{each}\n" for each in broken)
    found = [
        figure("worlds, each of all kinds", options.count, ""),
        figure("first seed", options.first, ""),
        figure("steps with streams and prompts", mixed, ""),
        figure("worlds that broke a law", worlds_broken, "", at_most(0)),
    ]
    figures.write(found)
    if options.out is not None:
        with options.out.open("w") as out:
            figures.write(found, out, as_json=True)
    return figures.exit_code(found, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
