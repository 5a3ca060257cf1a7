"""The keys that issuers of tokens sign with: read from a JWK set (RFC 7517) or a file with a shared secret.

Theory. An issuer publishes its keys under a URL, each with an id (`kid`) that its tokens name. It rotates
them: a new key appears, tokens are signed with it, later the old one disappears. So the set is fetched again
every `refresh_s`, and earlier when a token names a key that is not in it.

Rules:

1. No request fetches anything. Fetches are tasks of their own, one at a time for each issuer, bounded in
   time, bytes and keys. Tokens with unknown key ids, however many, begin one at most every `REFETCH_GAP_S`.
   Their requests wait for the one in progress, for at most `REFETCH_WAIT_S`: otherwise the first tokens of an
   issuer that signs with a key in the moment in which it publishes it would be refused. Between fetches a
   token with an unknown key id is refused at once.
2. Keys that cannot be read change nothing. Those that were fetched `stale_s` ago are not trusted any more.
3. Keys come from the configured place alone. Whatever a token says of where its key is (jku, x5u, jwk, x5c)
   is not looked at.
4. Only public keys of stated kinds and sizes are taken from a set, only those meant for signatures, and of a
   private key its public part alone. A shared secret comes from a file of its own: a public key can never be
   taken for a secret.
"""

from __future__ import annotations

import asyncio
import math
import re
import ssl
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import msgspec

from gateway.edge_config import REFRESH_S_MIN, IssuerConfig
from shared import logs
from shared.clock import Clock
from shared.config import ConfigError
from shared.metrics import Counter
from shared.tls import UnusableTls, client_context

if TYPE_CHECKING:
    from jwt.algorithms import Algorithm

SET_LEN_MAX: Final = 256 * 1024
"""The largest key file, in bytes."""
KEYS_MAX: Final = 64
"""The most keys of one issuer."""
RSA_BITS_MIN: Final = 2048
RSA_BITS_MAX: Final = 4096
"""The largest RSA key: checking a signature takes time with the square of its size."""
FETCH_S: Final = 5.0
"""How long a fetch may take, in seconds."""
POLL_S: Final = 1.0
"""The time between two looks at what is to be read again, in seconds."""
RETRY_S: Final = 5.0
"""The time from a failed fetch to the next, in seconds."""
REFETCH_GAP_S: Final = REFRESH_S_MIN
"""The shortest time between two fetches that unknown key ids cause, in seconds."""
REFETCH_WAIT_S: Final = 1.0
"""How long a request waits for the fetch that its unknown key id causes, in seconds."""
WAITING_MAX: Final = 1024
"""The most requests that wait for one issuer's fetch."""

FETCHES: Final = Counter(
    "penstock_gateway_key_fetches", "Reads of issuers' keys, by their outcome.", ("issuer", "outcome")
)
KID: Final = re.compile(r"[A-Za-z0-9._~+/=:@-]{1,128}")
"""The form of a key id. It is only ever looked up."""

log = logs.get(__name__)


class BadKeys(Exception):
    """Keys that cannot be used; each problem is for the operator, and shows nothing of a secret."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class VerificationKey:
    """A key that checks signatures."""

    kid: str | None
    """Its id; None for a key that has none."""
    algorithms: frozenset[str]
    """The algorithms that it may be used with."""
    source: bytes = field(repr=False)
    """The key as it was read: two keys are the same when it is."""
    material: Any = field(repr=False, compare=False)
    """The key as PyJWT's algorithms take it."""


class Jwk(msgspec.Struct, frozen=True):
    """The public members of a JSON Web Key (RFC 7517, RFC 7518 section 6). Private ones are not read."""

    kty: str
    kid: str | None = None
    use: str | None = None
    key_ops: list[str] | None = None
    alg: str | None = None
    crv: str | None = None
    n: str | None = None
    e: str | None = None
    x: str | None = None
    y: str | None = None


class _JwkSet(msgspec.Struct, frozen=True):
    keys: list[msgspec.Raw]


_RSA: Final = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
_FITTING: Final = {
    ("RSA", None): _RSA,
    ("EC", "P-256"): frozenset({"ES256"}),
    ("EC", "P-384"): frozenset({"ES384"}),
    ("EC", "P-521"): frozenset({"ES512"}),
    ("OKP", "Ed25519"): frozenset({"EdDSA"}),
}
"""The algorithms of each kind of key: its `kty` and curve."""


@cache
def algorithms() -> dict[str, Algorithm]:
    """PyJWT's implementations, by their names. Imported at first use: with cryptography they take 9 MiB, for
    which a gateway without issuers has no use."""
    from jwt.algorithms import get_default_algorithms

    return get_default_algorithms()


def keys_of(data: bytes) -> tuple[tuple[VerificationKey, ...], list[str]]:
    """The keys of a JWK set, and what is wrong with those that were left out. Raises BadKeys where none is
    left, or where they are too many."""
    try:
        found = msgspec.json.decode(data, type=_JwkSet).keys
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise BadKeys("is no JWK set") from None
    if len(found) > KEYS_MAX:
        raise BadKeys(f"has {len(found)} keys, more than {KEYS_MAX}")
    keys: dict[str | None, VerificationKey] = {}
    problems = []
    for at, raw in enumerate(found):
        try:
            key = _key_of(raw)
            if key.kid in keys:
                raise BadKeys("has the id of another")
            keys[key.kid] = key
        except BadKeys as error:
            problems.append(f"keys[{at}] {error}")
    if not keys:
        raise BadKeys("has no key that can be used", *problems)
    return tuple(keys.values()), problems


