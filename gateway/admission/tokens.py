"""How many tokens a request weighs: counted exactly, with the model's own tokenizer.

The tokenizer is the engine's own, which the gateway fetches. Until it is there, and for engines that have
none to give, prompts are estimated.

Rules:

1. Counting never holds up the event loop. A prompt of up to
   `INLINE_LEN_MAX` characters is counted in place, because handing it to a thread and back takes
   longer than counting it. Any other is counted slice by slice on threads that tenants share fairly, and
   no further than there is room for.
2. Ids that were counted are sent along; the engine trusts them only under its own tokenizer's hash.
3. A template that is not known to be bounded is rendered by another process, and a tokenizer that was once
   slow is used on threads, whatever the length of a prompt.
4. An estimate errs on the high side for most text: one token for `ESTIMATE_BYTES` bytes of UTF-8
   (English has about four, Chinese and Japanese about three) and a few for each message's frame.
   What it overstates comes back when the request settles.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from shared.errors import NotInPlace
from shared.fair_threads import FairThreads
from shared.openai import ChatRequest, PromptExtension, PromptRequest
from shared.prompts import prompt_slices
from shared.room import Room
from shared.tokenizer import Tokenizer

INLINE_LEN_MAX: Final = 1024
"""About 250 tokens: a tenth of a millisecond."""
ESTIMATE_BYTES: Final = 3
ESTIMATE_MESSAGE_TOKENS: Final = 8
QUOTA_SHARE_MAX: Final = 4
"""A request that states no maximum reserves for its completion at least the estimate, or this fraction (one
quarter) of the tightest limit on tokens if that is less, so that small limits still let it through."""


class Count(Struct, frozen=True):
    prompt_tokens: int
    """The tokens of all prompts together."""
    longest: int
    """The tokens of the longest of them."""
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
    """True if the request states no maximum and its caller's tokens are limited: then it is given one."""

    @property
    def least(self) -> int:
        return self.prompt_tokens + self.choices * self.least_each

    @property
    def most(self) -> int:
        return self.prompt_tokens + self.choices * self.most_each

    def maximum_each(self, granted: int) -> int:
        """The most tokens of each choice, so that all together stay within what was granted."""
        return max(1, (granted - self.prompt_tokens) // self.choices)


async def count_tokens(
    request: PromptRequest,
    tokenizer: Tokenizer | None,
    room: Room | None,
    threads: FairThreads,
    tenant: str,
) -> Count:
    """Exact where there is a tokenizer, else an estimate. `room` is None where it is unknown.

    Raises InvalidRequest for a prompt that is empty or that the chat template refuses, ContextLengthExceeded
    or NeverFits for one that is too long, and Overloaded.
    """
    if tokenizer is None:
        return estimate(request)
    prompt_ids: list[list[int]] | None = None
    if _is_short(request):
        try:
            prompt_ids = tokenizer.prompt_ids(request)
        except NotInPlace:  # rule 3
            prompt_ids = None
    if prompt_ids is None:
        prompt_ids = await threads.run(tenant, prompt_slices(tokenizer, request, room))
    lengths = [*map(len, prompt_ids)]
    return Count(sum(lengths), max(lengths), len(lengths), PromptExtension(tokenizer.hash, prompt_ids))


def check_fits(request: PromptRequest, count: Count, room: Room | None) -> None:
    """Raises ContextLengthExceeded or NeverFits, when the count is exact and the room is known."""
    stated = request.stated_tokens_max
    tokens = count.longest + max(1, stated or 0)
    if room is None or not count.is_exact or tokens <= room.most:
        return
    error, holds = room.refused(tokens)
    message = f"{holds}, and the prompt has {count.longest}"
    if stated is None or count.longest >= room.most:
        raise error(f"{message}.", param=request.prompt_param)
    raise error(f"{message}: there is no room for {stated} more.", param=request.max_tokens_param)


def span(
    request: PromptRequest, count: Count, room: Room | None, estimate: int, tokens_max: int | None
) -> Span:
    """The tokens to reserve: all prompts, and for every choice the most it may generate.

    For a choice without a maximum: `estimate` at least, and what there is room for at most. `tokens_max`
    is the tightest limit of the caller; without one the estimate is all that is reserved, as nothing
    bounds what is generated.
    """
    choices = (request.n or 1) * count.prompts
    stated = request.output_tokens_max
    if stated is not None:
        return Span(count.prompt_tokens, choices, stated, stated)
    left = estimate if room is None else max(1, room.most - count.longest)
    each = min(estimate, left)
    if tokens_max is None:
        return Span(count.prompt_tokens, choices, each, each)
    share = tokens_max // QUOTA_SHARE_MAX // choices
    least = max(1, request.min_tokens or 0, min(each, share))
    return Span(count.prompt_tokens, choices, least, max(least, left), is_open=True)


def _is_short(request: PromptRequest) -> bool:
    if isinstance(request, ChatRequest):
        length = 0
        for message in request.messages:
            length += sum(map(len, message.printable)) + ESTIMATE_MESSAGE_TOKENS
        return length <= INLINE_LEN_MAX
    return isinstance(request.prompt, str) and len(request.prompt) <= INLINE_LEN_MAX


def estimate(request: PromptRequest) -> Count:
    """Without a tokenizer: from the size of the text; token ids count as they are."""
    if isinstance(request, ChatRequest):
        tokens = sum(
            sum(map(_estimate_text, message.printable)) + ESTIMATE_MESSAGE_TOKENS
            for message in request.messages
        )
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
