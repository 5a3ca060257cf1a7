"""The profile of each model's engine: its tokenizer, its room for a sequence, whether it is one of ours.

The gateway asks the engine for it, in the background, and keeps it fresh: every answer names the hash of its
engine's tokenizer, and a new hash is a reason to ask again. No request waits for the profile; as long as
there is none, the tokens of that model's prompts are estimated.

Whose an engine is decides what it is told: one of ours learns the tenant, one of another make must not. Only
an engine that says that it has no tokenizer is of another make; any other failure leaves open what it is, and
what was known stays known. While it is open, requests are sent as suits the likelier make, by the model's
configuration and by what has answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Final, Self

import msgspec

from gateway.config import EngineMake, ModelConfig, Salted
from gateway.relay.upstream import HeaderPairs, Upstream
from shared import logs
from shared.apis.messages import ChatMessage
from shared.apis.prompt import ChatPrompt
from shared.clock import SYSTEM_CLOCK, Clock
from shared.errors import ApiError, NotReady, UpstreamFailed
from shared.ids import TOKENIZER_HEADER
from shared.room import Room
from shared.tokenizer import Tokenizer, TokenizerBundle, UnusableTokenizer
from shared.undecodable import UNDECODABLE

FETCH_S: Final = 30.0
"""The time to fetch the profile from one replica, in seconds."""
ASKED_MAX: Final = 8
"""The replicas that are asked for the profile, one after the other, before a pause."""
RETRY_S_MIN: Final = 0.5
RETRY_S_MAX: Final = 5.0
SALTED: Final = frozenset({"vllm", "sglang"})
"""The `owned_by` of engines that take a `cache_salt`: vLLM from 0.9 on, SGLang from 0.5.4 on."""


log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """The facts that an engine reports about a model."""

    bundle: TokenizerBundle | None
    """The engine's tokenizer. None for an engine of another make, which has none to give."""
    room: Room | None
    """The tokens that a prompt and its answer may have together. None where the engine does not tell them."""
    created: int | None
    owned_by: str | None = None
    """Whose it says that it is: `vllm`, `sglang`, `llamacpp`, `penstock`."""

    @property
    def is_whole(self) -> bool:
        """True if the profile is complete. An engine of ours that is still loading knows its tokenizer, and
        not yet the room for its sequences."""
        return self.bundle is None or self.room is not None


@dataclass(slots=True)
class Known:
    """The profile of one model's engine, and whether to fetch it again."""

    make: EngineMake = "auto"
    """Whose the engine is, as it is configured."""
    seems_foreign: bool = False
    """True if the engine is taken for one of another make as long as it has told nothing of itself."""
    profile: EngineProfile | None = None
    tokenizer: Tokenizer | None = None
    """The tokenizer that prompts are counted with. None while there is none."""
    stale: asyncio.Event = field(default_factory=asyncio.Event)
    salted: Salted = "auto"
    """Whether it is sent a salt for its cached prefixes, as it is configured."""

    @classmethod
    def at_first(cls, model: ModelConfig) -> Self:
        """The knowledge of an engine that a configuration gives. Ours speak HTTP/2, and ask for no key."""
        has_key = (model.api_key_env, model.api_key_file) != (None, None)
        seems_foreign = model.protocol == "http1" or has_key
        return cls(model.engine, seems_foreign=seems_foreign, salted=model.cache_salt)

    @property
    def room(self) -> Room | None:
        """The tokens that a prompt and its answer may have together. None while they are unknown."""
        return None if self.profile is None else self.profile.room

    @property
    def takes_salt(self) -> bool:
        """True if an engine of another make keeps cached prefixes apart by `cache_salt`. One that does not
        may refuse a field that it does not know."""
        if self.salted == "auto":
            return self.profile is not None and self.profile.owned_by in SALTED
        return self.salted == "send"

    @property
    def is_ours(self) -> bool:
        """True if the engine is known to be one of ours."""
        if self.profile is not None and self.profile.bundle is not None:
            return True
        return self.make == "penstock"

    @property
    def is_foreign(self) -> bool:
        """True if the engine is known to be of another make."""
        if self.profile is not None:
            return self.profile.bundle is None
        return self.make == "openai"

    @property
    def counts_as_ours(self) -> bool:
        """True if the engine is told what one of ours is told: it is, or may be and seems to be."""
        return self.is_ours or not (self.is_foreign or self.seems_foreign)

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

    def __init__(
        self,
        models: Iterable[ModelConfig],
        fetch: Callable[[ModelConfig], Awaitable[EngineProfile]],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._models: Final = {model.name: model for model in models}
        self._known: Final = {name: Known.at_first(model) for name, model in self._models.items()}
        self._fetch = fetch
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
            try:
                profile = await self._fetch(self._models[name])
                await self._adopt(name, profile)
                if profile.is_whole:
                    retry_s = RETRY_S_MIN
                    await known.stale.wait()
            except ApiError as error:
                log.warning("tokenizer.unavailable", model=name, error=error.code, detail=error.detail)
            await self._clock.sleep(retry_s)  # also when replicas differ, so that this does not spin
            retry_s = min(RETRY_S_MAX, 2 * retry_s)

    async def _adopt(self, name: str, profile: EngineProfile) -> None:
        known = self._known[name]
        if profile.bundle is None:
            known.tokenizer = None
            log.info("tokenizer.none", model=name, consequence="prompts are estimated")
        else:
            await self._load(name, known, profile.bundle)
        before, known.profile = known.profile, profile
        if known.is_foreign and not known.takes_salt:
            told = "tenants share cached prefixes at this engine, which shows in its times"
            log.warning("prefixes.shared", model=name, owned_by=profile.owned_by, consequence=told)
        if before is None or (before.created, before.room) != (profile.created, profile.room):
            self.changes += 1

    async def _load(self, name: str, known: Known, bundle: TokenizerBundle) -> None:
        try:
            tokenizer = await asyncio.to_thread(_warm, bundle)  # a large tokenizer takes a second
        except UnusableTokenizer as error:
            log.error("tokenizer.unusable", model=name, error=str(error))
            return
        if known.tokenizer is None or tokenizer.hash != known.tokenizer.hash:
            known.tokenizer = tokenizer
            log.info("tokenizer.loaded", model=name, hash=tokenizer.hash)


def _warm(bundle: TokenizerBundle) -> Tokenizer:
    """Make a tokenizer and use it once, so that the first request is counted as fast as the second."""
    tokenizer = Tokenizer(bundle)
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


class _Models(msgspec.Struct):
    data: list[_Model]


_NOT_THERE: Final = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)
"""The statuses that say that an engine has no such path."""


