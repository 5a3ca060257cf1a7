"""The keys that issuers of tokens sign with, and keep changing: fetched from a URL, or read from a file.

Theory. An issuer publishes its keys under a URL, each with an id (`kid`) that its tokens name. It rotates
them: a new key appears, tokens are signed with it, later the old one disappears. So the set is fetched again
every `refresh_s`, and earlier when a token names a key that is not in it.

Rules:

1. No request fetches anything. Fetches are tasks of their own, one at a time for each issuer, bounded in
   time, bytes and keys. Tokens with unknown key ids, however many, begin one at most every `REFETCH_GAP_S`,
   and the next `POLL_S` after one that has found a new key: whoever makes up ids cannot have that, and an
   issuer that rotates often needs it.
   Their requests wait for the one in progress, for at most `REFETCH_WAIT_S`, `WAITING_MAX` of them: otherwise
   the first callers of an issuer that signs with a key in the moment in which it publishes it would have to
   come again, at each rotation. Nobody else waits: not for the fetch, since a key that is known is used as it
   is, and not for those who wait, since they hold no seat yet and no body.
   A token is refused for its key id once a fetch that began after the id was first seen has not found it.
   Until then the answer is not known, and the caller is asked to come again. Ids that come between two
   fetches cause one when the gap is over, whether they come again or not. So a key is known at most
   `KNOWN_WITHIN_S` after its first token, whoever makes up ids meanwhile, and no token of it was refused.
2. Keys that cannot be read change nothing. Those that were fetched `stale_s` ago are not trusted any more.
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

from gateway.edge_config import REFRESH_S_MIN, IssuerConfig
from gateway.identity.bounded import BoundedDict
from gateway.identity.key_set import SET_LEN_MAX, BadKeys, VerificationKey, keys_of, secret_of
from shared import logs
from shared.clock import Clock
from shared.config import ConfigError
from shared.files import file_version, read_bytes
from shared.metrics import Counter
from shared.tls import UnusableTls, client_context

FETCH_S: Final = 5.0
"""How long a fetch may take, in seconds."""
POLL_S: Final = 1.0
"""The time between two looks at what is to be read again, in seconds."""
RETRY_S: Final = 5.0
"""The time from a failed fetch to the next, in seconds."""
REFETCH_GAP_S: Final = REFRESH_S_MIN
"""The shortest time from a fetch that unknown ids caused, and that found none, to the next, in seconds."""
REFETCH_WAIT_S: Final = 1.0
"""How long a request waits for the fetch that its unknown key id causes, in seconds."""
KNOWN_WITHIN_S: Final = REFETCH_GAP_S + POLL_S + FETCH_S
"""The longest time from the first token with a new key to the gateway's knowing it, while the issuer's key
server answers, in seconds."""
WAITING_MAX: Final = 1024
"""The most requests that wait for one issuer's fetch."""
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
        self._keys: tuple[VerificationKey, ...] = ()

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

    def refetch(self, sought: Sought) -> asyncio.Task[None] | None:
        """The fetch in progress, or one that this begins, to look for a key; None where none may be begun
        now."""
        return None

    @property
    def in_progress(self) -> asyncio.Task[None] | None:
        """The fetch in progress; None where there is none."""
        return None

    def put_off(self) -> float:
        """Note that a caller was sent away because its key id is not known yet. Returns the time until it may
        be, in seconds."""
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
        self._path = path
        self._seen = file_version(path)
        try:
            self._take(_read(path))
        except BadKeys as error:
            raise ConfigError(_located(config, error)) from error

    def poll(self) -> None:
        if file_version(self._path) != self._seen:
            self.reload()

    def reload(self) -> None:
        self._seen = file_version(self._path)
        try:
            self._take(_read(self._path))
        except BadKeys as error:
            self._failed(_located(self.config, error))


class RemoteKeys(IssuerKeys):
    """Keys that are fetched from a URL."""

    def __init__(self, config: IssuerConfig, clock: Clock) -> None:
        super().__init__(config)
        self._clock = clock
        self._context: ssl.SSLContext | None = None
        """Made at the first fetch, on a thread: reading all authorities of a system takes 40 ms."""
        self._task: asyncio.Task[None] | None = None
        """The last fetch, in progress or done; None before the first."""
        self._due_s = -math.inf
        """When the next fetch is due, on the monotonic clock."""
        self._look_from_s = -math.inf
        """From when on unknown key ids may begin a fetch."""
        self._seen: BoundedDict[Sought, float] = BoundedDict(SEEN_MAX)
        """When each unknown key was first sought."""
        self._is_wanted = False
        """True if callers were sent away since the last fetch because none has looked for their key ids."""
        self._fetched_s = -math.inf
        """When the last fetch that succeeded was begun."""
        self._failing = False

    @property
    def is_trusted(self) -> bool:
        return self._clock.monotonic() < self._fetched_s + self.config.stale_s

    def put_off(self) -> float:
        if self._failing:  # it is fetched again all the time
            return 1.0
        self._is_wanted = True
        return max(1.0, self._look_from_s + POLL_S - self._clock.monotonic())

    def is_certain(self, sought: Sought) -> bool:
        seen_s = self._seen.get(sought)
        return not self._failing and seen_s is not None and seen_s <= self._fetched_s

    def poll(self) -> None:
        now_s = self._clock.monotonic()
        if self._is_wanted and now_s >= self._look_from_s and self.in_progress is None:
            self._look(now_s)
        elif now_s >= self._due_s:
            self.reload()

    def reload(self) -> None:
        self._begin()

    def refetch(self, sought: Sought) -> asyncio.Task[None] | None:
        now_s = self._clock.monotonic()
        if self._seen.get(sought) is None:
            self._seen.put(sought, now_s)
        if self.in_progress is not None:
            return self.in_progress
        return self._look(now_s) if now_s >= self._look_from_s else None

    @property
    def in_progress(self) -> asyncio.Task[None] | None:
        return None if self._task is None or self._task.done() else self._task

    def _look(self, now_s: float) -> asyncio.Task[None]:
        """Begin a fetch because of unknown key ids."""
        self._look_from_s, self._is_wanted = now_s + REFETCH_GAP_S, False
        return self._begin()

    async def aclose(self) -> None:
        if (task := self.in_progress) is not None:
            task.cancel()
            await asyncio.wait({task})

    def _begin(self) -> asyncio.Task[None]:
        if self._task is None or self._task.done():
            self._due_s = self._clock.monotonic() + self.config.refresh_s
            self._task = asyncio.create_task(self._fetch(), name=f"keys of {self.config.id}")
        return self._task

    async def _fetch(self) -> None:
        begun_s = self._clock.monotonic()
        try:
            async with asyncio.timeout(FETCH_S):
                if self._context is None:
                    self._context = await asyncio.to_thread(client_context, ca=self.config.ca)
                data = await _download(self.config.jwks_url or "", self._context)
            if self._take(data):
                self._look_from_s = min(self._look_from_s, begun_s + POLL_S)
        except (BadKeys, UnusableTls, httpx.HTTPError, httpx.InvalidURL, OSError, TimeoutError) as error:
            self._failing = True
            self._due_s = begun_s + RETRY_S
            told = error.problems if isinstance(error, BadKeys) else (str(error) or type(error).__name__,)
            self._failed(f"{self.config.jwks_url}: {problem}" for problem in told)
        else:
            self._failing = False
            self._fetched_s = begun_s


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
