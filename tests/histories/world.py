"""A gateway, its engines and their callers in one event loop, run until every task is done."""

from __future__ import annotations

import asyncio
import io
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final
from unittest import mock

import aiohappyeyeballs
import msgspec

import engine.api.answer.exchange
import engine.api.answer.outputs
import engine.api.core.parts
import engine.api.http.app
import engine.api.http.generate
import engine.api.http.http2_server
import engine.api.http.server
import gateway.client.answer
import gateway.client.connection
import gateway.client.deadlines
import gateway.listen.listener
import gateway.relay.engines
import gateway.relay.stream
import gateway.request.exchange
import gateway.request.record
import gateway.routing.replicas
import shared.fairness.fair_threads
import shared.http2.stream
import shared.process.clock
from engine.api.ask.model import load_model
from engine.api.http.server import Engine
from engine.config import EngineConfig, ModelTokens
from engine.core.scheduler_config import SchedulerConfig
from gateway.admission.memory_store import Ledger, MemoryStore
from gateway.admission.quota import Account
from gateway.app import Gateway
from gateway.config.whole import KeyConfig, load
from gateway.identity.keys import hash_key
from gateway.routing.maglev import Table
from shared.process import logs
from shared.text.tokenizer import Tokenizer, TokenizerBundle
from shared.wire.ids import KeyId
from tests.fake_runner import runner_info
from tests.histories.caller import LEAST_STAY_S, Caller, call
from tests.histories.core import Computed, InProcessCore
from tests.histories.draw import MODEL, End, History, Setting, Trouble
from tests.histories.virtual import VirtualLoop, accepting, start_connection
from tests.uncollected import uncollected

PATIENCE_S: Final = 120.0
"""The virtual time that a world may take, in seconds."""
TURN_S: Final = 1.0
"""The virtual time after an end in which all that it held has been released, in seconds."""
CONTEXT_LEN: Final = 256
HANG_S: Final = 1.0
VECTOR_LEN: Final = 2
OF_A_REQUEST: Final = (
    gateway.request.exchange.Exchange,
    gateway.request.record.ExchangeRecord,
    gateway.client.answer.Client,
    gateway.relay.stream.Progress,
    gateway.client.deadlines.Watch,
    engine.api.answer.exchange.EngineExchange,
    engine.api.http.generate.Arrival,
    engine.api.http.generate.Generation,
    engine.api.answer.outputs.ChoiceOutput,
    engine.api.answer.outputs.RequestOutput,
    engine.api.core.parts.Parts,
    engine.api.http.http2_server.ServerRequest,
    engine.api.http.http2_server.ServerResponder,
    shared.http2.stream.Stream,
)
"""The types of objects that are made for one request, and must be gone with it."""

Line = dict[str, Any]


class LoopClock:
    """A `shared.process.clock.Clock` of the loop's virtual time."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.monotonic = loop.time
        self.call_at = loop.call_at

    def wall(self) -> float:
        return 1_700_000_000.0 + self.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class LoopPool:
    """The replacement of a thread pool: work is done in the loop, a moment later."""

    def __init__(self, *_: object, **__: object) -> None:
        self._rng = random.Random(0)

    def submit(self, work: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(self._rng.choice([0.0, 0.002, 0.05]), work)

    def shutdown(self, **_: object) -> None:
        pass


@dataclass(slots=True)
class Replica:
    engine: Engine
    core: InProcessCore
    is_gone: bool = False
    is_stopped: bool = False
    """Whether it was stopped in good order; a killed one is stopped at the end, to clean up."""

    @property
    def is_idle(self) -> bool:
        state = self.engine.state
        return not (state._working or state.core.live or self.engine.server.http2_streams)


@dataclass(slots=True)
class Remains:
    """The results of a world: its log lines, its accounts, and objects that are left."""

    setting: Setting
    callers: dict[str, Caller] = field(default_factory=dict)
    """The callers by request id."""
    gateway_lines: list[Line] = field(default_factory=list)
    engine_lines: list[Line] = field(default_factory=list)
    errors: list[Line] = field(default_factory=list)
    computed: list[dict[str, Computed]] = field(default_factory=list)
    """The computed tokens of each replica, by request id."""
    uncharged: Counter[str] = field(default_factory=Counter)
    """The tokens that the engines name as charged to nobody, by reason."""
    generated: int = 0
    """The tokens that the engines say were sampled."""
    torn: set[str] = field(default_factory=set)
    """Requests that were in progress when an engine's connections were cut."""
    troubled: set[Trouble] = field(default_factory=set)
    usages: dict[tuple[str, str], Account] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    leases: int = 0
    kept: list[str] = field(default_factory=list)
    """Descriptions of objects that were made for requests and still exist."""
    preemptions: int = 0
    hit_tokens: int = 0


