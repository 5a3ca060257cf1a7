"""The profile of each model's engine: its tokenizer, its room for a sequence, whether it is one of ours.

The gateway asks the engine for it, in the background, and keeps it fresh: every answer names the hash of its
engine's tokenizer, and a new hash is a reason to ask again. No request waits for the profile; as long as
there is none, the tokens of that model's prompts are estimated.

Whose an engine is decides what it is told: one of ours learns the tenant, one of another make must not. Only
an engine that says that it has no tokenizer is of another make; any other failure leaves open what it is, and
what was known stays known. While it is open, requests are sent as suits the likelier make, by the model's
configuration and by what has answered.

No single replica is believed, unless it is the only one:

1. All replicas are asked for the hash of their tokenizer. The one that most of them have is taken over, and
   until there is one the old one stays: ids that were counted with another tokenizer than a replica's, it
   makes anew. The room is the one that most of those tell.
2. A tokenizer is fetched where its hash is not that of the one in use, nor of the last that was of no use;
   for one model once in `FRESH_S` at most, and for all models `FETCHES_MAX` at a time.
3. It is loaded by a process of its own first (`gateway.relay.checked_bundles`). To load it here holds the
   event loop, so that is done so rarely that it is `LOAD_SHARE` of the time at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import BinaryIO, Final, Protocol, Self

import msgspec

from gateway.config.whole import EngineMake, ModelConfig, Salted
from gateway.relay.checked_bundles import CheckedBundle, Unreadable, bundle_file
from gateway.relay.upstream import HeaderPairs, Upstream
from shared.apis.chat_messages import ChatMessage
from shared.apis.generation import GenerationRequest
from shared.apis.models import Capabilities
from shared.apis.prompt import ChatPrompt
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.text.tokenizer import BUNDLE_LEN_MAX, Tokenizer, UnusableTokenizer
from shared.wire.errors import ApiError, ConnectTimeout, NotReady, UpstreamFailed, UpstreamUnreachable
from shared.wire.ids import TOKENIZER_HEADER
from shared.wire.room import Room
from shared.wire.undecodable import UNDECODABLE

LIST_S: Final = 5.0
"""The time for which replicas are waited for that are asked for their lists of models, in seconds."""
FETCH_S: Final = 30.0
"""The time to fetch a tokenizer from one replica, in seconds."""
LISTED_MAX: Final = 32
"""The replicas that are asked for their lists, those that are ready first."""
ASKED_MAX: Final = 8
"""Those of them that are asked for the tokenizer, one after the other, before a pause."""
FETCHES_MAX: Final = 2
"""The tokenizers that are fetched and loaded at a time."""
RETRY_S_MIN: Final = 0.5
RETRY_S_MAX: Final = 5.0
FRESH_S: Final = 60.0
"""The time between two looks at a model's engine of which a tokenizer was fetched before, in seconds."""
LOAD_SHARE: Final = 1 / 600
"""The share of the time that loading a model's tokenizers takes at most."""
SALTED: Final = frozenset({"vllm", "sglang", "penstock"})
"""The `owned_by` of engines that take a `cache_salt`: vLLM from 0.9 on, SGLang from 0.5.4 on, and ours, where
they are configured as of another make."""


_UNTOLD: Final = Capabilities(tools=False, reasoning=False, structured_output=False)
"""The abilities of a model whose engine tells its profile without them, as older ones of ours do."""

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """The facts that an engine reports about a model."""

    tokenizer: str | None
    """The hash of the engine's tokenizer. None for an engine of another make, which has none to give."""
    room: Room | None
    """The tokens that a prompt and its answer may have together. None where the engine does not tell them."""
    created: int | None
    owned_by: str | None = None
    """Whose it says that it is: `vllm`, `sglang`, `llamacpp`, `penstock`."""
    capabilities: Capabilities | None = None
    """The abilities of the model. None where the engine does not tell them."""

    @property
    def is_whole(self) -> bool:
        """True if the profile is complete. An engine of ours that is still loading knows its tokenizer, and
        not yet the room for its sequences."""
        return self.tokenizer is None or self.room is not None


