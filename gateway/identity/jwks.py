"""The keys that issuers of tokens sign with, and keep changing: fetched from a URL, or read from a file.

Theory. An issuer publishes its keys under a URL, each with an id (`kid`) that its tokens name. It rotates
them: a new key appears, tokens are signed with it, later the old one disappears. So the set is fetched again
every `REFRESH_S`, and earlier when a token names a key that is not in it.

Rules:

1. No request fetches anything. Fetches are tasks of their own, one at a time for each issuer, bounded in
   time, bytes and keys. Keys are fetched again long before they are too old to be trusted: a key that is
   published `REFRESH_S` before it is used is there when its first token comes.
   A token whose key is not there causes a fetch in between: at once, or `REFETCH_S` after the one before that
   such tokens caused, however many there are. After a fetch that has found a key that is `POLL_S` at most.
   Its own request waits for the end of that fetch: otherwise the first callers of an issuer that signs with a
   key in the moment in which it publishes it would be refused, at each rotation, and no client takes a 401
   for a reason to try again. It waits `REFETCH_WAIT_S` at most, and before that at most `REFETCH_WITHIN_S`
   for the fetch to begin; where that would take longer, and where the last fetch has failed, the caller is
   asked at once to come again.
   Nobody else waits, or pays for it: a key that is known is used as it is, whatever is being fetched; who
   waits has no seat, no body, no thread and no turn; its places are bounded, and shared by addresses and
   tenants (`gateway.identity.waiting`).
   A token is refused at once for its key after a fetch that began when the key was sought first, or later,
   and has not found it. If that is `AGAIN_S` ago, another one is begun, which nobody waits for.
   So whoever makes up keys, however many, causes one fetch in each `REFETCH_S`, which is a second, and keeps
   the first tokens of a new key waiting for so long at most, and for the fetch. None of them is refused or
   put off.
2. Keys that cannot be read change nothing. Those that were fetched `STALE_S` ago are not trusted any more.
   The authorities that are trusted when keys are fetched are looked at for each fetch: a key server's may be
   renewed while its keys are in use.
3. Keys come from the configured place alone. Whatever a token says of where its key is (jku, x5u, jwk, x5c)
   is not looked at.
4. A token without a key id may be signed with any key that fits its algorithm, `TRIED_MAX` at most. Where
   none of them has signed it, its digest is what an unknown key id is to others.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import httpx

from gateway.config.edge import IssuerConfig
from gateway.identity.bounded import BoundedDict
from gateway.identity.key_set import SET_LEN_MAX, BadKeys, VerificationKey, keys_of, secret_of
from gateway.identity.waiting import Waiting
from shared.process import logs
from shared.process.clock import Clock
from shared.process.files import WatchedFiles, read_bytes
from shared.process.metrics import Counter
from shared.process.renewable_tls import TrustedAuthorities
from shared.process.setting_values import ConfigError
from shared.process.tls import UnusableTls

FETCH_S: Final = 5.0
"""How long a fetch may take, in seconds."""
REFRESH_S: Final = 300.0
"""The time between two fetches of keys, in seconds. A token with an unknown key causes one earlier."""
REFETCH_S: Final = 1.0
"""The shortest time between two fetches that unknown keys cause, in seconds."""
STALE_S: Final = 3600.0
"""How long keys are trusted that cannot be fetched any more, in seconds."""
POLL_S: Final = 1.0
"""The time between two looks at what is to be read again, in seconds."""
RETRY_S: Final = 5.0
"""The time from a failed fetch to the next, in seconds."""
REFETCH_WAIT_S: Final = 1.0
"""How long a request waits for the fetch that its unknown key causes, in seconds from when that may begin."""
REFETCH_WITHIN_S: Final = 1.0
"""How long a request waits for that fetch to begin, in seconds. It does not wait where that takes longer."""
AGAIN_S: Final = 30.0
"""How old keys may be, in seconds, until a token whose key was not among them has them fetched again."""
SEEN_MAX: Final = 4096
"""The most unknown key ids of an issuer that are remembered. One that is forgotten is taken for a new one."""
TRIED_MAX: Final = 4
"""The most keys that a token without a key id is tried with: those of two rotations that overlap. It bounds
what a forged token costs."""

Sought = str | bytes
"""A key that is not known: its id, or the digest of a token that names none."""

FETCHES: Final = Counter(
    "penstock_gateway_key_fetches", "Reads of issuers' keys, by their outcome.", ("issuer", "outcome")
)
SOUGHT: Final = Counter(
    "penstock_gateway_keys_sought",
    "Tokens whose key was not known, by what came of it.",
    ("issuer", "outcome"),
)
log = logs.get(__name__)


def _parsed(data: bytes, config: IssuerConfig) -> tuple[tuple[VerificationKey, ...], list[str]]:
    """The keys that an issuer's file or URL holds, as `keys_of` has them."""
    if config.secret_file is not None:
        return (secret_of(data, config.algorithms),), []
    return keys_of(data)


