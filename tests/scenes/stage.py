"""A stage for scenes: a real gateway and real engines, whose cores plan with the real scheduler and compute
with the fake runner, in one event loop of virtual time (`tests.histories.virtual`).

Only a step takes time: `BASE_S`, `PROMPT_TOKEN_S` for each prompt token and `ROW_S` for each row. So every
wait and every gap has a length that is known beforehand, on any machine.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

import msgspec

import shared.fairness.fair_threads
from engine.api.http.server import Engine
from engine.config import EngineConfig, ModelTokens
from engine.contract.messages import Plan, ServiceClass
from engine.core.scheduler_config import SchedulerConfig
from gateway.admission.memory_store import MemoryStore
from gateway.app import Gateway
from gateway.config.whole import load
from gateway.directory.accounts import by_keys
from gateway.identity.caller import Caller as Claims
from gateway.identity.caller import Identity, Principal
from gateway.identity.keys import hash_key
from shared.apis.embeddings import INPUTS_MAX
from shared.fairness.fair_share import held_max
from shared.process import logs
from shared.text.tokenizer import TokenizerBundle
from shared.trace.join import join
from shared.trace.log_reading import LogReading
from shared.trace.request_text import table
from shared.trace.why import Why, parts, reasons
from shared.wire.completed_line import EngineLine, GatewayLine, Line
from tests.fake_runner import runner_info
from tests.histories.caller import Caller
from tests.histories.core import Broken, InProcessCore
from tests.histories.virtual import Transport, VirtualLoop
from tests.histories.world import LoopClock, LoopPool, _in_virtual_time, _tokenizer, until

MODEL: Final = "tiny"
PATIENCE_S: Final = 300.0
"""The virtual time that a scene may take, in seconds."""
BASE_S: Final = 0.005
PROMPT_TOKEN_S: Final = 0.001
ROW_S: Final = 0.0002
CONTEXT_LEN: Final = 2048
VECTOR_LEN: Final = 4


class SceneCore(InProcessCore):
    """A core whose steps take as long as what they compute."""

    async def _run(self) -> None:
        while True:
            await self._wait()
            if not self._loop._take_in():
                return
            try:
                launched = self._loop._launch_next()
            except Broken:
                return
            self._send()
            if launched is not None:
                hangs_s, self.hangs_s = self.hangs_s, 0.0
                await asyncio.sleep(step_s(launched.plan) + hangs_s)
                self._loop._land(launched)
            self._loop._emit()
            self._send()

    def _send(self) -> None:
        for message in self._outbox.messages:
            self._tell(message)
        self._outbox.messages.clear()


def step_s(plan: Plan) -> float:
    """The time that a step takes, in seconds."""
    prompt_tokens = sum(length for length in plan.lengths if length > 1)
    return BASE_S + PROMPT_TOKEN_S * prompt_tokens + ROW_S * len(plan.lengths)


class SlowPool(LoopPool):
    """A pool whose threads take two seconds for each slice of work."""

    def submit(self, work: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(2.0, work)


SLOW_CALL_S: Final = 2.0


class SlowStore:
    """Quotas in memory, behind a network on which some calls take `SLOW_CALL_S`."""

    is_well = is_partly_well = True

    def __init__(self, slow: frozenset[str]) -> None:
        self._store = MemoryStore()
        self._slow = slow

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(SLOW_CALL_S if name in self._slow else 0.0)
            return await getattr(self._store, name)(*args, **kwargs)

        return call

    def reaches(self, _: object) -> bool:
        """It is never down."""
        return True

    async def post(self, *_: Any) -> None:
        """What is posted is not looked at here."""


class SlowIdentity:
    """Callers who are found after `SLOW_CALL_S`."""

    def __init__(self, found: Identity) -> None:
        self._found = found

    async def identify(self, caller: Claims, now_s: float) -> Principal:
        await asyncio.sleep(SLOW_CALL_S)
        return await self._found.identify(caller, now_s)


@dataclass(frozen=True, slots=True)
class Setting:
    """What the services of a scene have."""

    pages: int = 400
    page_size: int = 4
    host_pages: int = 0
    slots: int = 4
    step_tokens_max: int = 512
    max_queue_len: int = 100
    gap_target_s: float = math.inf
    engines: int = 1
    tenant: dict[str, Any] = field(default_factory=dict)
    """Settings of the tenant `acme`."""
    timeouts: dict[str, float] = field(default_factory=dict)
    """Settings of `timeouts` that differ from the stage's."""
    pool: type[LoopPool] = LoopPool
    slow: frozenset[str] = frozenset()
    """What takes `SLOW_CALL_S`: `identify`, or a call of the quota store."""

    def gateway(self, urls: list[str]) -> dict[str, Any]:
        tenants = [{"id": "acme", **self.tenant}, {"id": "other"}]
        return {
            "listen": {"port": 0},
            "models": [{"name": MODEL, "replicas": urls}],
            "tenants": tenants,
            "keys": [{"id": t["id"], "hash": hash_key(t["id"]), "tenant": t["id"]} for t in tenants],
            "timeouts": {"total_s": 200.0, "first_token_s": 100.0, "slow_client_s": 100.0, **self.timeouts},
        }

    def replaced(self) -> dict[str, Any]:
        """The gateway's parts that are slow."""
        parts: dict[str, Any] = {}
        if "identify" in self.slow:
            parts["identity_of"] = lambda *given: SlowIdentity(by_keys(*given))
        if self.slow - {"identify"}:
            parts["quotas"] = SlowStore(self.slow)
        return parts