class Asking(Protocol):
    """The ways to ask a model's replicas."""

    async def profile(self, model: ModelConfig) -> tuple[EngineProfile, Sequence[str]]:
        """What most of them say, and the URLs of those that say so. Raises ApiError."""
        ...

    async def bundle(self, model: ModelConfig, urls: Sequence[str], hash_: str) -> CheckedBundle | str:
        """The tokenizer of this hash, or the reason why it is of no use. Raises ApiError."""
        ...


@dataclass(slots=True)
class Known:
    """The profile of one model's engine, and whether to fetch it again."""

    make: EngineMake = "auto"
    """Whose the engine is, as it is configured."""
    seems_foreign: bool = False
    """True if the engine is taken for one of another make as long as it has told nothing of itself."""
    profile: EngineProfile | None = None
    """What it told last; `learn` sets it. None as long as it has told nothing."""
    capabilities: Capabilities | None = None
    """The abilities of the model. None as long as its engine has told nothing."""
    room: Room | None = None
    """The tokens that a prompt and its answer may have together. None while they are unknown."""
    is_ours: bool = False
    """True if the engine is known to be one of ours."""
    tokenizer: Tokenizer | None = None
    """The tokenizer that prompts are counted with. None while there is none."""
    useless: str | None = None
    """The hash of the last tokenizer that could not be used."""
    stale: asyncio.Event = field(default_factory=asyncio.Event)
    salted: Salted = "auto"
    """Whether it is sent a salt for its cached prefixes, as it is configured."""
    fetch_due_s: float | None = None
    """When the next tokenizer may be fetched, on the monotonic clock. None while none was."""

    @classmethod
    def at_first(cls, model: ModelConfig) -> Self:
        """The knowledge of an engine that a configuration gives. Ours speak HTTP/2, and ask for no key."""
        has_key = model.api_key is not None
        seems_foreign = model.protocol == "http1" or has_key
        is_ours = model.engine == "penstock"
        return cls(model.engine, seems_foreign=seems_foreign, is_ours=is_ours, salted=model.cache_salt)

    def learn(self, profile: EngineProfile) -> None:
        """Take over what the engine tells of itself."""
        self.profile, self.room = profile, profile.room
        self.capabilities = profile.capabilities or _UNTOLD
        self.is_ours = profile.tokenizer is not None or self.make == "penstock"

    def check(self, request: GenerationRequest) -> None:
        """Raises PathNotServed for a request of an API that the model is known not to serve."""
        if self.capabilities is not None and not getattr(self.capabilities, request.ability):
            self.capabilities.check(request)

    @property
    def takes_salt(self) -> bool:
        """True if an engine of another make keeps cached prefixes apart by `cache_salt`. One that does not
        may refuse a field that it does not know."""
        if self.salted == "auto":
            return self.profile is not None and self.profile.owned_by in SALTED
        return self.salted == "send"

    @property
    def is_foreign(self) -> bool:
        """True if the engine is known to be of another make."""
        if self.profile is not None:
            return self.profile.tokenizer is None
        return self.make == "openai"

    @property
    def counts_as_ours(self) -> bool:
        """True if the engine is told what one of ours is told: it is, or may be and seems to be."""
        return self.is_ours or not (self.is_foreign or self.seems_foreign)

    def lacks(self, tokenizer_hash: str) -> bool:
        """True if a tokenizer is neither in use nor known to be of no use."""
        own = self.tokenizer.hash if self.tokenizer else None
        return tokenizer_hash not in (own, self.useless)

    def observe(self, tokenizer_hash: str | None) -> None:
        """Note the tokenizer's hash in an answer, which those of our engines always have. A hash that is not
        that of the tokenizer in use causes a fetch, unless no tokenizer is looked for."""
        if self.make == "openai":
            return
        if tokenizer_hash is None:
            self.seems_foreign = True
            return
        own = self.tokenizer.hash if self.tokenizer else None
        if tokenizer_hash != own:
            self.seems_foreign = False
            self.stale.set()


