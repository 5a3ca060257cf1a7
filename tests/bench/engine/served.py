"""`python -m tests.bench engine`: tokens/s, time to first token and gap between tokens of an engine.

Without `--url` it starts an engine of its own on a free port; with it, any OpenAI-compatible server is
measured the same way. With `--against` the same load runs on further servers, piece by piece in turns
(A B A B), because machines are noisy: the ratios are what to compare. Whose turn it is not is stopped, where
its process is known (`--against-pid`), so that nobody's way to wait costs another.

Rows: `load` is the streams, `beside` a long prompt that arrives beside eight running streams, `deadline` the
longest prompt beside them whose first token is of use for a limited time, `idle` the CPU time of an engine
with nothing to do, `memory` what all its processes hold after the loads, `recording` the part of a step that
its record takes, `turns` a conversation (`tests.bench.engine.turns`), `tiers` a chat history that was
evicted, on engines of its own (`tests.bench.engine.tiers`), `structured` what grammars cost a core of its own
(`tests.bench.structured`), `drafts` what drafts gain, on engines of its own (`tests.bench.engine.drafts`).

Beside streams a prompt has the part of the time that `engine.core.estimate.pace` gives it by default: the gap
target less the usual gap, or half of the time where that is more. So its first token should take as long as
alone, divided by that part. Before that it waits for the step that runs as it comes, and where steps overlap
for the one that is planned already: no rule for steps to come changes these, so `WAITED_STEPS` of them are
allowed. Beside a long prompt that is nothing, and beside one that takes some tens of milliseconds it is a
part that shows. (Where the streams' tokens keep the API process and the client busy on the cores that the
engine computes on, such a prompt takes longer for that, too. No term stands for it.)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncIterator, Sequence, Set
from typing import Final

from tests.bench.client import ApiServer
from tests.bench.draft_texts import KINDS
from tests.bench.engine.drafts import Wanted, draft_figures
from tests.bench.engine.interference import DEADLINE_FACTORS, Beside, Ending, beside, with_deadlines
from tests.bench.engine.interference import STREAMS as BESIDE_STREAMS
from tests.bench.engine.load import BenchFailed, Load, Sample, Server, alone, measure, warm_up
from tests.bench.engine.recording import recording
from tests.bench.engine.tiers import tier_figures
from tests.bench.engine.turns import turns
from tests.bench.figures import Figure, at_least, at_most, figure, quantile
from tests.bench.services import demo_model, free_port, service
from tests.bench.structured import structured

__all__ = ["BenchFailed", "add_arguments", "run"]

ROWS: Final = (
    "load",
    "beside",
    "deadline",
    "idle",
    "memory",
    "recording",
    "turns",
    "tiers",
    "structured",
    "drafts",
)
OWN_ROWS: Final = frozenset({"tiers", "structured", "drafts"})
"""Those that start what they measure."""
USUAL_ROWS: Final = ("load", "beside", "idle", "memory")
TURNS: Final = 2
TOKENS_TARGET: Final = at_least(1.5)
TTFT_TARGET: Final = at_most(0.7)
BESIDE_TARGET: Final = at_most(1)
OWN_TARGET: Final = at_most(1.15)
DEADLINE_TARGET: Final = at_most(1)
GAP_TARGET_MS: Final = 100.0
"""The default of `--gap-target-ms`: gaps that are no longer are as asked for, whatever they were before."""
PROMPT_SHARE: Final = 0.5
"""The default of `--prompt-share`."""
WAITED_STEPS: Final = 2
IDLE_TARGET: Final = at_most(1)
IDLE_S: Final = 5.0
SETTLE_S: Final = 1.0
"""After the last request, before an engine counts as idle."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", help="base URL of a running server (http://host:port/v1); default: start our own"
    )
    parser.add_argument(
        "--model",
        help="model directory to start (default: the demo model), or with --url the model's name there",
    )
    parser.add_argument("--key", help="API key for --url")
    parser.add_argument("--pid", type=int, nargs="+", default=[], help="with --url, its processes, if known")
    parser.add_argument(
        "--against", nargs="+", default=[], metavar="URL", help="base URLs of others, measured in turns"
    )
    parser.add_argument("--against-model", metavar="NAME", help="their model's name (default: as --model)")
    parser.add_argument("--against-name", nargs="+", default=["against"], metavar="NAME", help="of each")
    parser.add_argument(
        "--against-pid", type=int, nargs="+", default=[], metavar="PID", help="the first process of each"
    )
    parser.add_argument(
        "--rows", nargs="+", choices=ROWS, default=USUAL_ROWS, metavar="ROW",
        help=f"of {', '.join(ROWS)} (default: {', '.join(USUAL_ROWS)})",
    )  # fmt: skip
    parser.add_argument(
        "--streams", type=int, nargs="+", default=[1, 8, 32], help="concurrent streams, a run each"
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="requests that each stream makes, one after another"
    )
    parser.add_argument(
        "--turns", type=int,
        help="how often each load is repeated, in turns with --against (default: 2; drafts: by streams)",
    )  # fmt: skip
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND",
        help=f"texts of the row drafts, of {', '.join(KINDS)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--prompt-tokens", type=int, default=200, help="length of every prompt")
    parser.add_argument("--output-tokens", type=int, default=64, help="length of every answer")
    parser.add_argument("--seed", type=int, default=0, help="of the random prompts")
    parser.add_argument(
        "engine_options", nargs="*", metavar="-- OPTION", help="for the engine that is started (after --)"
    )