class IssuerKeys(ABC):
    """The keys of one issuer at this moment, and where they come from."""

    def __init__(self, config: IssuerConfig) -> None:
        self.config = config
        self.generation = 0
        """The number of times that a key went away. What an earlier generation has checked counts no more."""
        self.waiting: Final = Waiting()
        """Requests that wait for a fetch to end."""
        self._keys: tuple[VerificationKey, ...] = ()

    @property
    def keys(self) -> tuple[VerificationKey, ...]:
        """The issuer's keys: the same tuple as long as nothing has changed."""
        return self._keys

    @property
    def is_trusted(self) -> bool:
        """True if there are keys that may be used now."""
        return bool(self._keys)

    def is_certain(self, sought: Sought) -> bool:
        """True if this key, which is not here, does not exist, as far as can be known."""
        return True

    def fitting(self, kid: str | None, algorithm: str) -> Sequence[VerificationKey]:
        """The keys that may have signed a token: the one of this id, or without one all that fit the
        algorithm. Empty where they are too many to try."""
        fitting = [key for key in self._keys if algorithm in key.algorithms]
        if kid is not None and self.config.secret_file is None:
            return [key for key in fitting if key.kid == kid]
        return fitting if len(fitting) <= TRIED_MAX else []

    @abstractmethod
    def poll(self) -> None:
        """Read them again when it is time to."""

    @abstractmethod
    def reload(self) -> None:
        """Read them again now."""

    def reread(self) -> None:  # noqa: B027 -- what is remote is not to be had without waiting
        """Take what has changed and can be had without waiting."""

    def seek(self, sought: Sought) -> float | None:
        """Have a key looked for. Returns the time until that begins, in seconds; None where nothing is to be
        waited for: it is known not to exist, or keys cannot be fetched at the moment."""
        return None

    @property
    def in_progress(self) -> asyncio.Task[None] | None:
        """The fetch in progress; None where there is none."""
        return None

    @property
    def retry_after_s(self) -> float:
        """The time until an unknown key may be known, in seconds."""
        return 1.0

    async def aclose(self) -> None:  # noqa: B027 -- a file has nothing in progress
        """End what is in progress."""

    def _take(self, data: bytes) -> bool:
        """Take the keys in an issuer's file or answer. Returns whether one of them is new. Raises BadKeys;
        then nothing has changed."""
        keys, problems = _parsed(data, self.config)
        before, after = set(self._keys), set(keys)
        if not before <= after:
            self.generation += 1
        if before != after:
            kids = [key.kid or "" for key in keys]
            log.info("keys.changed", issuer=self.config.id, kids=kids, left_out=problems)
        if keys != self._keys:
            self._keys = keys
        FETCHES.inc(self.config.id, "ok")
        return not after <= before

    def _failed(self, problems: Iterable[str]) -> None:
        FETCHES.inc(self.config.id, "failed")
        log.error("keys.rejected", issuer=self.config.id, problems=list(problems))


