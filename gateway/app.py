"""The gateway's parts, put together; its start and its end.

When it ends, it is not ready from the first moment on. For `drain_delay_s` it still serves what comes, since
load balancers need a while to notice, and asks clients to open other connections. Then its public listener
is closed and new requests are refused. Open ones may finish within `drain_s`; those that do not end with an
error of their own.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gateway.admission.guarded_store import GuardedStore, SharedStore
from gateway.admission.memory_store import MemoryStore
from gateway.admission.quota import LEASE_TTL_MS, QuotaStore
from gateway.background import Background, Work
from gateway.billing.lines import Billing
from gateway.billing.unsettled import Unsettled
from gateway.billing.webhook import Webhook, webhook_secret, webhook_tls
from gateway.config.accounting import AccountingConfig
from gateway.config.whole import GatewayConfig, ModelConfig, timeouts_of
from gateway.directory.accounts import AccountsReader, IdentityOf
from gateway.directory.file_directory import FileDirectory
from gateway.directory.registry import Registry
from gateway.discovery.discovery import Discovery
from gateway.discovery.foreign_loads import ForeignLoads
from gateway.endpoints.table import ENDPOINTS, warm
from gateway.identity.caller import Identity, Revoked
from gateway.identity.callers import KnownCallers, callers_of
from gateway.identity.jwks import KeySources
from gateway.identity.keys import KeyTable
from gateway.listen.listener import BoundedServer, Listening, listen
from gateway.listen.listener_tls import ListenerTls, tls_of
from gateway.openapi import public as openapi
from gateway.operators.chats import Chats
from gateway.operators.elsewhere import Elsewhere
from gateway.operators.engines import EnginesApi
from gateway.operators.key_uses import KeyUsesApi
from gateway.operators.keys import DirectoryRoutes
from gateway.operators.listener import listen_for_operators
from gateway.operators.overview import OverviewApi
from gateway.operators.peers import Peers
from gateway.operators.replicas import ReplicaRoutes
from gateway.operators.requests import RequestsApi
from gateway.operators.server import Admin
from gateway.operators.stored import StoredApi
from gateway.operators.tenant_limits import LimitsApi
from gateway.operators.together import OperatorAnswer
from gateway.operators.usage import UsageReports
from gateway.relay import checked_bundles
from gateway.relay.engines import Engines, Replies
from gateway.relay.upstream import Credentials, Upstream
from gateway.request.dispatch import watch_replicas
from gateway.request.edge import Edge, aborted
from gateway.request.exchange import LiveRequests
from gateway.request.key_uses import KeyUses
from gateway.request.minutes import Minutes
from gateway.request.pipeline import Pipeline
from gateway.request.record import HELD_BYTES, HTTP2_STREAMS, IN_FLIGHT, MEMBERS, forget_replica
from gateway.request.recorder import Recorder
from gateway.request.salts import new_secret, salts_secret
from gateway.routing.replicas import Replicas
from gateway.stored.keeping import KeptResponses
from gateway.stored.memory import MemoryResponses
from gateway.stored.responses import ResponseStore
from gateway.workers.channel import Door, WorkerStart, listen_on
from gateway.workers.siblings import Siblings
from shared.fairness.fair_share import FairShare
from shared.fairness.fair_threads import FairThreads
from shared.fairness.fair_turns import FairTurns
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.descriptors import fitting
from shared.process.files import FileVersion
from shared.process.lifecycle import Lifecycle, Phase
from shared.process.loops import loop_name
from shared.process.probes import Health
from shared.telemetry.otlp import tracing_of
from shared.wire.errors import GatewayStopped, KeyRevoked
from shared.wire.ids import KeyId, RequestId, TenantId

if TYPE_CHECKING:
    from gateway.admission.redis_store import RedisStore
    from gateway.directory.follower import Follower

RENEW_S: Final = LEASE_TTL_MS / 1000 / 3
"""The time between two renewals of the open requests' leases, in seconds."""
KEYS_SHOWN_MAX: Final = 20
"""The number of keys that the log line about revoked ones names."""
PROBE_S: Final = 0.5
"""Seconds between two probes of a shared store that does not answer, and the least between any two."""
assert RENEW_S * 2 < LEASE_TTL_MS / 1000, "one renewal may fail before a lease expires"

