"""The command `penstock bench serve`: a load on any server with OpenAI's API, and what its callers see.

Rules:

1. The load is open: requests are sent at random moments of a stated rate (Poisson, or with `--burstiness` a
   gamma distribution of gaps), whatever the answers take, unless `--max-concurrency` holds them back. Their
   number and the time of each are bounded.
2. Prompts are random words, of a length in tokens that the server itself counts: two short requests tell how
   many tokens a word takes there, and what the frame around them takes. Each prompt is another one, but for
   `--random-prefix-len` tokens at its beginning.
3. Times are the client's. The first token comes with the first event that has text; a gap lies between two
   such events; the time per output token is the answer's time behind its first token by its other tokens, as
   the server's usage counts them, or the events where it sends none.
4. The report has the names and the form of vLLM's `vllm bench serve`, so that results stand side by side.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import msgspec
from msgspec import Meta

from shared.cli import terminal
from shared.cli.chat import ChatFailed, add_server, client_of, first_model, server_of
from shared.process.arguments import spelt

WORDS: Final = (
    *("river", "stone", "light", "green", "house", "water", "paper", "cloud", "music", "table", "seven"),
    *("north", "small", "yellow", "winter", "summer", "garden", "silver", "window", "bridge", "engine"),
    *("market", "forest", "island", "morning", "evening", "question", "answer", "letter", "number", "simple"),
    *("common", "public", "second", "before", "behind", "between", "children", "country", "history"),
)
"""English words that most tokenizers know as one token each."""
PROMPTS_MAX: Final = 1_000_000
CONNECT_S: Final = 10.0
REQUEST_S: Final = 6 * 3600.0
"""The longest time of one request, in seconds."""
EVENT_LEN_MAX: Final = 1024 * 1024
PROBES: Final = (16, 272)
"""The words of the two requests that tell how many tokens a word takes."""
METRICS: Final = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}
WIDTH: Final = 50


class LoadFailed(Exception):
    """The server refused, or could not be reached. The message is for the user."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load that is asked for."""

    endpoint: str
    """The path below the base URL: `/chat/completions` or `/completions`."""
    model: str
    prompts: int
    rate: float
    """Requests per second; infinite: all at once."""
    burstiness: float
    concurrency_max: int | None
    input_len: int
    """Tokens of a prompt, as the server counts them."""
    output_len: int
    prefix_len: int
    """Tokens at the beginning that all prompts share."""
    range_ratio: float
    """Lengths are drawn from `[1 - ratio, 1 + ratio]` times the stated ones."""
    seed: int
    ignores_eos: bool
    temperature: float | None
    request_s: float
    """The longest time of one request, in seconds."""

    @property
    def is_chat(self) -> bool:
        return self.endpoint.endswith("/chat/completions")


@dataclass(slots=True)
class Sent:
    """One request, and what came of it. Times are seconds on one clock."""

    sent_at: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    token_times: list[float] = field(default_factory=list)
    """The arrival of each event with text."""
    ended_at: float = 0.0
    error: str | None = None

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.token_times[0] - self.sent_at)

    @property
    def latency_ms(self) -> float:
        return 1e3 * (self.ended_at - self.sent_at)

    @property
    def tpot_ms(self) -> float:
        return (self.latency_ms - self.ttft_ms) / (self.output_tokens - 1)

    @property
    def gaps_ms(self) -> list[float]:
        return [1e3 * (later - earlier) for earlier, later in pairwise(self.token_times)]


# -- the wire -------------------------------------------------------------------------------------


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = _Delta()
    text: str | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.text or self.delta.content or self.delta.reasoning_content or self.delta.reasoning)