async def fetch_profile(
    upstream: Upstream, model: ModelConfig, urls: Sequence[str], connect_s: float, headers: HeaderPairs
) -> EngineProfile:
    """Ask one replica after the other, `ASKED_MAX` at most. Raises the last one's ApiError when none
    answers."""
    failure: ApiError = NotReady("The model has no replica that is ready.")
    for url in urls[:ASKED_MAX]:
        try:
            async with asyncio.timeout(FETCH_S):
                return await _fetch(upstream, model, url, connect_s, headers)
        except ApiError as error:
            failure = error
        except TimeoutError:
            failure = UpstreamFailed("The engine did not answer in time.", detail=f"{url}: {FETCH_S:g} s")
    raise failure


async def _fetch(
    upstream: Upstream, model: ModelConfig, url: str, connect_s: float, headers: HeaderPairs
) -> EngineProfile:
    listed = await _listed(upstream, model, url, connect_s, headers)
    bundle = None
    if model.engine != "openai":
        bundle = await _fetch_bundle(upstream, model, url, connect_s, headers)
    if bundle is None and model.engine == "penstock":
        raise UpstreamFailed("The engine gives no tokenizer.", detail=f'{url}: it is not engine = "penstock"')
    if listed is None:
        if bundle is not None:
            raise UpstreamFailed("The engine's list of models is not there.", detail=url)
        return EngineProfile(None, None, None)
    owner = listed.owned_by if isinstance(listed.owned_by, str) else None
    return EngineProfile(bundle, Room.of(listed.max_model_len, listed.context_len), listed.created, owner)


async def _listed(
    upstream: Upstream, model: ModelConfig, url: str, connect_s: float, headers: HeaderPairs
) -> _Model | None:
    """The model as its engine lists it. None where the engine has no list, as some of other makes."""
    name = model.upstream_model or model.name
    try:
        _, body = await upstream.fetch(model.protocol, url, "/v1/models", connect_s, headers)
    except ApiError as error:
        if error.status in _NOT_THERE:
            return None
        raise
    try:
        models = msgspec.json.decode(body, type=_Models)
    except UNDECODABLE as error:
        raise UpstreamFailed("The engine's list of models cannot be read.", detail=str(error)) from error
    served = next((entry for entry in models.data if entry.id == name), None)
    if served is None:
        raise UpstreamFailed("The engine does not serve this model.", detail=f"{url} does not list {name!r}")
    return served


async def _fetch_bundle(
    upstream: Upstream, model: ModelConfig, url: str, connect_s: float, headers: HeaderPairs
) -> TokenizerBundle | None:
    """The engine's tokenizer. None for an engine of another make, which has none to give: it says so. One of
    ours may fail to answer, too, when it drains or stands behind a proxy, and stays one of ours."""
    try:
        headers_received, body = await upstream.fetch(
            model.protocol, url, "/penstock/tokenizer", connect_s, headers
        )
    except ApiError as error:
        if error.status in _NOT_THERE:
            return None
        raise
    try:
        bundle = await asyncio.to_thread(msgspec.json.decode, body, type=TokenizerBundle)
    except UNDECODABLE as error:
        detail = f'{error}; if it is of another make, set engine = "openai" for its models'
        raise UpstreamFailed("The engine's tokenizer cannot be read.", detail=detail) from error
    if bundle.hash != headers_received.get(TOKENIZER_HEADER, bundle.hash):
        raise UpstreamFailed("The engine's tokenizer is damaged.", detail="its hash is not the one announced")
    return bundle