@dataclass(slots=True)
class Client:
    """A client's connection, and its answer so far."""

    transport: Transport
    caller: Caller

    async def leave(self) -> None:
        self.transport.abort()

    async def until_event(self, number: int) -> None:
        await self.caller.until_event(number)

    async def until_over(self) -> None:
        await self.caller.until_over()


class Stage:
    """The services, and what may be done to them."""

    def __init__(self, setting: Setting, loop: VirtualLoop, model_dir: Path) -> None:
        self._setting = setting
        self._loop = loop
        self._clock = LoopClock(loop)
        self._model_dir = model_dir
        self.engines: list[Engine] = []
        self.cores: list[SceneCore] = []
        self.port = 0

    async def run(self, scene: Callable[[Stage], Awaitable[None]]) -> None:
        async with asyncio.timeout(PATIENCE_S), AsyncExitStack() as stack:
            for _ in range(self._setting.engines):
                engine = self._make_engine()
                stack.push_async_callback(engine.stop)
                await engine.start()
                self.engines.append(engine)
            urls = [f"http://127.0.0.1:{engine.port}" for engine in self.engines]
            config = load(self._setting.gateway(urls), {})
            gateway = await stack.enter_async_context(
                Gateway(config, env={}, clock=self._clock, **self._setting.replaced())
            )
            await until(lambda: gateway.engines.of(config.models[0]).profile is not None)
            self.port = gateway.port
            await scene(self)
            await until(lambda: not len(gateway.live) and not any(e.state._working for e in self.engines))

    def _make_engine(self) -> Engine:
        setting = self._setting
        config = EngineConfig(
            model="tiny",
            served_model_name=MODEL,
            port=0,
            max_num_seqs=setting.slots,
            max_step_tokens=setting.step_tokens_max,
            max_queue_len=setting.max_queue_len,
            embeddings="mean",
        )

        def make_core(_: EngineConfig, __: ModelTokens) -> SceneCore:
            tokenizer = _tokenizer(TokenizerBundle.from_dir(self._model_dir))
            info = runner_info(
                pages=setting.pages,
                page_size=setting.page_size,
                slots=setting.slots,
                max_model_len=CONTEXT_LEN,
                vocab_size=tokenizer.vocab_size,
                host_pages=setting.host_pages,
                page_copy_s=0.0001 if setting.host_pages else 0.0,
                vector_len=VECTOR_LEN,
            )
            scheduler = SchedulerConfig(
                step_tokens_max=setting.step_tokens_max,
                queue_len_max=held_max(setting.max_queue_len, INPUTS_MAX),
                watermark=0.0,
                gap_targets_s=(setting.gap_target_s,) * len(ServiceClass),
            )
            core = SceneCore(info, scheduler, self._clock, step_s=0.0, overlap=False)
            self.cores.append(core)
            return core

        return Engine(config, lambda _: self._model_dir, make_core, self._clock)

    # -- what happens -----------------------------------------------------------------------------

    async def ask(
        self,
        request_id: str,
        prompt_len: int = 8,
        max_tokens: int = 4,
        *,
        tenant: str = "acme",
        headers: str = "",
        **fields: Any,
    ) -> Client:
        """Send a request for a stream of exactly so many tokens, over a connection of its own."""
        first = 3 + sum(request_id.encode()) % 90  # no two requests share a prefix
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": [first, *([7] * (prompt_len - 1))],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "seed": 5,
            **fields,
        }
        return await self.send(request_id, json.dumps(body).encode(), tenant=tenant, headers=headers)

    async def embed(self, request_id: str, inputs: int, length: int, *, tenant: str = "acme") -> Client:
        """Send a request for the vectors of so many inputs of so many tokens each."""
        first = 3 + sum(request_id.encode()) % 90
        body = {"model": MODEL, "input": [[first + at % 200] * length for at in range(inputs)]}
        return await self.send(request_id, json.dumps(body).encode(), tenant=tenant, path="/v1/embeddings")

    async def say(self, request_id: str, turns: Sequence[str], session: str = "s", **fields: Any) -> Client:
        """Send a chat of these turns, the caller's and the assistant's."""
        roles = ("user", "assistant")
        messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(turns)]
        body = {"model": MODEL, "messages": messages, "max_tokens": 2, "stream": True, **fields}
        headers, path = f"x-session-id: {session}\r\n", "/v1/chat/completions"
        return await self.send(request_id, json.dumps(body).encode(), headers=headers, path=path)

    async def send(
        self,
        request_id: str,
        content: bytes,
        *,
        tenant: str = "acme",
        length: int = 0,
        headers: str = "",
        path: str = "/v1/completions",
    ) -> Client:
        """Send a request with this body. `headers` are further ones, each with its line end."""
        transport, caller = await self._loop.create_connection(Caller, port=self.port)
        assert isinstance(caller, Caller)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {tenant}\r\n"
            f"x-request-id: {request_id}\r\ncontent-type: application/json\r\n{headers}"
            f"content-length: {length or len(content)}\r\n\r\n"
        )
        transport.write(head.encode() + content)
        return Client(transport, caller)

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def until_running(self, number: int, engine: int = 0) -> None:
        await until(lambda: len(self.cores[engine].scheduler._allocator.running) == number)

    def part(self, engine: int) -> None:
        """Cut an engine off: its connections break, and new ones are neither taken nor refused."""
        port = self.engines[engine].port
        self._loop.network.silent.add(port)
        self._loop.network.cut(port)

    def heal(self, engine: int) -> None:
        """Let an engine take new connections again, but for those that are being made."""
        self._loop.network.silent.discard(self.engines[engine].port)

    def kill(self, engine: int) -> None:
        """End an engine as a dead machine does."""
        port = self.engines[engine].port
        self._loop.network.unlisten(port)
        self._loop.network.cut(port)
        self.cores[engine].die("the core process was ended by SIGKILL")