class Engines:
    """The engines' profiles, by model."""

    def __init__(self, models: Iterable[ModelConfig], asking: Asking, clock: Clock = SYSTEM_CLOCK) -> None:
        self._models: Final = {model.name: model for model in models}
        self._known: Final = {name: Known.at_first(model) for name, model in self._models.items()}
        self._asking: Final = asking
        self._fetches: Final = asyncio.Semaphore(FETCHES_MAX)
        self._clock = clock
        self.changes = 0
        """The number of times that an engine told another age or room of its model than before."""

    def of(self, model: ModelConfig) -> Known:
        return self._known[model.name]

    def works(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """The background tasks that fetch the profiles and keep them fresh, by name."""
        return {f"tokenizer of {name}": partial(self._keep, name) for name in self._models}

    async def _keep(self, name: str) -> None:
        known = self._known[name]
        retry_s = RETRY_S_MIN
        while True:
            known.stale.clear()
            asked_s, is_new = self._clock.monotonic(), known.fetch_due_s is None
            try:
                profile, urls = await self._asking.profile(self._models[name])
                await self.adopt(name, profile, urls)
                if profile.is_whole:
                    retry_s = RETRY_S_MIN
                    await known.stale.wait()
            except ApiError as error:
                log.warning("tokenizer.unavailable", model=name, error=error.code, detail=error.detail)
            is_new |= known.profile is None or not known.profile.is_whole
            rest_s = 0.0 if is_new else asked_s + FRESH_S - self._clock.monotonic()
            await self._clock.sleep(max(retry_s, rest_s))  # also when replicas differ: it must not spin
            retry_s = min(RETRY_S_MAX, 2 * retry_s)

    async def adopt(self, name: str, profile: EngineProfile, urls: Sequence[str]) -> None:
        """Take over what the replicas at these URLs say. Raises ApiError."""
        known = self._known[name]
        if profile.tokenizer is None:
            known.tokenizer = None
            log.info("tokenizer.none", model=name, consequence="prompts are estimated")
        elif known.lacks(profile.tokenizer) and self._clock.monotonic() >= (known.fetch_due_s or 0.0):
            async with self._fetches:
                await self._load(name, known, urls, profile.tokenizer)
        before = known.profile
        known.learn(profile)
        if known.is_foreign and not known.takes_salt:
            told = "tenants share cached prefixes at this engine, which shows in its times"
            log.warning("prefixes.shared", model=name, owned_by=profile.owned_by, consequence=told)
        if before is None or _listed(before) != _listed(profile):
            self.changes += 1

    async def _load(self, name: str, known: Known, urls: Sequence[str], hash_: str) -> None:
        before_s, known.fetch_due_s = known.fetch_due_s, self._clock.monotonic() + FRESH_S
        try:
            found = await self._asking.bundle(self._models[name], urls, hash_)
        except (ConnectTimeout, NotReady, UpstreamUnreachable):  # nothing was asked
            known.fetch_due_s = before_s
            raise
        if isinstance(found, str):
            self._reject(name, known, hash_, found)
            return
        known.fetch_due_s += max(0.0, found.load_s / LOAD_SHARE - FRESH_S)
        try:
            known.tokenizer = await asyncio.to_thread(_warm, found)
        except UnusableTokenizer as error:
            self._reject(name, known, hash_, str(error))
        else:
            log.info("tokenizer.loaded", model=name, hash=hash_)

    def _reject(self, name: str, known: Known, hash_: str, reason: str) -> None:
        known.useless = hash_
        log.error("tokenizer.unusable", model=name, hash=hash_, error=reason)


def _warm(found: CheckedBundle) -> Tokenizer:
    """Make a tokenizer and use it once, so that the first request is counted as fast as the second. Raises
    UnusableTokenizer."""
    tokenizer = found.load()
    with contextlib.suppress(ApiError):  # a model without a chat template
        tokenizer.prompt_ids(ChatPrompt([ChatMessage("user", "Hello.")]))
    return tokenizer


# -- asking ---------------------------------------------------------------------------------------


class _Model(msgspec.Struct):
    """A model in an engine's list. Engines of other makes leave fields out, and add their own."""

    id: str
    max_model_len: int | None = None
    context_len: int | None = None
    created: int | None = None
    owned_by: object = None
    capabilities: msgspec.Raw = msgspec.Raw(b"null")


class _Models(msgspec.Struct):
    data: list[_Model]


TOKENIZER: Final = "/penstock/tokenizer"
_HASH: Final = re.compile(r"sha256:[0-9a-f]{64}")
_NOT_THERE: Final = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)
"""The statuses that say that an engine has no such path."""