class _Chunk(msgspec.Struct):
    """The part of a chunk, or of a whole answer, that is looked at: looser than our own shapes."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode: Final = msgspec.json.Decoder(_Chunk).decode


class LoadClient:
    """A client of one server."""

    def __init__(self, client: httpx.AsyncClient, load: Load) -> None:
        self._client = client
        self._load = load

    async def ask(self, prompt: str, output_len: int) -> Sent:
        """Send one request and read its answer to the end. Failures are in the result."""
        load = self._load
        text = {"messages": [{"role": "user", "content": prompt}]} if load.is_chat else {"prompt": prompt}
        options: dict[str, object] = {"stream": True, "stream_options": {"include_usage": True}}
        options |= {"ignore_eos": True} if load.ignores_eos else {}
        options |= {} if load.temperature is None else {"temperature": load.temperature}
        body = msgspec.json.encode({"model": load.model, **text, "max_tokens": output_len, **options})
        sent = Sent(time.perf_counter())
        try:
            async with asyncio.timeout(load.request_s):
                await self._read(body, sent)
        except TimeoutError:
            sent.error = f"no end within {load.request_s:g} s"
        except httpx.HTTPError as error:
            sent.error = f"{type(error).__name__}: {error}"
        except LoadFailed as error:
            sent.error = str(error)
        sent.ended_at = time.perf_counter()
        return sent

    async def _read(self, body: bytes, sent: Sent) -> None:
        path = self._load.endpoint.lstrip("/")
        headers = {"content-type": "application/json"}
        async with self._client.stream("POST", path, content=body, headers=headers) as answer:
            if answer.status_code != httpx.codes.OK:
                told = (await answer.aread())[:300].decode(errors="replace")
                raise LoadFailed(f"HTTP {answer.status_code}: {' '.join(told.split())}")
            is_done = False
            async for data in _events(answer.aiter_bytes()):
                if data == b"[DONE]":
                    is_done = True
                    break
                self._take(data, sent)
            if not is_done:
                raise LoadFailed("the stream ended without [DONE]")
        if not sent.token_times:
            raise LoadFailed("the answer has no text")

    def _take(self, data: bytes, sent: Sent) -> None:
        try:
            chunk = _decode(data)
        except msgspec.DecodeError as error:
            raise LoadFailed(f"an event is no chunk: {error}") from None
        if bytes(chunk.error) not in (b"", b"null"):
            raise LoadFailed(f"an error event: {bytes(chunk.error)[:300].decode(errors='replace')}")
        if any(choice.has_text for choice in chunk.choices):
            sent.token_times.append(time.perf_counter())
            sent.output_tokens += 1
        if chunk.usage is not None:
            sent.prompt_tokens = chunk.usage.prompt_tokens
            sent.output_tokens = chunk.usage.completion_tokens or sent.output_tokens


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data lines of an event stream, whose lines end with LF or CRLF. Raises LoadFailed for one that is
    longer than `EVENT_LEN_MAX`."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > EVENT_LEN_MAX:
            raise LoadFailed(f"an event of more than {EVENT_LEN_MAX} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


# -- the prompts ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lengths:
    """How a server counts: `frame` tokens, and `per_word` more for each word."""

    per_word: float
    frame: float

    @classmethod
    def of(cls, counts: Sequence[int]) -> Lengths:
        """The lengths that follow from two requests of `PROBES` words, by how they were counted."""
        per_word = (counts[1] - counts[0]) / (PROBES[1] - PROBES[0])
        if per_word <= 0:
            return cls(1.0, 0.0)
        return cls(per_word, max(0.0, counts[0] - per_word * PROBES[0]))

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.frame) / self.per_word))


def _text(generator: random.Random, words: int) -> str:
    return " ".join(generator.choices(WORDS, k=words))


async def _lengths(caller: LoadClient, seed: int) -> Lengths:
    """Ask the server how it counts. Raises LoadFailed."""
    counts = []
    for words in PROBES:
        sent = await caller.ask(_text(random.Random(seed), words), 1)
        if sent.error is not None:
            raise LoadFailed(sent.error)
        counts.append(sent.prompt_tokens)
    return Lengths.of(counts)


def _prompts(load: Load, lengths: Lengths) -> Iterable[tuple[str, int]]:
    """The prompts, and the most tokens of their answers."""
    generator = random.Random(load.seed)
    shared = _text(generator, round(load.prefix_len / lengths.per_word)) if load.prefix_len else ""
    for _ in range(load.prompts):
        low, high = 1 - load.range_ratio, 1 + load.range_ratio
        tokens = max(1, round(load.input_len * generator.uniform(low, high)))
        output_len = max(1, round(load.output_len * generator.uniform(low, high)))
        yield f"{shared} {_text(generator, lengths.words(tokens))}".strip(), output_len


# -- the load -------------------------------------------------------------------------------------


async def send_all(caller: LoadClient, load: Load, lengths: Lengths) -> list[Sent]:
    """Send all requests at their times, and wait for their ends."""
    gaps = random.Random(load.seed + 1)
    room = asyncio.Semaphore(load.concurrency_max or load.prompts)

    async def one(prompt: str, output_len: int) -> Sent:
        async with room:
            return await caller.ask(prompt, output_len)

    tasks: list[asyncio.Task[Sent]] = []
    due_at = time.perf_counter()
    for prompt, output_len in _prompts(load, lengths):
        if tasks and math.isfinite(load.rate):
            due_at += gaps.gammavariate(load.burstiness, 1 / (load.rate * load.burstiness))
            await asyncio.sleep(due_at - time.perf_counter())
        tasks.append(asyncio.create_task(one(prompt, output_len)))
    return list(await asyncio.gather(*tasks))


class Spread(msgspec.Struct):
    """The distribution of one metric, in milliseconds."""

    mean: float
    median: float
    std: float
    percentiles: dict[str, float]

    @classmethod
    def of(cls, values: Sequence[float], percentiles: Sequence[float]) -> Spread:
        if not values:
            nan = math.nan
            return cls(nan, nan, nan, {f"{p:g}": nan for p in percentiles})
        ordered = sorted(values)
        at = {f"{p:g}": _percentile(ordered, p) for p in percentiles}
        return cls(statistics.fmean(values), _percentile(ordered, 50), statistics.pstdev(values), at)


def _percentile(ordered: Sequence[float], p: float) -> float:
    """The percentile by linear interpolation, as in numpy."""
    place = (len(ordered) - 1) * p / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


class ServingReport(msgspec.Struct):
    """The result of a load, by vLLM's names."""

    completed: int
    failed: int
    duration: float
    """Seconds from the first request to the last answer's end."""
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    latency_ms: dict[str, Spread]
    errors: dict[str, int]

    @classmethod
    def of(cls, sent: Sequence[Sent], metrics: Sequence[str], percentiles: Sequence[float]) -> ServingReport:
        good = [one for one in sent if one.error is None]
        began_at = min(one.sent_at for one in sent)
        duration = max(one.ended_at for one in sent) - began_at
        prompt, output = sum(one.prompt_tokens for one in good), sum(one.output_tokens for one in good)
        values = {
            "ttft": [one.ttft_ms for one in good],
            "tpot": [one.tpot_ms for one in good if one.output_tokens > 1],
            "itl": [gap for one in good for gap in one.gaps_ms],
            "e2el": [one.latency_ms for one in good],
        }
        seconds = Counter(int(at - began_at) for one in good for at in one.token_times)
        return cls(
            completed=len(good),
            failed=len(sent) - len(good),
            duration=duration,
            total_input_tokens=prompt,
            total_output_tokens=output,
            request_throughput=len(good) / duration,
            output_throughput=output / duration,
            total_token_throughput=(prompt + output) / duration,
            max_output_tokens_per_s=float(max(seconds.values(), default=0)),
            max_concurrent_requests=_most_at_once(good),
            latency_ms={name: Spread.of(values[name], percentiles) for name in metrics},
            errors=dict(Counter(one.error for one in sent if one.error is not None).most_common(5)),
        )

    def record(self) -> bytes:
        """The report as JSON, flat, as vLLM's `--save-result` writes it."""
        flat = {name: value for name, value in msgspec.structs.asdict(self).items() if name != "latency_ms"}
        for metric, spread in self.latency_ms.items():
            flat |= {f"{name}_{metric}_ms": getattr(spread, name) for name in ("mean", "median", "std")}
            flat |= {f"p{p}_{metric}_ms": at for p, at in spread.percentiles.items()}
        return msgspec.json.encode(flat) + b"\n"

    def text(self, load: Load) -> str:
        """The report as `vllm bench serve` prints it."""
        rows: list[tuple[str, str]] = [
            ("Successful requests:", str(self.completed)),
            ("Failed requests:", str(self.failed)),
        ]
        if load.concurrency_max is not None:
            rows.append(("Maximum request concurrency:", str(load.concurrency_max)))
        if math.isfinite(load.rate):
            rows.append(("Request rate configured (RPS):", f"{load.rate:.2f}"))
        rows += [
            ("Benchmark duration (s):", f"{self.duration:.2f}"),
            ("Total input tokens:", str(self.total_input_tokens)),
            ("Total generated tokens:", str(self.total_output_tokens)),
            ("Request throughput (req/s):", f"{self.request_throughput:.2f}"),
            ("Output token throughput (tok/s):", f"{self.output_throughput:.2f}"),
            ("Peak output token throughput (tok/s):", f"{self.max_output_tokens_per_s:.2f}"),
            ("Peak concurrent requests:", f"{self.max_concurrent_requests:.2f}"),
            ("Total token throughput (tok/s):", f"{self.total_token_throughput:.2f}"),
        ]
        lines = ["{s:{c}^{n}}".format(s=" Serving Benchmark Result ", n=WIDTH, c="=")]
        lines += [f"{name:<40} {value:<10}" for name, value in rows]
        for metric, spread in self.latency_ms.items():
            heading, short = METRICS[metric]
            lines.append(f"{heading:-^{WIDTH}}")
            lines.append(f"{f'Mean {short} (ms):':<40} {spread.mean:<10.2f}")
            lines.append(f"{f'Median {short} (ms):':<40} {spread.median:<10.2f}")
            lines += [f"{f'P{p} {short} (ms):':<40} {at:<10.2f}" for p, at in spread.percentiles.items()]
        lines.append("=" * WIDTH)
        return "\n".join(line.rstrip() for line in lines)


