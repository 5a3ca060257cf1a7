"""The profile of each model's engine: its tokenizer, its room for a sequence, whether it is one of ours.

The gateway asks the engine for it, in the background, and keeps it fresh: every answer names the hash of its
engine's tokenizer, and a new hash is a reason to ask again. No request waits for the profile; as long as
there is none, the tokens of that model's prompts are estimated.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from gateway.config import ModelConfig
from gateway.relay.upstream import HeaderPairs, Upstream
from shared import logs
from shared.clock import SYSTEM_CLOCK, Clock
from shared.errors import ApiError, ConnectTimeout, NotReady, UpstreamFailed, UpstreamUnreachable
from shared.ids import TOKENIZER_HEADER
from shared.openai import ChatMessage, ChatRequest
from shared.room import Room
from shared.tokenizer import Tokenizer, TokenizerBundle, UnusableTokenizer

FETCH_S: Final = 30.0
"""The time to fetch the profile from one replica, in seconds."""
ASKED_MAX: Final = 8
"""The replicas that are asked for the profile, one after the other, before a pause."""
RETRY_S_MIN: Final = 0.5
RETRY_S_MAX: Final = 5.0


log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """The facts that an engine reports about a model."""

    bundle: TokenizerBundle | None
    """The engine's tokenizer. None for an engine of another make, which has none to give."""
    room: Room | None
    """The tokens that a prompt and its answer may have together. None where the engine does not tell them."""
    created: int | None

    @property
    def is_whole(self) -> bool:
        """True if the profile is complete. An engine of ours that is still loading knows its tokenizer, and
        not yet the room for its sequences."""
        return self.bundle is None or self.room is not None


@dataclass(slots=True)
class Known:
    """The profile of one model's engine, and whether to fetch it again."""

    profile: EngineProfile | None = None
    tokenizer: Tokenizer | None = None
    """The tokenizer that prompts are counted with. None while there is none."""
    stale: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def room(self) -> Room | None:
        """The tokens that a prompt and its answer may have together. None while they are unknown."""
        return None if self.profile is None else self.profile.room

    @property
    def is_foreign(self) -> bool:
        """True if the engine is known to be of another make. False while its profile is unknown."""
        return self.profile is not None and self.profile.bundle is None

    def observe(self, tokenizer_hash: str | None) -> None:
        """Note the tokenizer's hash in an answer. A hash that is not that of the tokenizer in use causes a
        fetch."""
        own = self.tokenizer.hash if self.tokenizer else None
        if tokenizer_hash is not None and tokenizer_hash != own:
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
        self._known: Final = {name: Known() for name in self._models}
        self._fetch = fetch
        self._clock = clock
        self.changes = 0
        """How often an engine has told something else of its model's age or room than before."""

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
        tokenizer.prompt_ids(ChatRequest(model="", messages=[ChatMessage("user", "Hello.")]))
    return tokenizer


# -- asking ---------------------------------------------------------------------------------------


class _Model(msgspec.Struct):
    """A model in an engine's list. Engines of other makes leave fields out, and add their own."""

    id: str
    max_model_len: int | None = None
    context_len: int | None = None
    created: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


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
    name = model.upstream_model or model.name
    _, body = await upstream.fetch(model.protocol, url, "/v1/models", connect_s, headers)
    try:
        models = msgspec.json.decode(body, type=_Models)
    except msgspec.DecodeError as error:
        raise UpstreamFailed("The engine's list of models cannot be read.", detail=str(error)) from error
    served = next((entry for entry in models.data if entry.id == name), None)
    if served is None:
        raise UpstreamFailed("The engine does not serve this model.", detail=f"{url} does not list {name!r}")
    bundle = await _fetch_bundle(upstream, model, url, connect_s, headers)
    return EngineProfile(bundle, Room.of(served.max_model_len, served.context_len), served.created)


async def _fetch_bundle(
    upstream: Upstream, model: ModelConfig, url: str, connect_s: float, headers: HeaderPairs
) -> TokenizerBundle | None:
    """The engine's tokenizer. None for an engine of another make, which has none to give."""
    try:
        headers_received, body = await upstream.fetch(
            model.protocol, url, "/penstock/tokenizer", connect_s, headers
        )
    except (ConnectTimeout, UpstreamUnreachable):
        raise
    except ApiError:
        return None
    try:
        bundle = await asyncio.to_thread(msgspec.json.decode, body, type=TokenizerBundle)
    except msgspec.DecodeError as error:
        raise UpstreamFailed("The engine's tokenizer cannot be read.", detail=str(error)) from error
    if bundle.hash != headers_received.get(TOKENIZER_HEADER, bundle.hash):
        raise UpstreamFailed("The engine's tokenizer is damaged.", detail="its hash is not the one announced")
    return bundle