async def run(options: argparse.Namespace) -> list[Figure]:
    rng, rows = random.Random(options.seed), set(options.rows)
    figures = await _of_own_engines(options, rows, rng)
    if rows <= OWN_ROWS:
        return figures
    async with _servers(options) as servers:
        for server in servers:
            await warm_up(server, options.prompt_tokens)
        for streams in options.streams if "load" in rows else []:
            load = Load(streams, options.rounds, options.prompt_tokens, options.output_tokens)
            figures += await _in_turns(servers, load, options.turns or TURNS, rng)
        if "beside" in rows:
            figures += await _beside(servers, rng)
        if "deadline" in rows:
            with alone(servers[0], servers):
                figures += deadline_figures(await with_deadlines(servers[0], rng))
        if "idle" in rows:
            figures += await _idle(servers)
        if "memory" in rows:
            figures += _memory(servers)
        figures += await _of_requests(servers, rows, rng)
    return figures


async def _of_own_engines(options: argparse.Namespace, rows: Set[str], rng: random.Random) -> list[Figure]:
    """The figures of the rows that start what they measure."""
    for row in sorted(rows & OWN_ROWS - {"structured"}):
        if options.url is not None:
            raise BenchFailed(f"the row {row} starts engines of its own, and --url is given")
    figures: list[Figure] = []
    if "tiers" in rows:
        figures += await tier_figures(options.model or demo_model(), rng, options.engine_options)
    if "structured" in rows:
        figures += structured()
    if "drafts" in rows:
        wanted = Wanted(options.kinds, options.streams, options.turns)
        figures += await draft_figures(options.engine_options, wanted, _others(options, "bench"))
    return figures


async def _of_requests(servers: Sequence[Server], rows: Set[str], rng: random.Random) -> list[Figure]:
    """The figures of what requests leave behind: their records, and prefixes for those that follow."""
    figures = await recording(servers[0], rng) if "recording" in rows else []
    return figures + (await turns(servers, rng) if "turns" in rows else [])


async def _in_turns(servers: Sequence[Server], load: Load, turns: int, rng: random.Random) -> list[Figure]:
    samples = [Sample() for _ in servers]
    for _ in range(turns):
        for server, sample in zip(servers, samples, strict=True):
            with alone(server, servers):
                await measure(server, load, rng, sample)
    name = f"{load.streams} stream" + ("s" if load.streams > 1 else "")
    figures = []
    for server, sample in zip(servers, samples, strict=True):
        figures += [
            figure(f"{server.name}{name}: output", sample.tokens_per_s, "tokens/s"),
            figure(f"{server.name}{name}: TTFT p50", quantile(sample.first_ms, 0.5), "ms"),
            figure(f"{server.name}{name}: TTFT p99", quantile(sample.first_ms, 0.99), "ms"),
            figure(f"{server.name}{name}: gap p50", quantile(sample.gaps_ms, 0.5), "ms"),
            figure(f"{server.name}{name}: gap p99", quantile(sample.gaps_ms, 0.99), "ms"),
        ]
    return figures + (_ratios(name, *samples) if len(samples) == 2 else [])


def _ratios(name: str, ours: Sample, theirs: Sample) -> list[Figure]:
    def ratio(values: str, q: float) -> float:
        return quantile(getattr(ours, values), q) / quantile(getattr(theirs, values), q)

    return [
        figure(f"{name}: output, ratio", ours.tokens_per_s / theirs.tokens_per_s, "x", TOKENS_TARGET),
        figure(f"{name}: TTFT p50, ratio", ratio("first_ms", 0.5), "x", TTFT_TARGET),
        figure(f"{name}: TTFT p99, ratio", ratio("first_ms", 0.99), "x"),
        figure(f"{name}: gap p50, ratio", ratio("gaps_ms", 0.5), "x"),
        figure(f"{name}: gap p99, ratio", ratio("gaps_ms", 0.99), "x"),
    ]


async def _beside(servers: Sequence[Server], rng: random.Random) -> list[Figure]:
    figures = []
    for server in servers:
        with alone(server, servers):
            seen = await beside(server, rng)
        figures += beside_figures(server.name, seen, judged=server is servers[0])
    return figures