def run_world(setting: Setting, model_dir: Path) -> Remains:
    """Run a world from its first request's arrival to its last one's end."""
    rng = random.Random(setting.seed)
    remains, stream = Remains(setting), io.StringIO()
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(rng)) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        logs.configure("world", level="info", stream=stream)
        try:
            with _in_virtual_time(loop):
                runner.run(_World(setting, loop, model_dir, remains).run())
        finally:
            logs.close()
    for text in stream.getvalue().splitlines():
        line = msgspec.json.decode(text)
        if line["event"] == "request.completed" and line["method"] == "POST":
            of_gateway = line["logger"].startswith("gateway")
            (remains.gateway_lines if of_gateway else remains.engine_lines).append(line)
        elif line["level"] == "error":
            remains.errors.append(line)
    return remains


@contextmanager
def _in_virtual_time(loop: VirtualLoop) -> Iterator[None]:
    """Replace the machine's threads and clocks by the loop's."""

    async def inline(work: Callable[[], Path]) -> Path:
        return work()

    with ExitStack() as stack:
        for target, name, new in (
            (shared.process.clock._SystemClock, "monotonic", staticmethod(loop.time)),
            (shared.fairness.fair_threads, "ThreadPoolExecutor", LoopPool),
            (aiohappyeyeballs, "start_connection", start_connection),
            (gateway.listen.listener, "FairAccepting", accepting),
            (gateway.client.connection, "WRITE_BUFFER_LEN", 1024),
            (engine.api.http.app, "Accepting", accepting),
            (engine.api.http.server, "_in_daemon_thread", inline),
            (engine.api.http.server, "load_model", lru_cache(load_model)),
            (gateway.relay.engines, "_warm", _tokenizer),
            (gateway.routing.replicas, "Table", _table),
        ):
            stack.enter_context(mock.patch.object(target, name, new))
        yield


_tokenizers: dict[str, Tokenizer] = {}
"""Tokenizers by hash, made once for all worlds."""


def _tokenizer(bundle: TokenizerBundle) -> Tokenizer:
    if bundle.hash not in _tokenizers:
        made = Tokenizer(bundle)  # whose hash covers what its templates take, too
        _tokenizers[bundle.hash] = _tokenizers[made.hash] = made
    return _tokenizers[bundle.hash]


def _table(names: Sequence[str], *, is_filled: bool = True) -> Table:
    """The table of replicas by number: their ports are the machine's, and would decide where requests go."""
    return Table([f"engine-{i}" for i in range(len(names))], is_filled=is_filled)


async def until(condition: Callable[[], bool]) -> None:
    """Advance the time by virtual milliseconds until the condition holds."""
    while not condition():  # noqa: ASYNC110 -- what it watches sets no event
        await asyncio.sleep(0.001)


