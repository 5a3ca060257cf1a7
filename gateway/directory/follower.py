"""Follows the directory in Redis: each change reaches the accounts of this gateway within seconds.

Rules:

1. Redis is asked once a second what has changed. No request waits for that; each looks its key up in memory.
2. All is read again after a failover that lost changes, after a change of the file, when the tenant of keys
   that were refused appears, and when too much has happened meanwhile. That is done in slices, between which
   requests are served.
3. An entry that cannot be read may be one that revokes or restricts what was known before. So it counts as
   none until it can be read, and is logged: its key, or the keys of its tenant, are refused. All others stay.
4. A model that this gateway does not have opens nothing here, and hides no other part of the entry that names
   it: gateways with other models share a directory, and a revocation reaches each of them.
5. While Redis cannot be asked, or has lost the directory, what was read last holds for `stale_s`. After that,
   and before the first reading, it is not known which keys work: a key that is not in the file gets 503, and
   the gateway is not ready.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final

from gateway.config.whole import KeyConfig, TenantConfig, key_problems, named_models, tenant_problems
from gateway.directory.accounts import POLL_S, AccountsReader, Kind
from gateway.directory.entries import KEYS_MAX, TENANTS_MAX, decode
from gateway.directory.redis_directory import DirectoryPlace, RawEntry, RedisDirectory
from gateway.redis.link import RedisUnavailable
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.metrics import Counter, Gauge
from shared.process.setting_values import ConfigError
from shared.wire.ids import KeyId, TenantId

SLICE: Final = 200
"""Entries that are read at once: they take a few milliseconds."""
REFUSED_SHOWN_MAX: Final = 20
"""Log lines about entries that cannot be read, in one reading of all."""
MODELS_SHOWN_MAX: Final = 100
"""Models that the log names once each because entries name them and this gateway does not have them."""
FIRST: Final = b"0"
"""The cursor before the first entries, and after the last ones."""
ENTRIES_MAX: Final[Mapping[Kind, int]] = {"keys": KEYS_MAX, "tenants": TENANTS_MAX}

log = logs.get(__name__)

UP: Final = Gauge("penstock_gateway_directory_up", "1 while the directory in Redis can be followed.")
REFUSED: Final = Counter(
    "penstock_gateway_directory_entries_refused", "Entries in Redis that could not be read.", ["kind"]
)


class Follower:
    """Keeps the accounts of a gateway up to date with the directory in Redis."""

    def __init__(
        self,
        directory: RedisDirectory,
        accounts: AccountsReader,
        stale_s: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.directory: Final = directory
        self._accounts: Final = accounts
        self._stale_s: Final = stale_s
        self._clock: Final = clock
        self._place = DirectoryPlace()
        self._known: Final[dict[Kind, set[str]]] = {"tenants": set(), "keys": set()}
        """The ids of the entries that were taken."""
        self._file = accounts.config
        """The file's configuration when all was read last."""
        self._heard_s = -math.inf
        """When the directory was followed last, on the monotonic clock."""
        self._problem: str | None = "not asked yet"
        """Why it cannot be followed. None while it can."""
        self._models: Final = frozenset(model.name for model in accounts.config.models)
        """The names of the models, which take a restart."""
        self._unknown_models: Final[set[str]] = set()
        """Those that the log has named."""
        self._is_whole = False
        """True if every entry was looked at with the tenants that there are now."""
        self._has_orphans = False
        """True if a key was refused because its tenant is not there."""
        self._refused = 0
        self._lock: Final = asyncio.Lock()
        accounts.keys.is_complete = False
        UP.set_function(lambda: int(self._problem is None))

    @property
    def is_current(self) -> bool:
        """True if it is known which keys work."""
        return self._accounts.keys.is_complete

    async def watch(self) -> None:
        """Follow the changes until cancelled."""
        while True:
            await self.refresh()
            await self._clock.sleep(POLL_S)

    async def refresh(self) -> None:
        """Take over all changes that were made so far, if Redis can be asked."""
        async with self._lock:
            try:
                await self._catch_up()
            except RedisUnavailable as error:
                self._failed(str(error))
                return
            self._heard_s = self._clock.monotonic()
            self._accounts.keys.is_complete = True
            if self._problem is not None:
                log.info("directory.up", **{kind: len(ids) for kind, ids in self._known.items()})
            self._problem = None

    def _failed(self, problem: str) -> None:
        """Note that Redis was not read: what was read last holds for `stale_s` (rule 5)."""
        if problem != self._problem:
            log.error("directory.down", problem=problem)
        self._problem = problem
        if self.is_current and self._clock.monotonic() - self._heard_s >= self._stale_s:
            log.error("directory.stale", stale_s=self._stale_s, keys=len(self._known["keys"]))
            self._accounts.keys.is_complete = False

    async def _catch_up(self) -> None:
        """Raises RedisUnavailable."""
        while True:
            news = await self.directory.since(self._place, SLICE)
            is_whole = self.is_current and self._is_whole and self._file is self._accounts.config
            if is_whole and news.place == self._place:
                return
            if news.changes is None or not is_whole:
                await self._read_all(news.place)
                self._accounts.keys.is_complete = True
                continue
            self._take(news.changes)
            self._place = news.place

    async def _read_all(self, place: DirectoryPlace) -> None:
        """Read all entries, and forget those that are gone. `place` is one that comes before the reading."""
        self._refused, self._is_whole, self._has_orphans = 0, False, False
        file = self._accounts.config
        seen: dict[Kind, set[str]] = {"tenants": set(), "keys": set()}  # keys come after their tenants
        for kind, ids in seen.items():
            cursor = FIRST
            while True:
                cursor, entries = await self.directory.scan(kind, cursor, SLICE)
                ids.update(id_ for _, id_, _ in entries)
                if len(ids) > ENTRIES_MAX[kind]:
                    raise RedisUnavailable(f"there are more than {ENTRIES_MAX[kind]} {kind}")
                self._take(entries)
                if cursor == FIRST:
                    break
        gone: list[RawEntry] = [
            (kind, id_, b"") for kind in ENTRIES_MAX for id_ in self._known[kind] - seen[kind]
        ]
        for some in _slices(gone):
            self._take(some)
            await asyncio.sleep(0)
        if self._refused > REFUSED_SHOWN_MAX:
            log.error("directory.entries_refused", count=self._refused)
        self._place, self._file, self._is_whole = place, file, True
        self.directory.epoch = place.epoch

    def _take(self, entries: Sequence[RawEntry]) -> None:
        """Take over entries, the last of each id. A tenant comes before its keys, and goes after them."""
        last = {(kind, id_): raw for kind, id_, raw in entries}
        tenants = {id_: raw for (kind, id_), raw in last.items() if kind == "tenants"}
        keys = {id_: raw for (kind, id_), raw in last.items() if kind == "keys"}
        put_tenants = [
            tenant for id_, raw in tenants.items() if (tenant := self._tenant(id_, raw)) is not None
        ]
        gone_tenants = [TenantId(id_) for id_ in tenants.keys() - {tenant.id for tenant in put_tenants}]
        if put_tenants:
            if self._has_orphans and any(tenant.id not in self._known["tenants"] for tenant in put_tenants):
                self._is_whole = self._has_orphans = False
            self._accounts.put_tenants(put_tenants)
            self._known["tenants"].update(tenant.id for tenant in put_tenants)
        put_keys = [key for id_, raw in keys.items() if (key := self._key(id_, raw)) is not None]
        gone_keys = [KeyId(id_) for id_ in keys.keys() - {key.id for key in put_keys}]
        self._accounts.put_keys(put_keys, gone_keys)
        self._known["keys"].update(key.id for key in put_keys)
        self._known["keys"].difference_update(gone_keys)
        if gone_tenants:
            self._accounts.put_tenants((), gone_tenants)
            self._known["tenants"].difference_update(gone_tenants)

    def _tenant(self, id_: str, raw: bytes) -> TenantConfig | None:
        """The tenant of this id. None for one that is gone, and for one that cannot be read, which counts as
        none (rule 3)."""
        try:
            tenant = decode(TenantConfig, raw) if raw else None
            if tenant is not None:
                _require(tenant.id == id_, tenant_problems(tenant, self._models_of(tenant)))
        except ConfigError as error:
            self._refuse("tenants", id_, error.problems)
            return None
        return tenant

    def _key(self, id_: str, raw: bytes) -> KeyConfig | None:
        """The key of this id; None where it is refused, which is told, or gone."""
        try:
            key = decode(KeyConfig, raw) if raw else None
            if key is not None:
                tenants = self._accounts.now.tenants.ids
                self._has_orphans |= key.tenant not in tenants
                _require(key.id == id_, key_problems(key, self._models_of(key), tenants))
        except ConfigError as error:
            self._refuse("keys", id_, error.problems)
            return None
        return key

    def _models_of(self, entry: TenantConfig | KeyConfig) -> set[str]:
        """The models that an entry names. Those that are not here are logged, and open nothing (rule 4)."""
        named = named_models(entry)
        unknown = named - self._models - self._unknown_models
        if unknown and len(self._unknown_models) < MODELS_SHOWN_MAX:
            self._unknown_models.update(unknown)
            log.warning("directory.models_unknown", models=sorted(unknown)[:MODELS_SHOWN_MAX])
        return named

    def _refuse(self, kind: Kind, id_: str, problems: Sequence[str]) -> None:
        REFUSED.inc(kind)
        self._refused += 1
        if self._refused <= REFUSED_SHOWN_MAX:
            log.error("directory.entry_refused", kind=kind, id=id_, problems=list(problems))


def _require(is_own: bool, problems: Iterable[str]) -> None:
    """Raises ConfigError when there are problems, or the entry has another id than its place."""
    found = [*problems] if is_own else ["it has another id than its place"]
    if found:
        raise ConfigError(found)


def _slices(entries: Iterable[RawEntry]) -> Iterable[Sequence[RawEntry]]:
    left = iter(entries)
    return iter(lambda: list(islice(left, SLICE)), [])