log = logs.get(__name__)


class Gateway:
    """`async with Gateway(config) as gateway:` serves until the block is left."""

    port = 0
    """The public listener's port; 0 until it listens."""
    admin_port: int | None = None
    """The admin listener's port. None until it listens, and where there is none."""
    peers: Peers | None = None
    """The other gateways on the same Redis. None until it listens, and where there are none to ask."""
    _public: Listening | None = None

    def __init__(
        self,
        config: GatewayConfig,
        *,
        path: Path | None = None,
        seen: FileVersion | None = None,
        quotas: SharedStore | None = None,
        identity_of: IdentityOf | None = None,
        env: Mapping[str, str] = os.environ,
        clock: Clock = SYSTEM_CLOCK,
        worker: WorkerStart | None = None,
    ) -> None:
        """`path` is the file that is read again, if there is one, and `seen` the version that `config` is of.
        `worker` says which of several this one is. `quotas` and `identity_of` replace what the configuration
        says of them. Raises ConfigError when a file or a key that it names is missing, or UnusableTls."""
        self._credentials = credentials = Credentials(config.models, env, clock)
        self.config, self.lifecycle, self._env = config, Lifecycle(), env
        self._redis = None if quotas is not None else _redis_store(config, env)
        self.quotas, self._guarded = _stores(config, quotas or self._redis, clock)
        store = self._guarded or self.quotas
        self.billing, self._webhook = _billing(_accounting(config, worker), self.quotas, env, clock)
        self.live, memory = LiveRequests(config.limits.live_max), FairShare(config.limits.request_memory)
        self._tls, self._admin_tls = _tls(config, worker, clock)
        self._key_sources, self._threads = KeySources(clock), FairThreads(config.limits.tokenizer_threads)
        identity_of = identity_of or self._identity_of
        self.accounts = AccountsReader(config, path, clock, identity_of, seen=seen, env=env)
        self.accounts.on_revoked = self._end_revoked
        self._follower = _follower(config, self.accounts, env, clock)
        self._registry = _registry(self._follower, path, self.accounts, env, clock)
        self.replicas = _replicas(config, self.accounts, clock)
        self._discovery = Discovery(config.models, self.replicas, env, clock)
        self._upstream = upstream = Upstream(config.hop, config.models, self.replicas.observe_origin, clock)
        self.engines = Engines(config.models, _asking(config, upstream, credentials, self.replicas), clock)
        _set_gauges(self.live, upstream, memory)
        self._known, self._turns = KnownCallers(), FairTurns()
        parts = self.engines, store, self.replicas, upstream, credentials, self.live, self._threads, memory
        salts = salts_secret(config.hop, env, worker.salts if worker is not None else new_secret())
        self._responses = responses = _responses(config, memory, self._threads, env, clock)
        pipeline = Pipeline(config, *parts, self.billing, self._known, self._turns, salts, responses)
        self._health = health = Health(self.lifecycle, self._problems)
        self._tracing = tracing_of(config.tracing, "penstock-gateway", env)
        kept = self._recorder, self._minutes, self._key_uses = _kept(config, worker)
        known = self.accounts, pipeline, self.live, self.engines, store, health, responses
        self._edge = Edge(config, *known, clock, self._tracing, *kept)
        self._clock, self._worker, self._chats = clock, worker, Chats(clock)
        if worker is not None:
            self.replicas.take_drained(worker.drained)
        self._background, self._tokenizers = (Background(w, clock) for w in (self._works(), self._helpers()))
        self._stack = AsyncExitStack()

    @cached_property
    def _figures(self) -> EnginesApi:
        return EnginesApi(self.replicas, self._upstream, self._clock)

    @cached_property
    def _overview(self) -> OverviewApi:
        return OverviewApi(self._minutes or Minutes(), self._figures.views, self._clock)

    def _works(self) -> dict[str, Work]:
        """The tasks in the background without which the gateway is not ready, by name."""
        works: dict[str, Work] = {
            "configuration": self.accounts.watch,
            "lease renewal": self._renew_leases,
            "issuers' keys": self._key_sources.watch,
            "pools": self.replicas.keep,
            "members' ends": self.replicas.sweep,
            "replicas' health": partial(watch_replicas, self.replicas, self._upstream, self._clock),
            "hop's certificates": self._upstream.watch_tls,
            "engines' keys": self._credentials.watch,
            **self._discovery.works(),
        }
        if self._follower is not None:
            works["directory"] = self._follower.watch
        if self.billing.spool is not None:
            works["billing lines"] = self.billing.write
        if self._webhook is not None:
            works["billing webhook"] = self._webhook.send
        if self._tls is not None:
            works["certificates"] = self._tls.watch
        if self._admin_tls is not None:
            works["admin listener's certificates"] = self._admin_tls.watch
        return works

    def _helpers(self) -> dict[str, Work]:
        """Those that it can do without: without a tokenizer, prompts are estimated; what was not settled may
        have its billing line later."""
        models = self.config.models
        known = self.engines, self.replicas, self._upstream, self._credentials
        loads = ForeignLoads(models, *known, self._clock)
        works = {**self.engines.works(), "engines' metrics": loads.watch}
        if self._responses.store is not None:
            works["stored responses"] = self._responses.store.watch
        if self._minutes is not None:
            works["engines' figures"] = self._overview.watch
        if self._guarded is not None and self.billing.spool is not None:
            unsettled = Unsettled(self._guarded, self.billing, self._tenant_ids, self._clock)
            works["lines of the unsettled"] = unsettled.write
        return works

    def _tenant_ids(self) -> Collection[TenantId]:
        return self.accounts.now.tenants.ids

    async def __aenter__(self) -> Gateway:
        address = self.config.listen
        warm(endpoint.shape for endpoint in ENDPOINTS.values())
        openapi.document()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._upstream.aclose)
            stack.callback(self._threads.close)
            if self._redis is not None:
                stack.push_async_callback(self._redis.aclose)
            if self._guarded is not None:
                await self._guarded.renew([])  # the first probe; until one succeeds, the store is down
            if (responses := self._responses.store) is not None:
                stack.push_async_callback(responses.aclose)
                await responses.begin()
            if self._follower is not None:
                stack.push_async_callback(self._follower.directory.aclose)
            if self._worker is not None:
                await self.accounts.reload()  # the file may be newer than what it was started with
            await self._follow()
            stack.push_async_callback(self.billing.aclose)
            await stack.enter_async_context(self._background)
            await stack.enter_async_context(self._tokenizers)
            await asyncio.gather(self._key_sources.first(), self._discovery.first())
            tls = None if self._tls is None else self._tls.context
            public = self._public_server()
            port, is_shared = (address.port, False) if self._worker is None else (self._worker.port, True)
            self._public = await listen(stack, public, address.host, port, tls=tls, is_shared=is_shared)
            self.port = self._public.port
            self._chats.serve = public
            stack.push_async_callback(self._chats.aclose)
            await self._serve_operators(stack)
            self._stack = stack.pop_all()
        self.lifecycle.to(Phase.READY)
        ports = {"port": self.port, "admin_port": self.admin_port}
        event = "gateway.listening" if self._worker is None else "worker.listening"
        log.info(event, host=address.host, **ports, loop=loop_name())
        return self

    async def _serve_operators(self, stack: AsyncExitStack) -> None:
        """Answer operators, on a listener of this process or for the supervisor, and ask other gateways."""
        peers = self.peers = _peers(self.config, self.accounts, self._env, self._clock)
        port = self.config.admin.port
        if peers is not None:
            stack.push_async_callback(peers.aclose)
            self._edge.end_at_others = peers.end
            await stack.enter_async_context(Background({"gateways": peers.members.keep}, self._clock))
        siblings = None
        if self._worker is not None:
            siblings = Siblings(self._worker.socket)
            stack.push_async_callback(siblings.aclose)
            self._edge.end_elsewhere = siblings.end
        admin = self._admin(peers, siblings).handle
        if self._worker is not None:
            door = Door(self._health, self.live.__len__, self._refresh, self.replicas, self._end, admin)
            await listen_on(stack, door, self._worker.socket)
        elif port is not None:
            port = self.admin_port = await listen_for_operators(stack, admin, self.config, self._admin_tls)
        if peers is not None and port:
            await peers.members.listens(port)

    def _end(self, tenant: TenantId, request_id: RequestId) -> int:
        """End a tenant's requests of this id, as their caller told another worker."""
        return self.live.end(tenant, request_id, aborted)

    def _public_server(self) -> BoundedServer:
        edge, config = self._edge, self.config
        limits = replace(config.limits, connections_max=fitting(config.limits.connections_max))
        bounds = limits, config.timeouts
        return BoundedServer(edge.handle, edge.refuse_unparsed, *bounds, self._known, self._turns)

    def _elsewhere(self, peers: Peers | None, siblings: Siblings | None) -> Elsewhere:
        """The requests that other gateways and workers have."""

        async def beside(operator: KeyId, target: str, within_s: float) -> Sequence[OperatorAnswer]:
            assert siblings is not None
            [digest, *_] = self.accounts.now.operators.digests(operator)
            return await siblings.told(digest, target, within_s)

        others = [] if peers is None else [peers.told_by_others]
        return Elsewhere(*others, *([] if siblings is None else [beside]))

    def _admin(self, peers: Peers | None, siblings: Siblings | None = None) -> Admin:
        """The handlers for operators."""
        quotas, clock = self._guarded or self.quotas, self._clock
        is_kept = self.billing.is_recounted or not isinstance(self.quotas, MemoryStore)
        apis = (
            DirectoryRoutes(self._registry, self._follow),
            UsageReports(quotas, self.accounts, clock, is_kept=is_kept),
            LimitsApi(quotas, self.accounts, self.live),
            ReplicaRoutes(self.replicas),
            RequestsApi(self.live, self._recorder, clock, self._elsewhere(peers, siblings)),
            self._figures,
            self._overview,
            KeyUsesApi(self._key_uses or KeyUses(), clock),
            self._chats,
            StoredApi(self._responses.store),
        )
        known, names = (self._health, self.accounts, self.reload, self.live), self.config.admin.called
        is_worker, is_shared = self._worker is not None, self._guarded is not None
        parts = *known, apis, self._clock
        return Admin(*parts, names=names, is_worker=is_worker, peers=peers, shares_usage=is_shared)

    async def __aexit__(self, *_: object) -> None:
        await self.drain()
        await self._stack.aclose()
        await asyncio.to_thread(self._tracing.close)
        self.lifecycle.to(Phase.STOPPED)

    async def drain(self, hurry: asyncio.Event | None = None) -> bool:
        """Refuse new requests, and let the open ones finish within `drain_s` and until `hurry` is set. Later
        calls do nothing. Returns whether no request had to be ended."""
        if self.lifecycle.phase is not Phase.READY:
            return True
        self.lifecycle.to(Phase.DRAINING)
        hurry = hurry or asyncio.Event()
        delay_s, drain_s = self.config.timeouts.drain_delay_s, self.config.timeouts.drain_s
        log.info("gateway.draining", live=len(self.live), delay_s=delay_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await hurry.wait()
        if self._public is not None:
            await self._public.close()
        clean = await self.live.drain(drain_s, hurry, _stopped)
        if self._guarded is not None:
            await self._guarded.post()
        log.info("gateway.drained", clean=clean)
        return clean

    async def reload(self) -> list[str]:
        """Read again what is read again when it changes: the configuration, certificates, issuers' keys.
        Returns what is wrong with the configuration."""
        problems = await self.accounts.reload()
        self._key_sources.reload()
        for tls in (self._tls, self._admin_tls):
            if tls is not None:
                tls.reload()
        return problems

    async def _refresh(self) -> None:
        """Take over what another worker has changed of keys and tenants."""
        await (self.accounts.reload() if self._follower is None else self._follow())

    async def _follow(self) -> None:
        """Take over what was changed in the directory in Redis, if there is one and it can be asked."""
        if self._follower is not None:
            await self._follower.refresh()

    def _identity_of(self, config: GatewayConfig, keys: KeyTable, tenants: Iterable[TenantId]) -> Identity:
        return callers_of(config, keys, tenants, self._key_sources, self._revoked)

    def _revoked(self) -> Revoked:
        return frozenset() if self._tls is None else self._tls.revoked

    def _end_revoked(self, keys: Collection[KeyId]) -> None:
        ended = self.live.end_keys(keys, self.accounts.now, _revoked_key)
        log.info("keys.revoked", keys=list(keys)[:KEYS_SHOWN_MAX], ended=ended)

    async def _renew_leases(self) -> None:
        if self._guarded is None:
            while True:
                await self._clock.sleep(RENEW_S)
                await self.quotas.renew(self.live.reservations())
        while True:
            due_s = self._clock.monotonic() + RENEW_S
            await self._clock.sleep(PROBE_S)
            await self._guarded.post()  # also while a part of the store is down
            while self._guarded.is_well and self._clock.monotonic() < due_s:
                await self._guarded.until_missed(PROBE_S)
                await self._guarded.post()
            await self._guarded.renew(self.live.reservations())

    def _problems(self) -> list[str]:
        """For `/readyz`: names of what does not work, and without which requests cannot be served. A node of
        a Cluster that is down is down for all gateways: its tenants alone are without the store."""
        guarded, accounts = self._guarded, self.accounts.now
        is_served = guarded is None or guarded.is_partly_well or accounts.serve_without_store
        store = [] if is_served else ["quota store"]
        is_followed = self._follower is None or self._follower.is_current
        followed = [] if is_followed else ["directory"]
        can_be_away = self.config.listen.ready_without_engines
        engines = [] if can_be_away or not self.replicas.are_all_away else ["engines"]
        return [*store, *followed, *engines, *self._background.down]


def _replicas(config: GatewayConfig, accounts: AccountsReader, clock: Clock) -> Replicas:
    """The replicas, which follow the file and are shown in the process's metrics."""
    replicas = Replicas(config.models, clock, secrets.randbits(64))
    replicas.on_gone = forget_replica
    accounts.on_models = replicas.take
    MEMBERS.set_function(replicas.counts)
    return replicas


def _peers(
    config: GatewayConfig, accounts: AccountsReader, env: Mapping[str, str], clock: Clock
) -> Peers | None:
    """The gateways on the same Redis. None without one, or without operators to ask for. Raises
    ConfigError."""
    if config.redis.url is None or config.admin.port is None:
        return None
    from gateway.redis.members import GatewayList  # only here, as the store in Redis

    members = GatewayList(config.redis, config.admin, env, clock)
    return Peers(members, lambda: accounts.now.operators, clock)


def _tls(
    config: GatewayConfig, worker: WorkerStart | None, clock: Clock
) -> tuple[ListenerTls | None, ListenerTls | None]:
    """The TLS of the public listener, and of the admin one, which of several workers is their supervisor's.
    Raises UnusableTls."""
    return tls_of(config.listen.tls, clock), None if worker is not None else tls_of(config.admin.tls, clock)


def _kept(
    config: GatewayConfig, worker: WorkerStart | None
) -> tuple[Recorder, Minutes | None, KeyUses | None]:
    """The records, minutes and uses of keys that are kept; none where no operator can ask."""
    if worker is None and config.admin.port is None:
        return Recorder(0), None, None
    return Recorder(config.admin.records), Minutes(), KeyUses()


def _set_gauges(live: LiveRequests, upstream: Upstream, memory: FairShare) -> None:
    """Show these in the process's metrics."""
    IN_FLIGHT.set_function(lambda: len(live))
    HTTP2_STREAMS.set_function(lambda: upstream.streams)
    HELD_BYTES.set_function(lambda: memory.held)


def _asking(
    config: GatewayConfig, upstream: Upstream, credentials: Credentials, replicas: Replicas
) -> Replies:
    """The way to ask a model's engines for what they are."""

    def connect_s(model: ModelConfig) -> float:
        return timeouts_of(config.timeouts, model).connect_s

    return Replies(upstream, replicas.urls, connect_s, credentials.headers, checked_bundles.check)


def _billing(
    config: AccountingConfig, quotas: QuotaStore, env: Mapping[str, str], clock: Clock
) -> tuple[Billing, Webhook | None]:
    """The billing lines, and the webhook that takes them, where there is one. What they say of a time before
    this start is counted where usage is in memory. Raises ConfigError."""
    secret = webhook_secret(config, env)
    billing = Billing(config, clock)
    if isinstance(quotas, MemoryStore):
        billing.recount(quotas.rows)
    if config.webhook is None or billing.spool is None:
        return billing, None
    return billing, Webhook(config.webhook, secret, webhook_tls(config), billing.spool, clock)


def _accounting(config: GatewayConfig, worker: WorkerStart | None) -> AccountingConfig:
    """The settings of accounting. Each of several workers has a billing file of its own: `lines.jsonl` is
    `lines-0.jsonl` for the first."""
    accounting = config.accounting
    if worker is None or accounting.file is None:
        return accounting
    path = Path(accounting.file)
    return replace(accounting, file=str(path.with_stem(f"{path.stem}-{worker.index}")))


def _stores(
    config: GatewayConfig, shared: SharedStore | None, clock: Clock
) -> tuple[QuotaStore, GuardedStore | None]:
    """The store of quotas, and what guards it where it is shared. Each worker counts as a gateway: while
    Redis cannot be asked, each has its part of the limits."""
    days, notes_all = config.accounting.days, config.accounting.file is not None
    if shared is None:
        return MemoryStore(clock, days), None
    gateways = config.quotas.gateways * config.workers
    return shared, GuardedStore(shared, gateways, clock, days, notes_all=notes_all)


def _redis_store(config: GatewayConfig, env: Mapping[str, str]) -> RedisStore | None:
    """The store in Redis, not yet connected; None where quotas are kept in memory. Raises ConfigError."""
    if config.quotas.store == "memory":
        return None
    # Only here: a gateway that keeps quotas in memory has no use for a client of Redis.
    from gateway.admission.redis_store import open_store

    return open_store(config.redis, env, one_node=config.quotas.one_node, days_kept=config.accounting.days)


def _responses(
    config: GatewayConfig, memory: FairShare, threads: FairThreads, env: Mapping[str, str], clock: Clock
) -> KeptResponses:
    """The responses that are kept, in Redis not yet connected. Raises ConfigError."""
    store: ResponseStore | None = None
    if config.responses.store == "memory":
        store = MemoryResponses(config.responses, clock)
    elif config.responses.store == "redis":
        from gateway.stored.redis import open_responses  # only here, as the store of quotas

        store = open_responses(config.responses, config.redis, env, clock)
    return KeptResponses(config.responses, store, memory, threads, clock, config.limits.body_len_max)


def _revoked_key() -> KeyRevoked:
    return KeyRevoked("This API key has been revoked.")


def _follower(
    config: GatewayConfig, accounts: AccountsReader, env: Mapping[str, str], clock: Clock
) -> Follower | None:
    """The follower of the directory in Redis; None where it is in the file. Raises ConfigError."""
    if config.directory.store == "file":
        return None
    from gateway.directory.follower import Follower
    from gateway.directory.redis_directory import open_directory

    directory = open_directory(config.redis, accounts, env)
    return Follower(directory, accounts, config.directory.stale_s, clock)


def _registry(
    follower: Follower | None,
    path: Path | None,
    accounts: AccountsReader,
    env: Mapping[str, str],
    clock: Clock,
) -> Registry:
    """The keeper of keys and tenants: in Redis, where that is followed, else in the file."""
    kept = FileDirectory(path, accounts, env) if follower is None else follower.directory
    return Registry(kept, accounts, clock)


def _stopped() -> GatewayStopped:
    return GatewayStopped("The gateway was stopped before the answer's end.")
