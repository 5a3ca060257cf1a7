"""The row `structured` of `python -m tests.bench engine`: what grammars cost a core.

A core of its own computes a small random model on the CPU, with a vocabulary of 2,048 tokens and with one of
151,936: the masks of a large one take longer, and the less a model computes, the more they show. In turns 32
streams follow a schema and do not; their answers are as long. Then single requests come, each with a schema
that the core has not seen, and without one. A schema is compiled twice: at the door, which is timed alone
here, and in the core. Last, 8 streams of one tenant follow a schema alone, and beside 16 requests of another
tenant that take tens of milliseconds each to compile, and as long for a mask."""

from __future__ import annotations

import dataclasses
import itertools
import json
import queue
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import llguidance
import msgspec

from engine.contract.grammars import WHITESPACE, compiled, vocabulary_of
from engine.contract.messages import (
    AbortSequences,
    AddPrompt,
    AddRequest,
    CoreInput,
    CoreOutput,
    FinishReason,
    SamplingParams,
    StepOutput,
    StopCore,
)
from engine.contract.packing import packed
from engine.core.grammars.threads import GrammarThreads
from engine.core.loop import CoreLoop
from engine.core.scheduler_config import SchedulerConfig
from tests.bench.engine.load import BenchFailed, random_prompt
from tests.bench.figures import Figure, at_least, at_most, figure, quantile

STREAMS: Final = 32
VICTIMS: Final = 8
TURNS: Final = 8
TOKENS: Final = 96
FIRSTS: Final = 25
VOCABULARIES: Final = (2048, 151_936)
END_ID: Final = 0
TOKENS_TARGET: Final = at_least(0.9)
FIRST_TARGET: Final = at_most(10)
VICTIM_TARGET_MS: Final = 50.0
HOSTILES: Final = 16
PATIENCE_S: Final = 60.0


class _Wire:
    """Both ends of a loop in this process: messages to it, and when each token came from it."""

    def __init__(self) -> None:
        self._inward: queue.SimpleQueue[CoreInput | None] = queue.SimpleQueue()
        self.came: dict[int, list[float]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.changed = threading.Condition()

    def put(self, *messages: CoreInput | None) -> None:
        for message in messages:
            self._inward.put(message)

    def ring(self) -> None:
        self.put(None)

    def receive(self, wait_s: float) -> list[CoreInput]:
        """Implements `engine.core.loop.Inbox`."""
        found: list[CoreInput] = []
        try:
            first = self._inward.get(timeout=min(wait_s, 1.0)) if wait_s else self._inward.get_nowait()
            while True:
                if first is not None:
                    found.append(first)
                first = self._inward.get_nowait()
        except queue.Empty:
            return found

    def send(self, message: CoreOutput) -> None:
        """Implements `engine.core.loop.Outbox`."""
        msgspec.msgpack.encode(message)
        if not isinstance(message, StepOutput):
            return
        now = time.perf_counter()
        with self.changed:
            for handle in message.handles:
                self.came.setdefault(handle, []).append(now)
            self.reasons |= {finished.handle: finished.reason for finished in message.finished}
            self.changed.notify_all()


class _Core:
    """A core in a thread of this process."""

    def __init__(self, directory: Path, vocab_len: int) -> None:
        from engine.runtime.load import load_runner
        from engine.runtime.setup.runner_config import RunnerConfig

        vocabulary = vocabulary_of((directory / "tokenizer.json").read_text(), vocab_len, [END_ID])
        self._vocabulary = vocabulary
        config = RunnerConfig(str(directory), device="cpu", max_num_seqs=2 * STREAMS, max_model_len=1024)
        runner = load_runner(config, lambda stage: None)
        self._wire = _Wire()
        grammars = GrammarThreads(vocabulary, self._wire.ring)
        loop = CoreLoop(runner, self._wire, self._wire, SchedulerConfig(), grammars=grammars)
        self._thread = threading.Thread(target=loop.run, daemon=True)
        self._thread.start()
        self._handles = itertools.count(1)
        self._rng = random.Random(0)

    def compile(self, grammar: str) -> None:
        """Compile a grammar as the API process does."""
        compiled(self._vocabulary, grammar)

    def add(self, grammar: str, *, tokens: int, tenant: str = "", temperature: float = 0.0) -> int:
        handle = next(self._handles)
        sampling = SamplingParams(seed=handle, max_tokens=tokens, temperature=temperature)
        prompt = AddPrompt(packed(random_prompt(self._rng, 32)), tokens, 0, [handle])
        self._wire.put(AddRequest(handle, "", [prompt], sampling, tenant=tenant, grammar=grammar))
        return handle

    def wait(self, handles: Sequence[int]) -> list[list[float]]:
        """When the tokens of each of these came, once they have ended by their lengths."""
        wire = self._wire
        with wire.changed:
            if not wire.changed.wait_for(lambda: all(h in wire.reasons for h in handles), PATIENCE_S):
                raise BenchFailed(f"after {PATIENCE_S} s not all answers have ended")
        ends = {wire.reasons[handle] for handle in handles}
        if ends != {FinishReason.LENGTH}:
            raise BenchFailed(f"answers ended by {sorted(end.name for end in ends)}")
        return [wire.came[handle] for handle in handles]

    def abort(self, handles: Sequence[int]) -> None:
        self._wire.put(AbortSequences(list(handles)))

    def close(self) -> None:
        self._wire.put(StopCore())
        self._thread.join()


def structured() -> list[Figure]:
    from tests.bench.models import SHAPES, make_model

    figures: list[Figure] = []
    for vocab_len in VOCABULARIES:
        with tempfile.TemporaryDirectory() as directory:
            shape = dataclasses.replace(SHAPES["0.9M"], vocab=vocab_len)
            core = _Core(make_model(Path(directory) / "model", shape), vocab_len)
            try:
                figures += _throughput(core, vocab_len) + _firsts(core, vocab_len) + _victims(core, vocab_len)
            finally:
                core.close()
    return figures


def schema(name: str) -> str:
    """The grammar of orders without an end, in which one property has this name."""
    properties = {
        name: {"type": "string", "maxLength": 24},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["small", "medium", "large"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 4},
        "price": {"type": "number"},
        "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 40}]},
    }
    order = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    orders = {"type": "array", "items": order, "minItems": 1000}
    return llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(orders), overrides={"whitespace_pattern": WHITESPACE}
    )


