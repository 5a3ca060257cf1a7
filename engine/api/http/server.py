"""The life of the API process: listen, load, serve, drain.

STARTING  probes are answered; the model is found, the tokenizer read, the core started
READY     until SIGTERM, or until the core dies
DRAINING  no new work; open answers may finish until the drain's time is over, then they end with
          an error of their own; then the core is told to stop
FAILED    every request is refused; the process stays, so that /livez can say so, or with
          `exit_on_failure` it ends, once the open requests have had their errors
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import gc
import math
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from engine.api.ask.engine_state import EngineState
from engine.api.ask.model import UnusableModel, load_model
from engine.api.core.client import CoreClient, CoreLink
from engine.api.http.app import HttpServer
from engine.api.http.service import Service
from engine.api.told.metrics import EngineMetrics
from engine.api.told.vllm_metrics import VllmNames
from engine.config import EngineConfig, ModelTokens
from shared.process import descriptors, logs, tls
from shared.process.arguments import cannot_listen
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.exit_codes import ExitCode
from shared.process.lifecycle import Phase, on_stop_signals
from shared.process.loops import loop_name, watch_lag
from shared.process.renewable_tls import RenewableTls
from shared.telemetry.otlp import tracing_of
from shared.text.tokenizer import UnusableTokenizer
from shared.wire import engine_words
from shared.wire.errors import NotReady
from shared.wire.load_report import PUSH_CHANGED_S, LoadReport, encode_load

CORE_STOP_S: Final = 5.0
"""How long the core may take to end after it was told to, in seconds."""
UNWIND_S: Final = 2.0
"""How long requests that the drain cut off may take to tell their clients, in seconds."""

log = logs.get(__name__)

Resolve = Callable[[str], Path]
"""Turns a hub id or a path into a model directory. May block. Raises StartFailed."""
MakeLink = Callable[[EngineConfig, ModelTokens], CoreLink]


class StartFailed(Exception):
    """The engine cannot serve. The message says why, for the operator."""


class Engine:
    """The parts of the API process. They do not need a process of their own: a test runs them in its own
    event loop."""

    def __init__(
        self, config: EngineConfig, resolve: Resolve, make_link: MakeLink, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._config = config
        self._resolve = resolve
        self._make_link = make_link
        self._clock = clock
        names = VllmNames(config.name, config.prefix_cache) if config.vllm_metrics else None
        metrics = EngineMetrics(config.max_step_tokens, names)
        core = CoreClient(
            queue_len_max=config.max_queue_len,
            queue_tokens_max=config.max_queue_tokens,
            core_timeout_s=config.core_timeout_s,
            metrics=metrics,
            clock=clock,
        )
        self.state = EngineState(
            config, core, metrics, clock, tracing_of(config.tracing, "penstock-engine", os.environ)
        )
        self._tls = _tls(config, clock)
        self.server = HttpServer(
            Service(self.state).handle,
            host=config.host,
            port=config.port,
            keepalive_timeout_s=config.keepalive_timeout_s,
            tls=None if self._tls is None else self._tls.context,
        )
        self._probes = _probe_server(config, self.state)
        self._tls_task: asyncio.Task[None] | None = None
        metrics.http2_streams.set_function(lambda: self.server.http2_streams)
        metrics.held_bytes.set_function(lambda: self.state.memory.held)
        self.port = 0
        """The port that the engine listens on; 0 until `start` has bound it."""
        self.probe_port: int | None = None
        """The port for probes and metrics alone. None until `start` has bound it, and where there is none."""
        self._core_task: asyncio.Task[None] | None = None
        self._push_task: asyncio.Task[None] | None = None
        self._failed = asyncio.Event()

    async def start(self) -> None:
        """Start the engine. Returns once it takes requests. Raises StartFailed."""
        config, state = self._config, self.state
        try:
            self.port = await self.server.start()
        except OSError as error:
            raise StartFailed(cannot_listen(config.host, config.port, error)) from error
        if self._probes is not None:
            try:
                self.probe_port = await self._probes.start()
            except OSError as error:
                said = cannot_listen(config.host, config.probe_port or 0, error, option="--probe-port")
                raise StartFailed(said) from error
        if self._tls is not None:
            self._tls_task = asyncio.create_task(self._tls.watch(), name="certificates")
        log.info("engine.listening", host=config.host, port=self.port, probe_port=self.probe_port)
        self._push_task = asyncio.create_task(self._push_loads(), name="push-loads")
        directory = await _in_daemon_thread(lambda: self._resolve(config.model))
        log.info("engine.model", directory=directory)
        try:
            state.model = await asyncio.to_thread(
                load_model,
                directory,
                name=config.name,
                created=int(self._clock.wall()),
                template_arguments=config.template_names,
                template_defaults=config.template_defaults,
                answer_format=config.answer_format,
                embeddings=config.embeddings,
                embedding_dimensions=config.embedding_dimensions,
                reranker=config.reranker,
            )
        except (UnusableTokenizer, UnusableModel) as error:
            raise StartFailed(str(error)) from error
        format_ = state.model.answer_format
        if format_ is not None:
            log.info("engine.answer_format", name=format_.name, tools=format_.calls is not None)
        link = self._make_link(dataclasses.replace(config, model=str(directory)), state.model.tokens)
        self._core_task = asyncio.create_task(self._follow_core(link), name="core")
        try:
            async with asyncio.timeout(config.startup_timeout_s):
                await state.core.settled.wait()
        except TimeoutError:
            raise StartFailed(
                f"the core was not ready after {config.startup_timeout_s:g} s (--startup-timeout-s)"
            ) from None
        if state.core.failure is not None:
            raise StartFailed(state.core.failure)
        state.lifecycle.to(Phase.READY)
        log.info("engine.ready", port=self.port, model=config.name, loop=loop_name())

    async def drain(self, hurry: asyncio.Event | None = None) -> bool:
        """Let the open answers finish, for `drain_timeout_s` and until `hurry` is set, and end the
        others. Returns whether all have finished."""
        state = self.state
        if state.lifecycle.phase is Phase.FAILED:
            return False
        state.lifecycle.to(Phase.DRAINING)
        self._push_load()
        self.server.retire()
        log.info("engine.draining", open_sequences=state.core.live)
        if await _idle(state, self._config.drain_timeout_s, hurry):
            return True
        log.warning("engine.drain_cut", open_sequences=state.core.live)
        state.core.shut(NotReady(engine_words.STOPPED))
        if not await _idle(state, UNWIND_S, None):
            log.warning("engine.unwind_cut")
        return False

    async def _push_loads(self) -> None:
        """Tell gateways the load at intervals, for as long as the process serves: sooner where it has
        changed. An idle engine sleeps until it is told something, or until its next report is due."""
        told, told_s = LoadReport(), -math.inf
        while True:
            self.state.core.stirred.clear()
            load, now_s = self.state.load(), self._clock.monotonic()
            if load != told or now_s - told_s >= load.interval_ms / 1000:
                self._push_load()
                told, told_s = load, now_s
            await self._clock.sleep(PUSH_CHANGED_S)
            if load.is_idle:
                due = asyncio.ensure_future(self._clock.sleep(load.interval_ms / 1000 - PUSH_CHANGED_S))
                await _first(due, self.state.core.stirred, timeout_s=None)
                due.cancel()

    def _push_load(self) -> None:
        self.server.push_load(encode_load(self.state.load()))

    async def stop(self) -> None:
        """End the core and the server, however far the start had come."""
        state = self.state
        if self._push_task is not None:
            self._push_task.cancel()
        await asyncio.to_thread(state.tracing.close)
        await state.core.stop(CORE_STOP_S)
        if self._core_task is not None:
            self._core_task.cancel()
            await asyncio.gather(self._core_task, return_exceptions=True)
        await self.server.stop()
        if self._tls_task is not None:
            self._tls_task.cancel()
        if self._probes is not None:
            await self._probes.stop()
        state.threads.close()
        if state.lifecycle.phase is Phase.DRAINING:
            state.lifecycle.to(Phase.STOPPED)
        log.info("engine.stopped")

    async def _follow_core(self, link: CoreLink) -> None:
        state = self.state
        await state.core.run(link)
        if state.core.failure is not None and state.lifecycle.phase is not Phase.STOPPED:
            state.lifecycle.to(Phase.FAILED, state.core.failure)
            self._failed.set()

    async def serve_until(self, stop: asyncio.Event) -> None:
        """Wait until `stop` is set. With `exit_on_failure`, also return when the core has died, once
        every open request has been answered, or after `UNWIND_S`."""
        if not self._config.exit_on_failure:
            await stop.wait()
            return
        failed = asyncio.create_task(self._failed.wait())
        await _first(failed, stop, timeout_s=None)
        failed.cancel()
        if self._failed.is_set() and not await _idle(self.state, UNWIND_S, None):
            log.warning("engine.unwind_cut")


def _probe_server(config: EngineConfig, state: EngineState) -> HttpServer | None:
    """The listener for probes and metrics alone, where there is one."""
    if config.probe_port is None:
        return None
    return HttpServer(
        Service(state, is_for_operators=True).handle,
        host=config.host,
        port=config.probe_port,
        keepalive_timeout_s=config.keepalive_timeout_s,
        is_for_operators=True,
    )


def _tls(config: EngineConfig, clock: Clock) -> RenewableTls | None:
    cert, key, client_ca = config.tls_cert, config.tls_key, config.tls_client_ca
    if cert is None or key is None:
        return None
    load = partial(tls.server_context, cert, key, client_ca=client_ca, protocols=(tls.HTTP2, tls.HTTP1))
    try:
        return RenewableTls((cert, key, client_ca), load, is_server=True, clock=clock)
    except tls.UnusableTls as error:
        raise StartFailed(str(error)) from error


async def _in_daemon_thread(work: Callable[[], Path]) -> Path:
    """Run `work` in a daemon thread. A pool's thread would keep the process from ending while it
    downloads gigabytes."""
    done: concurrent.futures.Future[Path] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # raised again where the future is awaited
            done.set_exception(error)

    threading.Thread(target=run, name="resolve", daemon=True).start()
    return await asyncio.wrap_future(done)


async def serve(
    config: EngineConfig, resolve: Resolve, make_link: MakeLink, tell: Callable[[str], None] = lambda _: None
) -> ExitCode:
    """Run the engine until a stop signal; a second one ends the drain. `tell` hears why it does not start."""
    try:
        engine = Engine(config, resolve, make_link)
    except StartFailed as error:
        _start_failed(error, tell)
        return ExitCode.FAILED
    stop, hurry = asyncio.Event(), asyncio.Event()
    on_stop_signals(lambda _: (hurry if stop.is_set() else stop).set())
    watch_lag()
    descriptors.raise_limit()
    start = asyncio.create_task(engine.start(), name="start")
    try:
        await _first(start, stop, timeout_s=None)
        if start.done():
            start.result()
            gc.collect()
            gc.freeze()  # a full collection would look through all modules, and stop every stream for 40 ms
            await engine.serve_until(stop)
        is_clean = await engine.drain(hurry)
    except (StartFailed, OSError) as error:
        _start_failed(error, tell)
        return ExitCode.FAILED
    finally:
        start.cancel()
        await engine.stop()
    if engine.state.lifecycle.phase is Phase.FAILED:
        return ExitCode.CORE_DIED
    return ExitCode.CLEAN if is_clean else ExitCode.DRAIN_CUT


def _start_failed(error: Exception, tell: Callable[[str], None]) -> None:
    log.error("engine.start_failed", reason=str(error))
    tell(str(error))


async def _idle(state: EngineState, timeout_s: float, hurry: asyncio.Event | None) -> bool:
    """Wait for the last request to end, for at most `timeout_s` and until `hurry` is set. Returns whether
    it has ended."""
    idle = asyncio.create_task(state.wait_idle())
    try:
        await _first(idle, hurry or asyncio.Event(), timeout_s=timeout_s)
        return idle.done()
    finally:
        idle.cancel()


async def _first(task: asyncio.Task[Any], event: asyncio.Event, *, timeout_s: float | None) -> None:
    """Wait for the task or the event, for at most `timeout_s`; None for no limit. The task is left
    running."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiting}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
