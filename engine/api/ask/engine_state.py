"""The state that all handlers share: core, model, life of the service, and requests in progress."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import msgspec

from engine.api.ask.admission import Limits
from engine.api.ask.forms import Forms
from engine.api.ask.model import ServedModel
from engine.api.core.client import CoreClient
from engine.api.told.metrics import CoreReading, EngineMetrics
from engine.config import EngineConfig
from shared.apis.models import Model
from shared.fairness.fair_share import FairShare
from shared.fairness.fair_threads import FairThreads
from shared.fairness.fair_turns import FairTurns
from shared.process.build import version
from shared.process.clock import Clock
from shared.process.lifecycle import Lifecycle, Phase
from shared.process.probes import Health
from shared.telemetry.tracing import NO_TRACING, Tracing
from shared.wire import engine_words
from shared.wire.errors import ModelNotFound, NotReady
from shared.wire.ids import RequestId
from shared.wire.load_report import IDLE_INTERVAL_MS, LoadReport

IN_ONE_TURN: Final = 1
"""Requests that begin in one turn of the loop, and answers that end. Each may take milliseconds where
processes share the cores, as a hundred choices may begin or end with it."""


class Abortable(Protocol):
    def abort(self) -> None: ...


class EngineState:
    def __init__(
        self,
        config: EngineConfig,
        core: CoreClient,
        metrics: EngineMetrics,
        clock: Clock,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self.config = config
        self.tracing = tracing
        self.core = core
        self.metrics = metrics
        self.clock = clock
        self._started_s: Final = int(clock.wall())
        self.lifecycle = Lifecycle()
        self.health = Health(self.lifecycle, self._problems)
        self.threads = FairThreads(config.tokenizer_threads)
        self.begins = FairTurns(IN_ONE_TURN)
        """The turns in which requests begin."""
        self.ends = FairTurns(IN_ONE_TURN)
        """The turns in which answers end. Those of a crowd end together, and would hold the loop for as
        long as all of them take."""
        self.memory = FairShare(config.request_memory)
        """The bytes that requests hold in this process (bodies, prompts, answers), shared out between
        tenants."""
        self.forms: Final = Forms(self.threads, metrics)
        self.model: ServedModel | None = None
        self._working = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._generations: dict[RequestId, dict[Abortable, str]] = {}
        """The generations in progress, each with its tenant."""
        metrics.watch_core(self._reading)

    # -- what is served ---------------------------------------------------------------------------

    def ready_model(self) -> tuple[ServedModel, Limits]:
        """The model and its limits. Raises NotReady while no new work is taken."""
        match self.lifecycle.phase:
            case Phase.READY:
                assert self.model is not None
                assert self.core.info is not None
                self.core.check_answers()
                return self.model, Limits.of(self.core.info)
            case Phase.FAILED:  # nothing was computed, so another replica may be asked
                raise NotReady(engine_words.FAILED, detail=self.lifecycle.reason)
            case Phase.STARTING:
                raise NotReady(engine_words.STARTING, retry_after_s=2.0)
            case _:
                raise NotReady(engine_words.STOPPING, retry_after_s=1.0)

    @property
    def is_ready(self) -> bool:
        """True if new work is taken."""
        return self.lifecycle.is_ready and self.core.answers

    def _problems(self) -> list[str]:
        """For `/readyz`: why the engine failed, or that its core does not answer."""
        if self.lifecycle.phase is Phase.FAILED:
            return [self.lifecycle.reason]
        if self.lifecycle.is_ready and not self.core.answers:
            return [f"The core has not answered for {self.config.core_timeout_s:g} s."]
        return []

    def load(self) -> LoadReport:
        """The report by which gateways choose among engines."""
        flex, default, priority = self.core.waiting_tokens
        is_over = self.lifecycle.phase in (Phase.DRAINING, Phase.STOPPED)
        computed = self.core.steps.sums.prompt_tokens
        load = LoadReport((flex, default, priority), self.core.live, is_over, computed, self._started_s)
        return msgspec.structs.replace(load, interval_ms=IDLE_INTERVAL_MS) if load.is_idle else load

    def loaded_model(self) -> ServedModel:
        """The model, whose name and tokenizer are known before the core is ready. Raises NotReady
        before that."""
        if self.model is None:
            raise NotReady(engine_words.STARTING, retry_after_s=2.0)
        return self.model

    def check_name(self, name: str) -> None:
        if name != self.config.name:
            raise ModelNotFound(f"The model '{name[:128]}' does not exist here.", param="model")

    def card(self) -> Model:
        info = self.core.info
        room = None if info is None else Limits.of(info).room
        if self.model is None:
            return Model.of(self.config.name, 0, room)
        return Model.of(self.config.name, self.model.created, room, self.model.capabilities)

    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: it changes when the answers to the same seed may change."""
        assert self.model is not None
        info = self.core.info
        assert info is not None
        model = [self.config.model, self.config.revision, self.model.tokenizer.hash]
        computed = [version(), info.dtype, info.arithmetic]
        return "fp_" + hashlib.sha256(msgspec.json.encode([model, computed])).hexdigest()[:12]

    # -- requests in progress ----------------------------------------------------------------------

    @contextmanager
    def working(self) -> Iterator[None]:
        """A context that a drain waits for."""
        self._working += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._working -= 1
            if not self._working:
                self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    @contextmanager
    def listed(self, request_id: RequestId, tenant: str, generation: Abortable) -> Iterator[None]:
        """A context in which the generation can be aborted by its request's id."""
        self._generations.setdefault(request_id, {})[generation] = tenant
        try:
            yield
        finally:
            listed = self._generations[request_id]
            del listed[generation]
            if not listed:
                del self._generations[request_id]

    def abort(self, request_id: RequestId, tenant: str = "") -> int:
        """Abort every generation of exactly this request id, where a tenant is named only that tenant's.
        Returns their number."""
        listed = self._generations.get(request_id, {})
        generations = [one for one, whose in listed.items() if tenant in ("", whose)]
        for generation in generations:
            generation.abort()
        return len(generations)

    def _reading(self) -> CoreReading:
        core = self.core
        pages = 0 if core.info is None else core.info.pages
        return CoreReading(core.stats, core.waiting, core.live, self.is_ready, pages)