def hostile(number: int) -> str:
    """A grammar that takes some 40 ms to compile, and 10 to 15 ms for each mask until it breaks a limit."""
    return llguidance.LLMatcher.grammar_from_regex(f"(((x{{100}}){{100}}){{100}}){{{number + 2}}}")


def _throughput(core: _Core, vocab_len: int) -> list[Figure]:
    rates: dict[str, list[float]] = {"": [], schema("name"): []}
    for turn in range(TURNS + 1):
        for grammar, found in sorted(rates.items(), reverse=bool(turn % 2)):
            began_s = time.perf_counter()
            handles = [core.add(grammar, tokens=TOKENS, temperature=1.0) for _ in range(STREAMS)]
            came = core.wait(handles)
            if turn:  # the first warms up
                found.append(STREAMS * TOKENS / (max(times[-1] for times in came) - began_s))
    free, held = rates.values()
    name = f"structured, {vocab_len} tokens, {STREAMS} streams"
    ratio = statistics.median(b / a for a, b in zip(free, held, strict=True))
    return [
        figure(f"{name}: tokens/s without a schema", statistics.median(free), "/s"),
        figure(f"{name}: tokens/s with a schema", statistics.median(held), "/s"),
        figure(f"{name}: with / without", ratio, "x", TOKENS_TARGET),
    ]


def _firsts(core: _Core, vocab_len: int) -> list[Figure]:
    """What a schema that nobody has seen adds to the first token."""

    def first_ms(grammar: str) -> float:
        began_s = time.perf_counter()
        [times] = core.wait([core.add(grammar, tokens=1)])
        return 1e3 * (times[0] - began_s)

    free, held, door = list[float](), list[float](), list[float]()
    for number in range(FIRSTS):
        free.append(first_ms(""))
        held.append(first_ms(schema(f"name_{number}")))
        began_s = time.perf_counter()
        core.compile(schema(f"other_{number}"))
        door.append(1e3 * (time.perf_counter() - began_s))
    name = f"structured, {vocab_len} tokens: TTFT p50"
    added_ms = quantile(held, 0.5) - quantile(free, 0.5)
    return [
        figure(f"{name} without a schema", quantile(free, 0.5), "ms"),
        figure(f"{name}, added by a new schema in the core", added_ms, "ms"),
        figure(f"{name}, added in core and door", added_ms + quantile(door, 0.5), "ms", FIRST_TARGET),
    ]


def _victims(core: _Core, vocab_len: int) -> list[Figure]:
    """The gaps of streams beside another tenant's hostile grammars."""

    def gaps_ms(beside: Callable[[], list[int]]) -> list[float]:
        others = beside()
        handles = [core.add(schema("name"), tokens=2 * TOKENS, tenant="victim") for _ in range(VICTIMS)]
        came = core.wait(handles)
        core.abort(others)
        return [1e3 * (b - a) for times in came for a, b in itertools.pairwise(times)]

    def hostiles() -> list[int]:
        grammars = (hostile(next(numbers)) for _ in range(HOSTILES))
        return [core.add(grammar, tokens=512, tenant="hostile", temperature=1.0) for grammar in grammars]

    numbers = itertools.count()
    alone, beside = list[float](), list[float]()
    for _ in range(TURNS // 2):
        alone += gaps_ms(list)
        beside += gaps_ms(hostiles)
    name = f"structured, {vocab_len} tokens: p99 gap of {VICTIMS} streams"
    alone_ms, beside_ms = quantile(alone, 0.99), quantile(beside, 0.99)
    return [
        figure(f"{name}, alone", alone_ms, "ms"),
        figure(
            f"{name}, beside hostile grammars",
            beside_ms,
            "ms",
            at_most(round(1.5 * alone_ms + VICTIM_TARGET_MS, 1)),
        ),
    ]