def _key_of(raw: msgspec.Raw) -> VerificationKey:
    try:
        jwk = msgspec.json.decode(raw, type=Jwk)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise BadKeys("is no JSON Web Key") from None
    if jwk.kid is not None and not KID.fullmatch(jwk.kid):
        raise BadKeys("has an id that is not 1 to 128 plain characters")
    if jwk.use not in (None, "sig") or (jwk.key_ops is not None and "verify" not in jwk.key_ops):
        raise BadKeys("is not for signatures")
    fitting = _FITTING.get((jwk.kty, jwk.crv))
    if fitting is None:
        raise BadKeys("is of a kind that is not used here")
    fitting = fitting if jwk.alg is None else fitting & {jwk.alg}
    if not fitting:
        raise BadKeys("has an algorithm that does not go with its kind")
    public = {name: text for name, text in msgspec.structs.asdict(jwk).items() if isinstance(text, str)}
    try:
        material = algorithms()[min(fitting)].from_jwk(public)
    except Exception as error:  # whatever libraries make of a key that is not ours
        raise BadKeys(f"is malformed ({type(error).__name__})") from None
    if jwk.kty == "RSA" and not RSA_BITS_MIN <= material.key_size <= RSA_BITS_MAX:
        raise BadKeys(f"is not {RSA_BITS_MIN} to {RSA_BITS_MAX} bits long")
    return VerificationKey(jwk.kid, fitting, msgspec.json.encode(jwk), material)


def secret_of(data: bytes, names: Sequence[str]) -> VerificationKey:
    """The shared secret that a file holds, without the line end after it, for the algorithms of these names.
    Raises BadKeys."""
    from jwt.exceptions import PyJWTError

    secret = data.removesuffix(b"\n").removesuffix(b"\r")
    needed = max(int(name.removeprefix("HS")) // 8 for name in names)
    if len(secret) < needed:
        raise BadKeys(f"holds {len(secret)} bytes; {max(names)} needs at least {needed} (RFC 7518)")
    try:
        material = algorithms()[max(names)].prepare_key(secret)
    except PyJWTError:
        raise BadKeys("holds a public key or a JSON Web Key, which is no secret") from None
    return VerificationKey(None, frozenset(names), secret, material)


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

    @property
    def is_certain(self) -> bool:
        """True if a key that is not here does not exist, as far as can be known."""
        return True

    def find(self, kid: str | None, algorithm: str) -> VerificationKey | None:
        """The key of this id, or without one the only key that fits the algorithm; None where there is
        none."""
        fitting = [key for key in self._keys if algorithm in key.algorithms]
        if kid is None or self.config.secret_file is not None:
            return fitting[0] if len(fitting) == 1 else None
        return next((key for key in fitting if key.kid == kid), None)

    @abstractmethod
    def poll(self) -> None:
        """Read them again when it is time to."""

    @abstractmethod
    def reload(self) -> None:
        """Read them again now."""

    def refetch(self) -> asyncio.Task[None] | None:
        """The fetch in progress, or one that this begins; None where none may be begun now."""
        return None

    async def aclose(self) -> None:  # noqa: B027 -- a file has nothing in progress
        """End what is in progress."""

    def _take(self, data: bytes) -> None:
        """Raises BadKeys; then nothing has changed."""
        keys, problems = _parsed(data, self.config)
        if not set(self._keys) <= set(keys):
            self.generation += 1
        if set(self._keys) != set(keys):
            kids = [key.kid or "" for key in keys]
            log.info("keys.changed", issuer=self.config.id, kids=kids, left_out=problems)
        self._keys = keys
        FETCHES.inc(self.config.id, "ok")

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
        self._asked_s = -math.inf
        """When an unknown key id last began a fetch."""
        self._fetched_s = -math.inf
        """When the last fetch that succeeded was begun."""
        self._failing = False

    @property
    def is_trusted(self) -> bool:
        return self._clock.monotonic() < self._fetched_s + self.config.stale_s

    @property
    def is_certain(self) -> bool:
        return not self._failing

    def poll(self) -> None:
        if self._clock.monotonic() >= self._due_s:
            self.reload()

    def reload(self) -> None:
        self._begin()

    def refetch(self) -> asyncio.Task[None] | None:
        if self._task is not None and not self._task.done():
            return self._task
        now_s = self._clock.monotonic()
        if now_s - self._asked_s < REFETCH_GAP_S:
            return None
        self._asked_s = now_s
        return self._begin()

    async def aclose(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})

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
            self._take(data)
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
        with path.open("rb") as file:
            data = file.read(SET_LEN_MAX + 1)
    except OSError as error:
        raise BadKeys(error.strerror or str(error)) from error
    if len(data) > SET_LEN_MAX:
        raise BadKeys(f"is larger than {SET_LEN_MAX} bytes")
    return data


def _located(config: IssuerConfig, error: BadKeys) -> list[str]:
    path = config.jwks_file or config.secret_file
    return [f"issuers.{config.id}: {path}: {problem}" for problem in error.problems]


FileVersion = tuple[int, int, int] | None


def file_version(path: Path) -> FileVersion:
    """A value that changes whenever the file does, a replaced one too; None where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


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
        begun = [task for source in self._sources.values() if (task := source.refetch()) is not None]
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