def _most_at_once(sent: Sequence[Sent]) -> int:
    edges = sorted([(one.sent_at, 1) for one in sent] + [(one.ended_at, -1) for one in sent])
    most = now = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    return most


# -- the command ----------------------------------------------------------------------------------


def _number(low: float, high: float | None = None) -> Callable[[str], Any]:
    """An argparse type: numbers like these, whole ones where `low` is one."""
    return spelt(Annotated[type(low), Meta(ge=low, le=high)])


def add_parser(names: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `serve` to `penstock bench`."""
    parser = names.add_parser(
        "serve",
        help="put a load on any server with OpenAI's API, and print what its callers see",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_server(parser)
    add = parser.add_argument
    endpoints = ("/chat/completions", "/completions")
    add("--endpoint", choices=endpoints, default=endpoints[0], help="default: %(default)s")
    add("--num-prompts", type=_number(1, PROMPTS_MAX), default=100, help="requests in all (default: 100)")
    add("--request-rate", type=_number(1e-3), default=math.inf, help="requests per second (default: inf)")
    add("--burstiness", type=_number(1e-3), default=1.0, help="1: Poisson; less: burstier (default: 1)")
    add("--max-concurrency", type=_number(1, 65_536), help="requests at a time at most")
    add("--random-input-len", type=_number(1, 2**24), default=1024, help="tokens of a prompt (default: 1024)")
    add("--random-output-len", type=_number(1, 2**24), default=128, help="tokens of an answer (default: 128)")
    add("--random-prefix-len", type=_number(0, 2**24), default=0, help="tokens that all prompts share")
    add("--random-range-ratio", type=_number(0.0, 0.999), default=0.0, help="lengths vary by this share")
    add("--seed", type=_number(0, 2**31), default=0, help="of prompts, lengths and times (default: 0)")
    add("--ignore-eos", action="store_true", help="answers of full length, where the server knows how")
    add("--temperature", type=_number(0.0, 2.0), help="default: the server's")
    names_help = f"of {', '.join(METRICS)} (default: ttft,tpot,itl)"
    usual = ("ttft", "tpot", "itl")
    add("--percentile-metrics", type=_metrics, default=usual, metavar="NAMES", help=names_help)
    add("--metric-percentiles", type=_percentiles, default=(99.0,), metavar="P[,P]", help="default: 99")
    add("--timeout", type=_number(1e-3, REQUEST_S), default=REQUEST_S, metavar="S", help="of one request")
    add("--result-filename", type=Path, metavar="FILE", help="write the result to FILE as JSON as well")
    parser.set_defaults(run=run)


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= METRICS.keys():
        raise argparse.ArgumentTypeError(f"must be of {', '.join(METRICS)}, got {text!r}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    return tuple(map(_number(0.0, 100.0), text.split(",")))


def run(options: argparse.Namespace) -> int:
    """Put the load on the server, and print the report. Returns the process's exit code."""
    try:
        load, report = asyncio.run(_measure(options))
    except (LoadFailed, ChatFailed, httpx.HTTPError) as error:
        message = terminal.harmless(str(error) or type(error).__name__)
        sys.stderr.write(f"penstock bench serve: {message}\n")
        return 2
    print(report.text(load))
    for reason, number in report.errors.items():
        sys.stderr.write(f"{number} failed: {terminal.harmless(reason)}\n")
    if options.result_filename is not None:
        options.result_filename.write_bytes(report.record())
    return 0 if report.completed else 1


async def _measure(options: argparse.Namespace) -> tuple[Load, ServingReport]:
    server = server_of(options.url, options.key)
    if (model := options.model or server.model) is None:
        with client_of(server) as asked:
            model = first_model(asked)
    client = httpx.AsyncClient(
        base_url=server.url,
        headers={"authorization": f"Bearer {server.key}"} if server.key else {},
        timeout=httpx.Timeout(None, connect=CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=options.max_concurrency),
        trust_env=options.url is not None,
        verify=server.verify,
    )
    async with client:
        load = Load(
            endpoint=options.endpoint,
            model=model,
            prompts=options.num_prompts,
            rate=options.request_rate,
            burstiness=options.burstiness,
            concurrency_max=options.max_concurrency,
            input_len=options.random_input_len,
            output_len=options.random_output_len,
            prefix_len=options.random_prefix_len,
            range_ratio=options.random_range_ratio,
            seed=options.seed,
            ignores_eos=options.ignore_eos,
            temperature=options.temperature,
            request_s=options.timeout,
        )
        caller = LoadClient(client, load)
        lengths = await _lengths(caller, load.seed)
        sent = await send_all(caller, load, lengths)
    return load, ServingReport.of(sent, options.percentile_metrics, options.metric_percentiles)
