"""How many tokens a request weighs: counted exactly, with the model's own tokenizer.

The tokenizer is fetched from the engine, so that there is one copy of it, and its hash says when it
has changed. Until it is there, and for engines that have none to give, prompts are estimated.

Rules:

1. Counting never holds up the event loop, and fetching never holds up a request. A prompt of up to
   `INLINE_LEN_MAX` characters is counted in place, because handing it to a thread and back takes
   longer than counting it. Any other is counted slice by slice on threads that tenants share fairly, and
   no further than the model's context goes.
2. Ids that were counted are sent along; the engine trusts them only under its own tokenizer's hash.
3. An estimate errs on the high side for most text: one token for `ESTIMATE_BYTES` bytes of UTF-8
   (English has about four, Chinese and Japanese about three) and a few for each message's frame.
   What it overstates comes back when the request settles.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from msgspec import Struct

from gateway.config import ModelConfig
from shared import logs
from shared.clock import SYSTEM_CLOCK, Clock
from shared.errors import ApiError, ContextLengthExceeded
from shared.fair_threads import FairThreads
from shared.openai import ChatMessage, ChatRequest, CompletionRequest, PromptExtension
from shared.prompts import prompt_slices
from shared.tokenizer import Tokenizer, TokenizerBundle, UnusableTokenizer

INLINE_LEN_MAX: Final = 1024
"""About 250 tokens: a tenth of a millisecond."""
ESTIMATE_BYTES: Final = 3
ESTIMATE_MESSAGE_TOKENS: Final = 8
RETRY_S_MIN: Final = 0.5
RETRY_S_MAX: Final = 5.0
QUOTA_SHARE_MAX: Final = 4
"""A request that states no maximum reserves for its completion at least the estimate, or this fraction (one
quarter) of the tightest limit on tokens if that is less, so that small limits still let it through."""

log = logs.get(__name__)

PromptRequest = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """What an engine says about a model."""

    bundle: TokenizerBundle | None
    max_model_len: int | None
    created: int | None

    @property
    def is_whole(self) -> bool:
        """An engine of ours that is still loading knows its tokenizer, and not yet its length."""
        return self.bundle is None or self.max_model_len is not None


class Count(Struct, frozen=True):
    prompt_tokens: int
    """Of all prompts together."""
    longest: int
    """Of the longest of them."""
    prompts: int
    extension: PromptExtension | None
    """The ids, when they were counted and not estimated."""

    @property
    def is_exact(self) -> bool:
        return self.extension is not None


class Span(Struct, frozen=True):
    """Tokens to reserve: the least that the request can do with, and the most that it could use."""

    prompt_tokens: int
    choices: int
    least_each: int
    """Tokens of one choice."""
    most_each: int
    is_open: bool = False
    """Whether the request states no maximum and its caller's tokens are limited: then it is given one."""

    @property
    def least(self) -> int:
        return self.prompt_tokens + self.choices * self.least_each

    @property
    def most(self) -> int:
        return self.prompt_tokens + self.choices * self.most_each

    def maximum_each(self, granted: int) -> int:
        """What each choice may generate, so that all together stay within what was granted."""
        return max(1, (granted - self.prompt_tokens) // self.choices)


@dataclass(slots=True)
class _Known:
    """What is known about one model, and whether to ask again."""

    profile: EngineProfile | None = None
    tokenizer: Tokenizer | None = None
    stale: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def hash(self) -> str | None:
        return self.tokenizer.hash if self.tokenizer else None


class TokenCounter:
    def __init__(
        self,
        models: Iterable[ModelConfig],
        fetch: Callable[[ModelConfig], Awaitable[EngineProfile]],
        threads: FairThreads,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._models: Final = {model.name: model for model in models}
        self._known: Final = {name: _Known() for name in self._models}
        self._fetch = fetch
        self._threads = threads
        self._clock = clock

    def profile(self, model: ModelConfig) -> EngineProfile | None:
        return self._known[model.name].profile

    def is_foreign(self, model: ModelConfig) -> bool:
        """Whether it is known that the engine is none of ours."""
        profile = self._known[model.name].profile
        return profile is not None and profile.bundle is None

    async def count(self, model: ModelConfig, request: PromptRequest, tenant: str) -> Count:
        """Raises InvalidRequest for a prompt that is empty or that the chat template refuses,
        ContextLengthExceeded for one that is too long, and Overloaded."""
        known = self._known[model.name]
        tokenizer = known.tokenizer
        if tokenizer is None:
            return estimate(request)
        if _is_short(request):
            prompt_ids = tokenizer.prompt_ids(request)
        else:
            len_max = known.profile.max_model_len if known.profile is not None else None
            slices = prompt_slices(tokenizer, request, len_max)
            prompt_ids = await self._threads.run(tenant, slices)
        lengths = [len(ids) for ids in prompt_ids]
        return Count(sum(lengths), max(lengths), len(lengths), PromptExtension(tokenizer.hash, prompt_ids))

    def check_fits(self, model: ModelConfig, request: PromptRequest, count: Count) -> None:
        """Raises ContextLengthExceeded, when the count is exact and the engine told its length."""
        profile = self._known[model.name].profile
        if profile is None or profile.max_model_len is None or not count.is_exact:
            return
        limit, named = profile.max_model_len, request.stated_tokens_max
        if count.longest + max(1, named or 0) <= limit:
            return
        message = f"This model's context holds {limit} tokens, and the prompt has {count.longest}"
        if named is None or count.longest >= limit:
            raise ContextLengthExceeded(f"{message}.", param=request.prompt_param)
        message = f"{message}: there is no room for {named} more."
        raise ContextLengthExceeded(message, param=request.max_tokens_param)

    def span(
        self,
        model: ModelConfig,
        request: PromptRequest,
        count: Count,
        estimate: int,
        tokens_max: int | None,
    ) -> Span:
        """The tokens to reserve: all prompts, and for every choice the most it may generate.

        For a choice without a maximum: `estimate` at least, and what the context leaves at most. `tokens_max`
        is the tightest limit of the caller; without one the estimate is all that is reserved, as nothing
        bounds what is generated.
        """
        choices = (request.n or 1) * count.prompts
        stated = request.output_tokens_max
        if stated is not None:
            return Span(count.prompt_tokens, choices, stated, stated)
        profile = self._known[model.name].profile
        if profile is None or profile.max_model_len is None:
            room = estimate
        else:
            room = max(1, profile.max_model_len - count.longest)
        each = min(estimate, room)
        if tokens_max is None:
            return Span(count.prompt_tokens, choices, each, each)
        share = tokens_max // QUOTA_SHARE_MAX // choices
        least = max(1, request.min_tokens or 0, min(each, share))
        return Span(count.prompt_tokens, choices, least, max(least, room), is_open=True)

    def observe(self, model: ModelConfig, tokenizer_hash: str | None) -> None:
        """Every answer names its engine's tokenizer: fetch it when it is not the one in use."""
        known = self._known[model.name]
        if tokenizer_hash is not None and tokenizer_hash != known.hash:
            known.stale.set()

    def works(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """By name: what fetches, and keeps fresh, what is known about each model."""
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
        known.profile = profile

    async def _load(self, name: str, known: _Known, bundle: TokenizerBundle) -> None:
        try:
            tokenizer = await asyncio.to_thread(_warm, bundle)  # a large one takes a second
        except UnusableTokenizer as error:
            log.error("tokenizer.unusable", model=name, error=str(error))
            return
        if tokenizer.hash != known.hash:
            known.tokenizer = tokenizer
            log.info("tokenizer.loaded", model=name, hash=tokenizer.hash)


def _warm(bundle: TokenizerBundle) -> Tokenizer:
    """So that the first request is counted as fast as the second."""
    tokenizer = Tokenizer(bundle)
    with contextlib.suppress(ApiError):  # a model without a chat template
        tokenizer.prompt_ids(ChatRequest(model="", messages=[ChatMessage("user", "Hello.")]))
    return tokenizer


def _is_short(request: PromptRequest) -> bool:
    if isinstance(request, ChatRequest):
        texts = [message.text for message in request.messages]
        return sum(map(len, texts)) + len(texts) * ESTIMATE_MESSAGE_TOKENS <= INLINE_LEN_MAX
    return isinstance(request.prompt, str) and len(request.prompt) <= INLINE_LEN_MAX


def estimate(request: PromptRequest) -> Count:
    """Without a tokenizer: from the size of the text; token ids count as they are."""
    if isinstance(request, ChatRequest):
        tokens = sum(_estimate_text(message.text) + ESTIMATE_MESSAGE_TOKENS for message in request.messages)
        return Count(tokens, tokens, 1, None)
    prompt = request.prompt
    if isinstance(prompt, str):
        lengths = [_estimate_text(prompt)]
    elif all(isinstance(item, int) for item in prompt):
        lengths = [len(prompt)]
    else:
        lengths = [_estimate_text(item) if isinstance(item, str) else len(item) for item in prompt]  # type: ignore[arg-type]
    return Count(sum(lengths), max(lengths), len(lengths), None)


def _estimate_text(text: str) -> int:
    return -(-len(text.encode()) // ESTIMATE_BYTES)