class _World:
    def __init__(self, setting: Setting, loop: VirtualLoop, model_dir: Path, remains: Remains) -> None:
        self._setting = setting
        self._loop = loop
        self._clock = LoopClock(loop)
        self._model_dir = model_dir
        self._remains = remains
        self._replicas: list[Replica] = []
        self._gateway: Gateway | None = None

    async def run(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(self._setting.replicas):
                self._replicas.append(await self._start_engine())
            urls = [f"http://127.0.0.1:{replica.engine.port}" for replica in self._replicas]
            config = load(self._setting.gateway(urls), {})
            async with Gateway(config, env={}, clock=self._clock) as gateway:
                self._gateway = gateway
                await until(lambda: gateway.engines.of(config.models[0]).profile is not None)
                await self._live(gateway)
                self._take_stock(gateway)
            for replica in self._replicas:
                if not replica.is_stopped:
                    await replica.engine.stop()

    async def _live(self, gateway: Gateway) -> None:
        setting = self._setting
        with uncollected(*OF_A_REQUEST) as left:
            own = [one for one in setting.histories if one.end is End.REVOKED]
            gateway.accounts.put_keys([KeyConfig(one.key, hash_key(one.key), one.tenant) for one in own])
            async with asyncio.TaskGroup() as tasks:
                for history in own:
                    tasks.create_task(self._revoke(gateway, history))
                for history in setting.histories:
                    tasks.create_task(self._call(gateway.port, history))
                    if history.end in (End.ABORTS_AT_GATEWAY, End.ABORTS_AT_ENGINE):
                        tasks.create_task(self._abort(gateway, history))
                for at_s, trouble, number in setting.troubles:
                    replica = self._replicas[number % len(self._replicas)]
                    tasks.create_task(self._trouble(at_s, trouble, replica))
            await until(lambda: not len(gateway.live) and all(one.is_idle for one in self._replicas))
            await asyncio.sleep(TURN_S)
            for one in left():
                self._remains.kept.append(_described(one))

    # -- who is there -----------------------------------------------------------------------------

    async def _start_engine(self) -> Replica:
        setting = self._setting
        config = EngineConfig(
            model="tiny",
            served_model_name=MODEL,
            port=0,
            max_num_seqs=setting.slots,
            max_step_tokens=setting.step_tokens_max,
            max_queue_len=setting.max_queue_len,
            stall_deadline_s=setting.stall_deadline_s,
            drain_timeout_s=0.1,
            core_timeout_s=0.3,
            embeddings="mean",
        )
        cores: list[InProcessCore] = []

        def make_core(_: EngineConfig, __: ModelTokens) -> InProcessCore:
            cores.append(self._make_core())
            return cores[0]

        started = Engine(config, lambda _: self._model_dir, make_core, self._clock)
        await started.start()
        return Replica(started, cores[0])

    def _make_core(self) -> InProcessCore:
        setting = self._setting
        tokenizer = _tokenizer(TokenizerBundle.from_dir(self._model_dir))
        info = runner_info(
            pages=setting.pages,
            page_size=setting.page_size,
            slots=setting.slots,
            max_model_len=CONTEXT_LEN,
            vocab_size=tokenizer.vocab_size,
            drafts_max=setting.drafts_max,
            vector_len=VECTOR_LEN,
        )
        config = SchedulerConfig(
            step_tokens_max=setting.step_tokens_max,
            prefix_cache=setting.prefix_cache,
            stall_deadline_s=setting.stall_deadline_s,
        )
        return InProcessCore(info, config, self._clock, step_s=setting.step_s, overlap=setting.overlap)

    # -- what happens -----------------------------------------------------------------------------

    async def _call(self, port: int, history: History) -> None:
        await asyncio.sleep(history.at_s)
        try:
            self._remains.callers[history.request_id] = await call(self._loop, port, history)
        except ConnectionRefusedError:
            return  # the gateway is gone already

    async def _abort(self, gateway: Gateway, history: History) -> None:
        await asyncio.sleep(history.at_s + history.after_s)
        if history.end is End.ABORTS_AT_ENGINE:
            for replica in self._replicas:
                replica.engine.state.abort(history.request_id)  # type: ignore[arg-type]
            return
        head = f"DELETE /v1/requests/{history.request_id} HTTP/1.1\r\nhost: gateway\r\n"
        head += f"authorization: Bearer {history.tenant}\r\n\r\n"
        try:
            transport, caller = await self._loop.create_connection(Caller, port=gateway.port)
        except ConnectionRefusedError:
            return  # the gateway drains, and listens no more
        transport.write(head.encode())
        assert isinstance(caller, Caller)
        await caller.until_over()
        transport.abort()

    async def _revoke(self, gateway: Gateway, history: History) -> None:
        """Revoke a key of the directory, as what follows the directory does."""
        await asyncio.sleep(history.at_s + LEAST_STAY_S + history.after_s)
        gateway.accounts.put_keys((), [KeyId(history.key)])

    async def _trouble(self, at_s: float, trouble: Trouble, replica: Replica) -> None:
        await asyncio.sleep(at_s)
        if replica.is_gone:
            return
        self._remains.troubled.add(trouble)
        match trouble:
            case Trouble.CUT:
                self._tear(replica)
            case Trouble.KILLED:
                replica.is_gone = True
                self._loop.network.unlisten(replica.engine.port)
                self._tear(replica)
                replica.core.die("the core process was ended by SIGKILL")
            case Trouble.CORE_DIES:
                replica.core.die("the core process was ended by SIGKILL")
            case Trouble.CORE_FAILS:
                replica.core.runner.is_broken = True
            case Trouble.HANGS:
                replica.core.hangs_s = HANG_S
            case Trouble.DRAINS | Trouble.STOPS if not replica.engine.state.lifecycle.is_ready:
                return  # it has failed, or drains already
            case Trouble.DRAINS:
                await replica.engine.drain()
            case Trouble.STOPS:
                await replica.engine.drain()
                replica.is_gone = True
                self._mark_torn()
                replica.is_stopped = True
                await replica.engine.stop()
            case Trouble.GATEWAY_DRAINS:
                assert self._gateway is not None
                await self._gateway.drain()

    def _tear(self, replica: Replica) -> None:
        self._mark_torn()
        self._loop.network.cut(replica.engine.port)

    def _mark_torn(self) -> None:
        """Note the requests in progress, whose cost their engine may be unable to report."""
        assert self._gateway is not None
        self._remains.torn |= {str(one.record.request_id) for one in self._gateway.live._exchanges}

    # -- what is left -----------------------------------------------------------------------------

    def _take_stock(self, gateway: Gateway) -> None:
        store, remains = gateway.quotas, self._remains
        assert isinstance(store, MemoryStore)
        assert all(one.view.is_idle for one in gateway.replicas._by_url.values())
        remains.usages = {(str(scope), id_): usage for (scope, id_, _), usage in store._accounts.items()}
        remains.ledger, remains.leases = store.ledger, store.live
        for replica in self._replicas:
            remains.computed.append(replica.core.computed)
            metrics = replica.engine.state.metrics
            remains.generated += round(metrics.generated_tokens.value())
            for reason in ("late", "preempted", "choice", "draft"):
                remains.uncharged[reason] += round(metrics.uncharged_tokens.value(reason))
            stats = replica.core.scheduler.stats()
            remains.preemptions += stats.preemptions
            remains.hit_tokens += stats.prefix_hit_tokens


def _described(one: object) -> str:
    """The type of an object, and its request id where it has one."""
    record = getattr(one, "record", one)
    return f"{type(one).__module__}.{type(one).__qualname__} {getattr(record, 'request_id', '')}".rstrip()