class FileKeys(IssuerKeys):
    """Keys in a file, read again when it changes."""

    def __init__(self, config: IssuerConfig, path: Path) -> None:
        """Raises ConfigError where the file cannot be used."""
        super().__init__(config)
        self._path, self._file = path, WatchedFiles([path])
        try:
            self._take(_read(path))
        except BadKeys as error:
            raise ConfigError(_located(config, error)) from error

    def poll(self) -> None:
        if self._file.changed():
            self.reload()

    def reread(self) -> None:
        self.poll()

    def reload(self) -> None:
        try:
            self._take(_read(self._path))
        except BadKeys as error:
            self._failed(_located(self.config, error))


class RemoteKeys(IssuerKeys):
    """Keys that are fetched from a URL."""

    def __init__(self, config: IssuerConfig, clock: Clock) -> None:
        super().__init__(config)
        self._clock = clock
        self._authorities = TrustedAuthorities(config.ca)
        self._task: asyncio.Task[None] | None = None
        """The last fetch, in progress or done; None before the first."""
        self._due_s = -math.inf
        """When the next fetch is due, on the monotonic clock."""
        self._begun = self._fetched = 0
        """The number of fetches that were begun, and that of the last one that succeeded."""
        self._looking: asyncio.Task[None] | None = None
        """Begins the fetches that unknown keys cause. None or done while there are none."""
        self._look_from_s = -math.inf
        """From when on unknown keys may cause a fetch."""
        self._sought = -1
        """The number of fetches that were begun when a key was sought last for which one is to begin."""
        self._seen: BoundedDict[Sought, int] = BoundedDict(SEEN_MAX)
        """The number of fetches that were begun when each unknown key was first sought."""
        self._fetched_s = -math.inf
        """When the last fetch that succeeded was begun."""
        self._failing = False

    @property
    def is_trusted(self) -> bool:
        return self._clock.monotonic() < self._fetched_s + STALE_S

    @property
    def retry_after_s(self) -> float:
        next_s = self._due_s if self._failing else self._look_from_s
        return max(1.0, next_s + POLL_S - self._clock.monotonic())

    def is_certain(self, sought: Sought) -> bool:
        seen = self._seen.get(sought)
        return not self._failing and seen is not None and seen < self._fetched

    def poll(self) -> None:
        if self._clock.monotonic() >= self._due_s:
            self.reload()

    def reload(self) -> None:
        self._begin()

    def seek(self, sought: Sought) -> float | None:
        now_s = self._clock.monotonic()
        if (seen := self._seen.get(sought)) is None:
            self._seen.put(sought, self._begun)
            self._sought = seen = self._begun
        is_certain = self.is_certain(sought)
        if self._failing or (is_certain and now_s < self._fetched_s + AGAIN_S):
            return None
        if is_certain:
            self._sought = self._begun
            self._look_soon(now_s)
            return None
        if self.in_progress is not None and seen < self._begun:
            return 0.0
        self._look_soon(now_s)
        return max(0.0, self._look_from_s - now_s) if seen == self._begun else 0.0

    def _look_soon(self, now_s: float) -> None:
        """Begin a fetch because of an unknown key, now or as soon as that may be."""
        if self._looking is not None and not self._looking.done():
            return
        if self.in_progress is None and now_s >= self._look_from_s:
            self._begin_look(now_s)
        else:
            self._looking = asyncio.create_task(self._look(), name=f"unknown keys of {self.config.id}")

    async def _look(self) -> None:
        """Begin fetches until one has begun since a key was last sought. While they fail there is nothing to
        do: keys are fetched again all the time."""
        while self._sought == self._begun and not self._failing:
            now_s = self._clock.monotonic()
            if self.in_progress is not None:
                await asyncio.wait({self.in_progress})
            elif now_s < self._look_from_s:
                await self._clock.sleep(self._look_from_s - now_s)
            else:
                self._begin_look(now_s)

    def _begin_look(self, now_s: float) -> None:
        self._look_from_s = now_s + REFETCH_S
        self._begin()

    @property
    def in_progress(self) -> asyncio.Task[None] | None:
        return None if self._task is None or self._task.done() else self._task

    async def aclose(self) -> None:
        self._failing = True  # who waits is not to begin another
        tasks = {task for task in (self._looking, self._task) if task is not None and not task.done()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _begin(self) -> asyncio.Task[None]:
        if self._task is None or self._task.done():
            self._begun += 1
            self._due_s = self._clock.monotonic() + REFRESH_S
            self._task = asyncio.create_task(self._fetch(), name=f"keys of {self.config.id}")
            self._task.add_done_callback(lambda _: self.waiting.call())
        return self._task

    async def _fetch(self) -> None:
        begun_s, number = self._clock.monotonic(), self._begun
        try:
            async with asyncio.timeout(FETCH_S):
                data = await _download(self.config.jwks_url or "", await self._authorities.context())
            if self._take(data):
                self._look_from_s = min(self._look_from_s, begun_s + POLL_S)
        except (BadKeys, UnusableTls, httpx.HTTPError, httpx.InvalidURL, OSError, TimeoutError) as error:
            self._failing = True
            self._due_s = begun_s + RETRY_S
            told = error.problems if isinstance(error, BadKeys) else (str(error) or type(error).__name__,)
            self._failed(f"{self.config.jwks_url}: {problem}" for problem in told)
        else:
            self._failing = False
            self._fetched, self._fetched_s = number, begun_s


async def _download(url: str, context: ssl.SSLContext) -> bytes:
    """The body of an answer with status 200. Raises BadKeys for any other, and httpx's errors. Redirects are
    not followed: where keys come from is the configuration's to say."""
    headers = {"accept": "application/jwk-set+json, application/json", "accept-encoding": "identity"}
    client = httpx.AsyncClient(verify=context, follow_redirects=False, trust_env=False, timeout=FETCH_S)
    async with client, client.stream("GET", url, headers=headers) as answer:
        if answer.status_code != httpx.codes.OK:
            raise BadKeys(f"answered with status {answer.status_code}")
        data = bytearray()
        async for piece in answer.aiter_raw():
            data += piece
            if len(data) > SET_LEN_MAX:
                raise BadKeys(f"is larger than {SET_LEN_MAX} bytes")
    return bytes(data)


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, SET_LEN_MAX)
    except OSError as error:
        raise BadKeys(error.strerror or str(error)) from error