@dataclass(frozen=True, slots=True)
class Told:
    """The answer of one replica, or its failure to answer."""

    url: str
    tokenizer: str | None = None
    """The hash of its tokenizer, where it names one."""
    listed: _Model | None = None
    failure: ApiError | None = None
    counts: bool = True
    """True for a replica that is there: its voice counts also where it does not answer in time."""


@dataclass(frozen=True, slots=True)
class Replies:
    """The way to ask the replicas of each model over the hop."""

    upstream: Upstream
    urls: Callable[[str], Sequence[str]]
    """The URLs of a model's replicas, those that are ready first."""
    connect_s: Callable[[ModelConfig], float]
    headers: Callable[[ModelConfig], HeaderPairs]
    check: Callable[[BinaryIO], tuple[str, CheckedBundle | str]]
    """`gateway.relay.checked_bundles.check`."""

    async def profile(self, model: ModelConfig) -> tuple[EngineProfile, Sequence[str]]:
        urls = self.urls(model.name)[:LISTED_MAX]
        told = await asyncio.gather(*(self._told(model, url) for url in urls))
        most = elected(told)
        urls = [one.url for one in most]
        hash_ = most[0].tokenizer
        if hash_ is None and model.engine != "openai":
            hash_ = await self._unnamed(model, urls[0])
        if hash_ is None and model.engine == "penstock":
            detail = f'{urls[0]}: it is not engine = "penstock"'
            raise UpstreamFailed("The engine gives no tokenizer.", detail=detail)
        listed = [one.listed for one in most if one.listed is not None]
        if not listed and hash_ is not None:
            raise UpstreamFailed("The engine's list of models is not there.", detail=urls[0])
        created = listed[0].created if listed else None
        return EngineProfile(hash_, _room(listed), created, _owner(listed), _abilities(listed)), urls

    async def _told(self, model: ModelConfig, url: str) -> Told:
        try:
            async with asyncio.timeout(LIST_S):
                return await self._listed(model, url)
        except ApiError as error:
            return Told(url, failure=error, counts=False)
        except TimeoutError:
            return Told(url, failure=_late(url, LIST_S), counts=model.engine != "openai")

    async def _listed(self, model: ModelConfig, url: str) -> Told:
        """The model as its engine lists it, where it has a list: some of other makes have none."""
        name = model.upstream_model or model.name
        try:
            parts = self.connect_s(model), self.headers(model)
            headers, body = await self.upstream.fetch(model.protocol, url, "/v1/models", *parts)
        except ApiError as error:
            if error.status in _NOT_THERE:
                return Told(url)
            raise
        try:
            models = msgspec.json.decode(body, type=_Models)
        except UNDECODABLE as error:
            raise UpstreamFailed("The engine's list of models cannot be read.", detail=str(error)) from error
        served = next((entry for entry in models.data if entry.id == name), None)
        if served is None:
            detail = f"{url} does not list {name!r}"
            raise UpstreamFailed("The engine does not serve this model.", detail=detail)
        return Told(url, None if model.engine == "openai" else _hash_in(headers), served)

    async def _unnamed(self, model: ModelConfig, url: str) -> str | None:
        """The hash of a tokenizer that no list names. None for an engine of another make, which says that it
        has none to give. One of ours may fail to answer, too, when it drains or stands behind a proxy, and
        stays one of ours."""
        try:
            headers = await self._get_into(bytes, 0, model, url)
        except ApiError as error:
            if error.status in _NOT_THERE:
                return None
            raise
        if (hash_ := _hash_in(headers)) is None:
            detail = f'{url}; if it is of another make, set engine = "openai" for its models'
            raise UpstreamFailed("The engine does not name its tokenizer.", detail=detail)
        return hash_

    async def bundle(self, model: ModelConfig, urls: Sequence[str], hash_: str) -> CheckedBundle | str:
        failure: ApiError = NotReady("The model has no replica that is ready.")
        problem: str | None = None
        for url in urls[:ASKED_MAX]:
            try:
                with bundle_file() as file:
                    async with asyncio.timeout(FETCH_S):
                        await self._get_into(file.write, BUNDLE_LEN_MAX, model, url)
                    found_hash, found = await asyncio.to_thread(self.check, file)
            except ApiError as error:
                failure = error
            except TimeoutError:
                failure = _late(url, FETCH_S)
            except Unreadable as error:
                failure = UpstreamFailed("The engine's tokenizer cannot be read.", detail=f"{url}: {error}")
            else:
                if found_hash == hash_:
                    return found
                if isinstance(found, str) and not found_hash:  # nobody knows what it was
                    problem = found
                detail = f"{url}: its hash is not the one announced"
                failure = UpstreamFailed("The engine's tokenizer is damaged.", detail=detail)
        if problem is not None:
            return problem
        raise failure

    def _get_into(
        self, take: Callable[[bytes], object], len_max: int, model: ModelConfig, url: str
    ) -> Awaitable[Mapping[str, str]]:
        """Ask a replica for its tokenizer."""
        parts = self.connect_s(model), self.headers(model)
        return self.upstream.fetch_into(take, len_max, model.protocol, url, TOKENIZER, *parts)


