"""Thousands of random sequences. `tests.simulator` lists what is asserted after every step.

Every run has every named world, with plain and with overlapped steps, and 25 random worlds, a third of them
overlapped: these have met all that `LEAST` lists, so a law that only 2,000 worlds would find broken is a rare
one. Those, and four seeds of every named world, take minutes more: `DRAWN=whole` (`tests.effort`).
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.contract.messages import FinishReason
from engine.core.scheduler_config import SchedulerConfig
from tests.effort import drawn
from tests.overlapped import OverlappedSimulation, simulate_overlapped
from tests.simulator import Life, Report, simulate
from tests.worlds import CHEAP_S, SimConfig, random_config

pytestmark = pytest.mark.slow

UNBOUNDED = 1_000_000
WORLDS = {
    "roomy": SimConfig(pages=200, slots=12, scheduler=SchedulerConfig(64, UNBOUNDED)),
    "usual": SimConfig(),
    "tight": SimConfig(pages=14, arrival_gap_s=0.005, pause_share=0.0, in_flight_pause_share=0.0),
    "one page a token": SimConfig(page_size=1, pages=72, slots=4),
    "large pages": SimConfig(page_size=16, pages=7, slots=5),
    "budget of the slots": SimConfig(slots=8, scheduler=SchedulerConfig(8, UNBOUNDED)),
    "one slot": SimConfig(slots=1, requests=30),
    "no prefix cache": SimConfig(pages=20, scheduler=SchedulerConfig(16, UNBOUNDED, prefix_cache=False)),
    "classes and tenants": SimConfig(pages=24, classes=3, tenants=3, arrival_gap_s=0.005),
    "classes, protected at once": SimConfig(
        pages=18, classes=3, pause_share=0.5, scheduler=SchedulerConfig(16, UNBOUNDED, preemptions_max=1)
    ),
    "classes and one slot": SimConfig(slots=1, requests=30, classes=3, tenants=2),
    "short queue": SimConfig(arrival_gap_s=0.004, scheduler=SchedulerConfig(16, 5)),
    "protected at once": SimConfig(pages=18, scheduler=SchedulerConfig(16, UNBOUNDED, preemptions_max=1)),
    "high watermark": SimConfig(pages=24, scheduler=SchedulerConfig(16, UNBOUNDED, watermark=0.3)),
    "all clients leave": SimConfig(abort_share=0.9, in_flight_abort_share=0.3),
    "no client reads steadily": SimConfig(pause_share=1.0, in_flight_pause_share=0.3),
    "slow readers in a tight pool": SimConfig(pages=18, pause_share=1.0, arrival_gap_s=0.005),
    "slow readers of one prompt": SimConfig(pages=16, pause_share=1.0, prefixes=1, salts=1, n_max=8, slots=3),
    "slow readers, protected at once": SimConfig(
        pages=16,
        pause_share=0.8,
        arrival_gap_s=0.003,
        scheduler=SchedulerConfig(16, UNBOUNDED, preemptions_max=1),
    ),
    "slow readers and one slot": SimConfig(slots=1, requests=30, pause_share=1.0, in_flight_pause_share=0.3),
    "readers that never return": SimConfig(pause_share=1.0, lost_share=1.0, abort_share=0.0),
    "all ask for prompt logprobs": SimConfig(pages=18, prompt_logprobs_share=1.0),
    "preempted into host memory": SimConfig(
        pages=16, host_pages=1000, page_copy_s=CHEAP_S, arrival_gap_s=0.005
    ),
    "a host tier": SimConfig(pages=16, host_pages=100, page_copy_s=CHEAP_S, prefixes=2, salts=1),
    "a host tier with little room": SimConfig(
        pages=14,
        host_pages=6,
        page_copy_s=CHEAP_S,
        prefixes=2,
        salts=2,
        pause_share=0.6,
        classes=3,
    ),
    "a host tier if cheaper": SimConfig(pages=20, host_pages=40, page_size=8, prefixes=2, requests=30),
    "a disk behind a small host tier": SimConfig(
        pages=16,
        host_pages=12,
        disk=True,
        page_copy_s=CHEAP_S,
        prefixes=16,
        salts=1,
        requests=90,
        n_max=1,
        arrival_gap_s=0.1,
        abort_share=0.05,
        pause_share=0.05,
    ),
    "preempted children of one prompt": SimConfig(
        prefixes=1, n_max=8, requests=25, salts=1, pages=16, host_pages=60, page_copy_s=CHEAP_S, slots=4
    ),
    "states": SimConfig(state_bytes=64, pages=20, classes=3, tenants=3, arrival_gap_s=0.005),
    "states of slow readers": SimConfig(state_bytes=64, pages=18, pause_share=0.8, slots=3, n_max=4),
    "drafts": SimConfig(drafts_max=7, classes=2, tenants=2),
    "drafts, all wrong, in a tight pool": SimConfig(
        drafts_max=3, right_share=0.0, pages=16, arrival_gap_s=0.005, host_pages=40, page_copy_s=CHEAP_S
    ),
    "guesses of the model's own": SimConfig(
        drafts_max=4, guesses_max=4, state_bytes=64, state_windows=12, pages=24, requests=25
    ),
    "drafts of callers": SimConfig(drafts_max=15, prediction_share=1.0, pages=24, max_tokens_max=40),
    "drafts, all right": SimConfig(
        drafts_max=15,
        right_share=1.0,
        prediction_share=0.0,
        pause_share=0.6,
        page_size=2,
        pages=80,
        abort_share=0.4,
    ),
    "snapshots of states": SimConfig(
        state_bytes=64,
        state_places=12,
        page_copy_s=CHEAP_S,
        pages=20,
        classes=3,
        tenants=3,
        scheduler=SchedulerConfig(16, UNBOUNDED, state_every_len=8),
    ),
    "one prompt, many children": SimConfig(prefixes=1, n_max=8, requests=25, salts=1),
}
SEEDS = drawn(1, whole=4)
SEEDS_MAX = 4
"""Of the worlds in `WILD`: what they are named for takes some luck, and no more seeds than that."""
SEEDS_OVERLAPPED = drawn(1, whole=3)


@pytest.mark.parametrize("world", WORLDS)
def test_laws_hold_in_every_world(world: str) -> None:
    """The laws hold with plain and with overlapped steps, and both give a sequence the same tokens, up to the
    shorter of the two outputs: an abort or a deadline may find it at another token."""
    plain = [simulate(seed, WORLDS[world]) for seed in range(SEEDS)]
    while world in WILD and not WILD[world](plain):
        assert len(plain) < SEEDS_MAX, "what the world is named for did not happen: it would prove nothing"
        plain.append(simulate(len(plain), WORLDS[world]))
    assert sum(len(report.lives) for report in plain) >= 50 * len(plain)
    for seed in range(SEEDS_OVERLAPPED):
        simulation = OverlappedSimulation(random.Random(seed), WORLDS[world])
        report = simulation.run()
        least = 0 if WORLDS[world].drafts_max else report.steps / 2  # a plan with drafts waits
        assert simulation.runner.overlaps > least, "it hardly overlaps"
        assert [life.message for life in report.lives] == [life.message for life in plain[seed].lives]
        for life, other in zip(report.lives, plain[seed].lives, strict=True):
            common = min(len(life.tokens), len(other.tokens))
            assert life.tokens[:common] == other.tokens[:common]


def test_a_seed_gives_one_history_in_every_process() -> None:
    """Whatever salt Python hashes strings with there: it is another than here."""
    asked = (
        "from tests.engine.core.test_simulation import *; report = simulate(0, WORLDS['a host tier']);"
        "print(report.steps, report.host_tokens, [life.tokens for life in report.lives])"
    )
    salted = {**os.environ, "PYTHONHASHSEED": "7"}
    told = subprocess.check_output([sys.executable, "-c", asked], env=salted, text=True)
    report = simulate(0, WORLDS["a host tier"])
    assert told == f"{report.steps} {report.host_tokens} {[life.tokens for life in report.lives]}\n"


def is_usual(reports: list[Report]) -> bool:
    """Whether there were hits, preemptions and every finish reason, but for that of first tokens that come
    too late: no request of a world has such a deadline (`test_deadlines.py`)."""
    seen = {reason for report in reports for reason in report.reasons}
    hits = all(report.hit_tokens for report in reports)
    return (
        hits
        and seen == set(FinishReason) - {FinishReason.TOO_LATE}
        and sum(report.preemptions for report in reports) > 10
    )


def is_tight(reports: list[Report]) -> bool:
    """Whether only running sequences were preempted, one of them as often as allowed."""
    most = max(report.preemptions_most for report in reports)
    return most == SchedulerConfig().preemptions_max and not any(report.displaced for report in reports)


def has_slow_readers(reports: list[Report]) -> bool:
    """Whether running sequences were preempted beside stalled ones."""
    suffers = any(report.preemptions > report.displaced for report in reports)
    return suffers and sum(report.displaced for report in reports) > 10


def is_left_in_flight(reports: list[Report]) -> bool:
    lives = [life for report in reports for life in report.lives if life.finished is not None and life.tokens]
    return any(life.finished.reason is FinishReason.ABORTED for life in lives)  # type: ignore[union-attr]


WILD: dict[str, Callable[[list[Report]], bool]] = {
    "usual": is_usual,
    "tight": is_tight,
    "slow readers in a tight pool": has_slow_readers,
    "readers that never return": lambda reports: sum(r.reasons[FinishReason.STALLED] for r in reports) > 50,
    "all clients leave": is_left_in_flight,
    "classes and tenants": lambda reports: sum(report.yields for report in reports) > 20,
    "preempted into host memory": lambda reports: sum(report.swaps_in for report in reports) > 20,
    "a host tier": lambda reports: sum(report.host_tokens for report in reports) > 200,
    "a host tier with little room": lambda reports: sum(report.host_tokens for report in reports) > 20,
    "a host tier if cheaper": lambda reports: sum(report.host_tokens for report in reports) > 60,
    "a disk behind a small host tier": lambda reports: sum(report.disk_tokens for report in reports) > 20,
    "drafts": lambda reports: all(0 < r.accepted < r.drafted for r in reports),
    "drafts of callers": lambda reports: all(r.predicted > 50 and r.mispredicted > 10 for r in reports),
    "drafts, all right": lambda reports: all(r.steps < 0.8 * r.output_tokens for r in reports),
    "snapshots of states": lambda reports: sum(report.states.restored for report in reports) > 20,
    "short queue": lambda reports: all(r.reasons[FinishReason.REJECTED] > 10 for r in reports),
}
"""Checks that what a world is named for has happened in it; otherwise it would prove nothing."""


RANDOM_WORLDS = drawn(25, whole=2000)
BATCH = drawn(25, whole=200)
FIRST_WORLD = drawn(25, whole=0)
"""In the first 25 hardly a sequence yields."""
LEAST = {
    "worlds with hits": 10,
    "preempted": 20,
    "preempted, and finished all the same": 10,
    "displaced": 5,
    "yielded": 5,
    "came back from host memory": 1,
    "kept pages that were found": 5,
    "kept pages that were evicted": 5,
    "stalled": 200,
    "late tokens": 10,
    "computed again": 40,
    FinishReason.STOP: 60,
    FinishReason.LENGTH: 200,
    FinishReason.ABORTED: 100,
    FinishReason.STALLED: 40,
    FinishReason.NUMERIC: 10,
    FinishReason.REJECTED: 150,
}
"""The least number of each in 50 random worlds, and in a batch in proportion: laws that hold where nothing
happens prove nothing."""


@pytest.mark.parametrize("first", range(FIRST_WORLD, FIRST_WORLD + RANDOM_WORLDS, BATCH))
def test_laws_hold_in_random_worlds(first: int) -> None:
    """A third of the worlds run overlapped steps. What they compute is charged or named."""
    seen: Counter[object] = Counter()
    for seed in range(first, first + BATCH):
        report = (simulate_overlapped if seed % 3 == 0 else simulate)(seed, random_config(seed))
        assert report.computed_tokens <= report.owed_tokens + report.uncharged_tokens, seed
        seen += tally(report)
    assert {what: seen[what] for what, least in LEAST.items() if seen[what] < least * BATCH // 50} == {}


DRAFTED_WORLDS = drawn(38, whole=1700)
DRAFTED = drawn(250, whole=500)
DRAFTED_LEAST = {
    "a mask": 60,
    "log-probabilities": 60,
    "scored prompts": 20,
    "least tokens": 60,
    "stop tokens": 50,
    "the last token": 200,
    "a numeric failure": 10,
    "a failed grammar": 5,
    "an abort": 10,
    "choices beside it": 200,
    "a prompt in chunks": 40,
    "a cached prefix": 100,
    "a prefix from host memory": 3,
    "a preemption": 20,
    "a pause": 60,
    "a prediction": 100,
    "all drafts right": 40,
    "all drafts wrong": 40,
}
"""The least number of sequences that had each beside their drafts, among 500 of them."""


def test_drafts_change_nothing_whatever_stands_beside_them() -> None:
    """The tokens, the log-probabilities and the ends are those of each sequence alone, which drafts
    nothing."""
    seen: Counter[str] = Counter()
    for seed in range(DRAFTED_WORLDS):
        config = replace(
            random_config(10_000 + seed),
            drafts_max=(3, 15)[seed % 2],
            right_share=(0.0, 0.5, 0.9, 1.0)[seed // 2 % 4],
            prompt_logprobs_share=0.15,
        )
        if seed % 5 == 0:
            config = replace(config, host_pages=1000, page_copy_s=CHEAP_S, prefixes=1, salts=1)
        report = simulate(seed, config)
        lives = [life for life in report.lives if life.finished is not None and life.finished.drafted]
        of_request = Counter(life.message.request_id for life in report.lives)
        for life in lives:
            seen.update(drafted_with(life, config, of_request))
    drafted = seen.pop("drafts")
    assert drafted >= drawn(DRAFTED, whole=10_000)
    least = {what: number * (drafted // DRAFTED * DRAFTED) // 500 for what, number in DRAFTED_LEAST.items()}
    assert {what: seen[what] for what in least if seen[what] < least[what]} == {}


def drafted_with(life: Life, config: SimConfig, of_request: Counter[str]) -> list[str]:
    """What a sequence that drafted had beside. `of_request`: the sequences of each request."""
    message, end = life.message, life.finished
    assert end is not None
    assert life.started is not None
    sampling = message.sampling
    has = {
        "drafts": True,
        "a mask": bool(message.grammar),
        "log-probabilities": sampling.logprobs is not None,
        "scored prompts": sampling.prompt_logprobs is not None,
        "least tokens": sampling.min_tokens > 0,
        "stop tokens": end.reason is FinishReason.STOP,
        "the last token": end.reason is FinishReason.LENGTH,
        "a numeric failure": end.reason is FinishReason.NUMERIC,
        "a failed grammar": end.reason is FinishReason.GRAMMAR,
        "an abort": end.reason is FinishReason.ABORTED,
        "choices beside it": of_request[message.request_id] > 1,
        "a prompt in chunks": len(message.prompt_ids) - life.started.cached_len
        > config.scheduler.step_tokens_max,
        "a cached prefix": life.started.cached_len > 0,
        "a prefix from host memory": life.started.host_len > 0,
        "a preemption": end.preemptions > 0,
        "a pause": end.stalled_s > 0,
        "a prediction": bool(life.message.prediction),
        "all drafts right": end.accepted == end.drafted > 3,
        "all drafts wrong": end.accepted == 0 and end.drafted > 3,
    }
    return [name for name, is_so in has.items() if is_so]


def tally(report: Report) -> Counter[object]:
    """The number of sequences to which each thing happened in one world."""
    ends = report.ends
    done = (FinishReason.STOP, FinishReason.LENGTH)
    return Counter[object](
        {
            "worlds with hits": min(1, report.hit_tokens),
            "preempted": sum(end.preemptions > 0 for end in ends),
            "preempted, and finished all the same": sum(e.preemptions > 0 and e.reason in done for e in ends),
            "displaced": report.displaced,
            "yielded": report.yields,
            "came back from host memory": report.swaps_in,
            "kept pages that were found": report.kept_found,
            "kept pages that were evicted": report.kept_evicted,
            "late tokens": sum(end.late_tokens for end in ends),
            "computed again": sum(end.again_tokens for end in ends),
            "stalled": sum(end.stalled_s > 0 for end in ends),
            **dict[object, int](report.reasons.items()),
        }
    )


def calm(config: SimConfig) -> SimConfig:
    """The world with many choices, in which each is computed to its end and no page is evicted."""
    scheduler = replace(config.scheduler, prefix_cache=True, queue_len_max=UNBOUNDED)
    return replace(
        config, n_max=16, pages=4000, tenants=1, classes=1, fails=False, abort_share=0.0, vector_share=0.0,
        in_flight_abort_share=0.0, pause_share=0.0, in_flight_pause_share=0.0, prompt_logprobs_share=0.0,
        host_pages=0, disk=False, scheduler=scheduler,
    )  # fmt: skip


@pytest.mark.parametrize("run", [simulate, simulate_overlapped])
def test_choices_are_charged_to_the_token_what_they_compute(run: Callable[[int, SimConfig], Report]) -> None:
    """The choices of a prompt compute it once, however few slots and tokens there are, whatever is cached.
    Overlapped steps compute a token more for each choice that ends by a stop token, and name it."""
    choices, worlds = 0, drawn(1, whole=600)
    for seed in range(worlds):
        report = run(seed, calm(random_config(seed)))
        assert report.computed_tokens == report.owed_tokens + report.uncharged_tokens, seed
        late = report.reasons[FinishReason.STOP] if run is simulate_overlapped else 0
        assert report.uncharged_tokens <= late, seed
        choices += len(report.lives) - report.reasons[FinishReason.REJECTED]
    assert choices > 75 * worlds


def test_a_simulation_can_be_replayed() -> None:
    first, again = simulate(7, SimConfig()), simulate(7, SimConfig())
    assert first == again
    assert simulate(8, SimConfig()) != first


PRESSED = SimConfig(
    requests=150, n_max=1, page_size=4, slots=16, prompt_len_max=24, max_tokens_max=32, abort_share=0.0,
    in_flight_abort_share=0.0, pause_share=0.0, in_flight_pause_share=0.0, prefixes=1, arrival_gap_s=0.001,
    prompt_logprobs_share=0.0, scheduler=SchedulerConfig(48, UNBOUNDED),
)  # fmt: skip


def need_of(report: Report, config: SimConfig) -> int:
    """The pages that average sequences in all slots hold at their ends."""
    lens = [len(life.message.prompt_ids) + len(life.tokens) for life in report.lives]
    return round(config.slots * sum(lens) / len(lens) / config.page_size)


@pytest.mark.parametrize("seed", range(drawn(1, whole=4)))
def test_over_admission_does_not_thrash(seed: int) -> None:
    """The pool holds 1 / 1.2 of the pages that all slots need: little work is done twice."""
    roomy = simulate(seed, replace(PRESSED, pages=400))
    pages = round(need_of(roomy, PRESSED) / 1.2)
    pressed = simulate(seed, replace(PRESSED, pages=pages))
    assert roomy.preemptions == 0
    assert pressed.preemptions_most <= PRESSED.scheduler.preemptions_max
    assert pressed.computed_tokens <= 1.1 * roomy.computed_tokens
    assert pressed.elapsed_s <= 1.2 * roomy.elapsed_s