@dataclass(frozen=True, slots=True)
class Told:
    """What both services' logs tell."""

    text: str
    """All of it."""

    def line(self, request_id: str, service: str) -> Line:
        """The one line of a request in a service."""
        kind = GatewayLine if service == "gateway" else EngineLine
        [line] = [line for line in self._reading(request_id).lines if isinstance(line, kind)]
        return line

    def trace(self, request_id: str) -> str:
        """What `penstock trace` shows of a request."""
        return "\n".join(table(join(self._reading(request_id).lines)))

    def why(self, request_id: str) -> list[Why]:
        """The reasons for a request's time, as `penstock trace` shows them. Its parts add up."""
        [trace] = join(self._reading(request_id).lines)
        if (line := trace.gateway) is not None:
            shares = sum(parts(line, trace.engines).values())
            assert abs(shares - line.total_ms) <= max(1.0, line.total_ms / 100)
        return list(reasons(trace.gateway, trace.engines))

    def _reading(self, request_id: str) -> LogReading:
        reading = LogReading(request_id)
        reading.read(io.BytesIO(self.text.encode()))
        assert not reading.damaged
        return reading


def play(scene: Callable[[Stage], Awaitable[None]], setting: Setting, model_dir: Path) -> Told:
    """Play a scene to its end. Returns what was logged of it."""
    stream = io.StringIO()
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(random.Random(1))) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        logs.configure("scene", level="info", stream=stream)
        try:
            with (
                _in_virtual_time(loop),
                mock.patch.object(shared.fairness.fair_threads, "ThreadPoolExecutor", setting.pool),
            ):
                runner.run(Stage(setting, loop, model_dir).run(scene))
        finally:
            logs.close()
    lines = [msgspec.json.decode(text) for text in stream.getvalue().splitlines()]
    for line in lines:
        assert line["level"] not in ("error", "critical") or line["event"].startswith("core."), line
        line["service"] = str(line.get("logger", "")).partition(".")[0]
    return Told("\n".join(json.dumps(line) for line in lines))