def _located(config: IssuerConfig, error: BadKeys) -> list[str]:
    path = config.jwks_file or config.secret_file
    return [f"issuers.{config.id}: {path}: {problem}" for problem in error.problems]


class KeySources:
    """The keys of all issuers, which outlive a reload of the configuration: an issuer that is still there
    keeps what was fetched for it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sources: dict[str, IssuerKeys] = {}
        self._retired: list[IssuerKeys] = []

    def of(self, issuers: Iterable[IssuerConfig]) -> dict[str, IssuerKeys]:
        """The keys of these issuers, by their ids; other issuers' are forgotten. Raises ConfigError, and
        then nothing is changed."""
        kept: dict[str, IssuerKeys] = {}
        problems: list[str] = []
        for config in issuers:
            before = self._sources.get(config.id)
            try:
                same = before is not None and before.config == config
                kept[config.id] = before if same and before is not None else self._open(config)
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)
        self._retired += [one for one in self._sources.values() if kept.get(one.config.id) is not one]
        self._sources = kept
        return kept

    def reload(self) -> None:
        """Read all of them again, changed or not."""
        for source in self._sources.values():
            source.reload()

    async def first(self) -> None:
        """Wait until each issuer's keys were asked for once, with success or without, and no longer than a
        fetch may take."""
        for source in self._sources.values():
            source.poll()
        begun = [task for source in self._sources.values() if (task := source.in_progress) is not None]
        if begun:
            await asyncio.wait(begun, timeout=FETCH_S)

    async def watch(self) -> None:
        """Keep them fresh, until cancelled."""
        try:
            while True:
                await self._clock.sleep(POLL_S)
                for source in self._sources.values():
                    source.poll()
                while self._retired:
                    await self._retired.pop().aclose()
        finally:
            for source in (*self._sources.values(), *self._retired):
                await source.aclose()

    def _open(self, config: IssuerConfig) -> IssuerKeys:
        path = config.jwks_file or config.secret_file
        return RemoteKeys(config, self._clock) if path is None else FileKeys(config, Path(path))