def beside_figures(server: str, seen: Beside, *, judged: bool) -> list[Figure]:
    """The figures of a long prompt beside streams; with targets when `judged`."""
    name, what = f"{server}{BESIDE_STREAMS} streams", f"a prompt of {seen.prompt_len}"
    over = seen.during_ms / max(2 * seen.without_ms, GAP_TARGET_MS)
    part = max(PROMPT_SHARE, 1.0 - seen.usual_ms / GAP_TARGET_MS)
    own = seen.first_ms / (seen.alone_ms / part + WAITED_STEPS * seen.usual_ms)
    return [
        figure(f"{name}: gap p50 without {what}", seen.usual_ms, "ms"),
        figure(f"{name}: gap p99 without {what}", seen.without_ms, "ms"),
        figure(f"{name}: gap p99 during {what}", seen.during_ms, "ms"),
        figure(f"{name}: gap p99, during / without", seen.during_ms / seen.without_ms, "x"),
        figure(
            f"{name}: gap p99 during / twice that without, or the gap target",
            over,
            "x",
            BESIDE_TARGET if judged else None,
        ),
        figure(f"{name}: TTFT of {what}", seen.first_ms, "ms"),
        figure(f"{server}TTFT of {what} alone", seen.alone_ms, "ms"),
        figure(f"{name}: part of the time that {what} has", part, ""),
        figure(
            f"{name}: TTFT of {what} / alone over its part and the steps before it",
            own,
            "x",
            OWN_TARGET if judged else None,
        ),
    ]


def deadline_figures(endings: Sequence[Ending]) -> list[Figure]:
    """The figures of long prompts with deadlines: answered in time or refused at once, nothing in between."""
    figures = []
    for factor, ending in zip(DEADLINE_FACTORS, endings, strict=True):
        name = f"{BESIDE_STREAMS} streams: a prompt with {factor:g} of its time"
        figures += [
            figure(f"{name}, deadline", ending.deadline_s, "s"),
            figure(f"{name}, {'refused' if ending.is_refused else 'answered'} after", ending.took_s, "s"),
            figure(f"{name}, the same / its limit", ending.took_s / ending.limit_s, "x", DEADLINE_TARGET),
        ]
    return figures


async def _idle(servers: Sequence[Server]) -> list[Figure]:
    known = [server for server in servers if server.pids]
    await asyncio.sleep(SETTLE_S)
    before = [server.cpu_s for server in known]
    await asyncio.sleep(IDLE_S)
    return [
        figure(
            f"{server.name}idle: CPU time",
            100 * (server.cpu_s - was) / IDLE_S,
            "% of a core",
            IDLE_TARGET if server is servers[0] else None,
        )
        for server, was in zip(known, before, strict=True)
    ]


def _memory(servers: Sequence[Server]) -> list[Figure]:
    known = [server for server in servers if server.pids]
    figures = []
    for server in known:
        figures += [
            figure(f"{server.name}resident memory", server.resident_bytes / 1e6, "MB"),
            figure(f"{server.name}resident memory, shared pages once", server.proportional_bytes / 1e6, "MB"),
        ]
    if len(known) == 2:
        ratio = known[0].proportional_bytes / known[1].proportional_bytes
        figures.append(figure("resident memory, ratio", ratio, "x"))
    return figures


@contextlib.asynccontextmanager
async def _servers(options: argparse.Namespace) -> AsyncIterator[list[Server]]:
    """Those under test: ours, or that of `--url`, then those that it is measured against."""
    async with _first(options) as first:
        yield [first, *_others(options, options.model or first.model)]


def _others(options: argparse.Namespace, model: str) -> list[Server]:
    """Those that are measured against, which know their model by this name unless another is given."""
    urls, names, pids = options.against, options.against_name, options.against_pid
    if urls and len(names) != len(urls):
        raise BenchFailed(f"--against-name has {len(names)} names of {len(urls)} servers")
    if pids and len(pids) != len(urls):
        raise BenchFailed(f"--against-pid has {len(pids)} processes of {len(urls)} servers")
    return [
        Server(f"{name}, ", ApiServer(url), options.against_model or model, tuple(pids[at : at + 1]))
        for at, (url, name) in enumerate(zip(urls, names, strict=False))
    ]


@contextlib.asynccontextmanager
async def _first(options: argparse.Namespace) -> AsyncIterator[Server]:
    if options.url is not None:
        if options.model is None:
            raise BenchFailed("--url needs --model: the name that the server knows its model by")
        yield Server("", ApiServer(options.url, options.key), options.model, tuple(options.pid))
        return
    port = free_port()
    argv = [sys.executable, "-m", "engine", "serve", "--model", options.model or demo_model()]
    argv += ["--served-model-name", "bench", "--port", str(port), *options.engine_options]
    async with service(argv, f"http://127.0.0.1:{port}/readyz") as process:
        yield Server("", ApiServer(f"http://127.0.0.1:{port}/v1"), "bench", (process.pid,))