def elected(told: Sequence[Told]) -> list[Told]:
    """The replicas that name the tokenizer which most of those that are there have. Raises UpstreamFailed
    where there is no such tokenizer and, where no replica answered, the ApiError of one of them."""
    counted = [one for one in told if one.counts]
    answered = [one for one in counted if one.failure is None]
    if not answered:
        failures = [one.failure for one in told if one.failure is not None]
        raise failures[-1] if failures else NotReady("The model has no replica that is ready.")
    [(hash_, votes)] = Counter(one.tokenizer for one in answered).most_common(1)
    if 2 * votes <= len(counted):
        detail = f"{votes} of {len(counted)} replicas have the one that most have"
        raise UpstreamFailed("The replicas have different tokenizers.", detail=detail)
    return [one for one in answered if one.tokenizer == hash_]


def _late(url: str, seconds: float) -> UpstreamFailed:
    return UpstreamFailed("The engine did not answer in time.", detail=f"{url}: {seconds:g} s")


def _room(listed: Sequence[_Model]) -> Room | None:
    """The room that most tell; the largest of those that equally many tell, as engines refuse what does not
    fit."""
    rooms = Counter(Room.of(one.max_model_len, one.context_len) for one in listed)
    return max(rooms, key=lambda room: (rooms[room], 0 if room is None else room.most), default=None)


def _listed(profile: EngineProfile) -> tuple[object, ...]:
    """The part of a profile that lists of models tell."""
    return profile.created, profile.room, profile.capabilities


def _abilities(listed: Sequence[_Model]) -> Capabilities | None:
    """A model's abilities, where its engine tells them as ours do: other makes have other things of that
    name."""
    if not listed:
        return None
    try:
        return msgspec.json.decode(listed[0].capabilities, type=Capabilities | None)
    except UNDECODABLE:
        return None


def _owner(listed: Sequence[_Model]) -> str | None:
    """The make of the engines. Where they name several, one that takes no salt: then nothing is taken for
    kept apart that is not."""
    owners = [one.owned_by if isinstance(one.owned_by, str) else None for one in listed]
    return next((owner for owner in owners if owner not in SALTED), owners[0] if owners else None)


def _hash_in(headers: Mapping[str, str]) -> str | None:
    """The hash that an answer names. None where it names nothing that is a hash."""
    named = headers.get(TOKENIZER_HEADER, "")
    return named if _HASH.fullmatch(named) else None
