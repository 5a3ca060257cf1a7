"""How many tokens a request weighs: counted exactly, with the model's own tokenizer.

The tokenizer is the engine's own, which the gateway fetches. Until it is there, and for engines that have
none to give, all that they are sent is estimated.

Rules:

1. Counting never holds up the event loop. A prompt of up to
   `INLINE_LEN_MAX` characters is counted in place, because handing it to a thread and back takes
   longer than counting it. Any other is counted slice by slice on threads that tenants share fairly, and
   no further than there is room for.
2. Ids that were counted are sent along; the engine trusts them only under its own tokenizer's hash.
3. A template that is not known to be bounded is rendered by another process, and a tokenizer that was once
   slow is used on threads, whatever the length of a prompt. So is whatever a template is given beside plain
   messages: tools, calls, and variables of the caller's.
4. An estimate is of every field that goes out and holds text: what a template prints of it nobody knows. A
   token is taken for three letters or blanks, for one digit or sign, and for a part of a rarer character, as
   tokenizers of 130,000 tokens have it (`_PER_CHARACTER`). It errs on the high side for most text (1.4 times
   English, 1.8 times JSON), and random letters are twice as many. What it overstates comes back when the
   request settles.
5. The bound is never passed: a token for each byte of the text, a frame for each message, what templates say
   about tools, the model's number for each image. A caller with a budget reserves it as long as the budget
   has so much left.
6. What a caller predicts is reserved once for each choice, beside the most that this may have: an engine
   charges what of it turns out wrong, and no more than all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import UNSET, Raw, Struct

from shared.apis.chat_messages import ImagePart
from shared.apis.generation import GenerationRequest, PromptExtension
from shared.apis.prediction import PREDICTION
from shared.apis.prompt import BranchedPrompt, ChatPrompt, PromptForm
from shared.fairness.fair_threads import FairThreads, Slices
from shared.text.branches import pieces_of
from shared.text.known_pieces import KnownPieces
from shared.text.prompts import text_slices
from shared.text.tokenizer import Tokenizer
from shared.wire.errors import NotInPlace
from shared.wire.room import Room

INLINE_LEN_MAX: Final = 1024
"""About 250 tokens: a tenth of a millisecond."""
ESTIMATE_MESSAGE_TOKENS: Final = 8
"""The frame of a message: its role, and the tokens that begin and end it."""
ESTIMATE_TOOLS_TOKENS: Final = 384
"""Tokens of the words about tools that a template adds to the tools: Qwen's 110, DeepSeek's 330."""
ESTIMATE_FRAME_TOKENS: Final = 96
"""The words around a question or a document: those of Qwen3-Reranker have 70."""
LIKELY_BYTES: Final = 4
"""Bytes of a token in most texts."""
SLICE_LEN: Final = 256 * 1024
"""Bytes that are estimated at a time, in half a millisecond."""
QUOTA_SHARE_MAX: Final = 4
"""A request that states no maximum reserves for its completion at least the estimate, or this fraction (one
quarter) of the tightest limit on tokens if that is less, so that small limits still let it through."""


class TokenCount(Struct, frozen=True):
    prompt_tokens: int
    """The tokens of all prompts together."""
    longest: int
    """The tokens of the longest of them. Where they are estimated, those that it likely has: they say what
    room is left, which an estimate on the high side would make too little of."""
    prompts: int
    extension: PromptExtension | None
    """The ids, when they were counted and not estimated."""
    bound: int
    """The most tokens that all prompts together can have: by rule 5 it is never passed. The same as
    `prompt_tokens` where those were counted."""
    predicted: int = 0
    """The tokens of what the caller predicts, where they were counted: an estimate has them among
    `prompt_tokens`."""

    @property
    def is_exact(self) -> bool:
        return self.extension is not None


class TokenSpan(Struct, frozen=True):
    """Tokens to reserve: the least that the request can do with, and the most that it could use."""

    prompt_tokens: int
    prompt_most: int
    """The tokens of the prompt that are set aside where there are so many: its bound where a budget counts
    them."""
    choices: int
    predicted: int
    """The tokens that each choice may be charged beside its own: those of its prediction (rule 6)."""
    least_each: int
    """Tokens of one choice."""
    most_each: int
    is_open: bool = False
    """True if the request states no maximum and its caller's tokens are limited: then it is given one."""
    is_cut: bool = False
    """True if there is no room for the maximum that the request states, which need not fit."""

    @property
    def least(self) -> int:
        return self.prompt_tokens + self.choices * (self.least_each + self.predicted)

    @property
    def wanted(self) -> int:
        """The tokens without which the request could pass what it reserved."""
        return self.prompt_most + self.choices * (self.least_each + self.predicted)

    @property
    def most(self) -> int:
        return self.prompt_most + self.choices * (self.most_each + self.predicted)

    def maximum_each(self, granted: int) -> int:
        """The most tokens of each choice, so that all together stay within what was granted."""
        each = (granted - self.prompt_most) // self.choices - self.predicted
        return max(1, self.least_each, each)

    def estimated(self, granted: int) -> int:
        """The tokens to charge where no engine reports what was used."""
        each = self.maximum_each(granted) if self.is_open else self.least_each
        return self.prompt_tokens + self.choices * (each + self.predicted)


async def count_tokens(
    request: GenerationRequest,
    tokenizer: Tokenizer,
    room: Room | None,
    threads: FairThreads,
    tenant: str,
    known: KnownPieces | None = None,
) -> TokenCount:
    """The exact count. `room` is None where it is unknown. `known`: pieces of earlier prompts.

    Raises InvalidRequest for a prompt that is empty or that the chat template refuses, ContextLengthExceeded
    or NeverFits for one that is too long, and Overloaded.
    """
    prompt = request.prompt_form
    prompt_ids: list[list[int]] | None = None
    if _is_short(prompt):
        try:
            prompt_ids = tokenizer.prompt_ids(prompt)
        except NotInPlace:  # it may be slow, and is another's work: rule 3
            prompt_ids = None
    if prompt_ids is None:
        pieces = None if known is None else known.of(tenant)
        prompt_ids = await threads.run(tenant, pieces_of(tokenizer, prompt, room, pieces))
    extension, lengths = PromptExtension(tokenizer.hash, prompt_ids), [*map(len, prompt_ids)]
    total = sum(lengths)
    if isinstance(prompt, BranchedPrompt):  # what its prompts share is computed once
        shared_len, *lengths = lengths
        return TokenCount(total, shared_len + max(lengths), len(lengths), extension, total)
    if text := request.predicted_text:
        work = text_slices(tokenizer, text, None, PREDICTION, add_special_tokens=False)
        extension.predicted_ids = await threads.run(tenant, work)
    predicted = 0 if extension.predicted_ids is UNSET else len(extension.predicted_ids)
    return TokenCount(total, max(lengths), len(lengths), extension, total, predicted)


def check_fits(request: GenerationRequest, count: TokenCount, room: Room | None) -> None:
    """Raises ContextLengthExceeded or NeverFits, when the count is exact and the room is known."""
    if not request.answers:
        _check_prompts_fit(request, count, room)
        return
    stated = request.stated_tokens_max
    tokens = count.longest + max(1, stated or 0)
    if room is None or count.extension is None or tokens <= room.most:
        return
    error, holds = room.refused(tokens)
    message = f"{holds}, and the prompt has {count.longest}"
    if stated is None or count.longest >= room.most:
        raise error(f"{message}.", param=request.prompt_param)
    raise error(f"{message}: there is no room for {stated} more.", param=request.max_tokens_param)


def _check_prompts_fit(request: GenerationRequest, count: TokenCount, room: Room | None) -> None:
    """Raises as `check_fits` does, where nothing is generated: each prompt may take all of the room."""
    if room is None or count.extension is None or count.longest <= room.prompt_most:
        return
    form = request.prompt_form
    if isinstance(form, BranchedPrompt):
        return  # each was looked at where it was counted
    at = next(at for at, ids in enumerate(count.extension.prompt_ids) if len(ids) > room.prompt_most)
    place = form.place(at)
    error, holds = room.refused(count.longest)
    raise error(f"{holds}, and {place} has {len(count.extension.prompt_ids[at])}.", param=place)


def span(
    request: GenerationRequest,
    count: TokenCount,
    room: Room | None,
    estimate: int,
    tokens_max: int | None,
    *,
    is_budgeted: bool,
) -> TokenSpan:
    """The tokens to reserve: all prompts, and for every choice the most it may generate. `is_budgeted`: the
    caller has a budget, which nothing fills again.

    For a choice without a maximum: `estimate` at least, and what there is room for at most. `tokens_max`
    is the tightest limit of the caller; without one the estimate is all that is reserved, as nothing
    bounds what is generated.
    """
    choices = (request.n or 1) * count.prompts
    prompt_most = count.bound if is_budgeted else count.prompt_tokens
    fixed = count.prompt_tokens, prompt_most, choices, count.predicted
    left = estimate if room is None else max(1, room.most - count.longest)
    stated = request.output_tokens_max
    if stated is not None:
        if stated > left and room is not None and request.stated_tokens_max is None:  # it need not fit
            return TokenSpan(*fixed, left, left, is_cut=True)
        return TokenSpan(*fixed, stated, stated)
    each = min(estimate, left)
    if tokens_max is None:
        return TokenSpan(*fixed, each, each)
    share = tokens_max // QUOTA_SHARE_MAX // choices
    least = max(1, request.min_tokens or 0, min(each, share))
    return TokenSpan(*fixed, least, max(least, left), is_open=True)


def _is_short(prompt: PromptForm) -> bool:
    if isinstance(prompt, ChatPrompt):
        if prompt.tools or prompt.arguments or prompt.wishes or prompt.continues_final:  # rule 3
            return False
        length = 0
        for message in prompt.messages:
            length += sum(map(len, message.printable)) + ESTIMATE_MESSAGE_TOKENS
        return length <= INLINE_LEN_MAX
    if isinstance(prompt, BranchedPrompt):
        return False
    return isinstance(prompt.prompt, str) and len(prompt.prompt) <= INLINE_LEN_MAX


# -- estimates ------------------------------------------------------------------------------------

_BOUNDED: Final = frozenset({"model", "stream_options", "service_tier", "logit_bias", "stop_token_ids"})
"""Fields that hold no text of the caller's own, and that no prompt has."""
_TEXT_BEGINS: Final = frozenset(b'"[{')
"""The first bytes of JSON that may hold text."""

_LETTERS: Final = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ \t\r\n"
_LETTERS_EACH: Final = 3
_ABOVE_ASCII: Final = bytes(range(0x80, 0x100))
_NO_LEADS: Final = bytes(range(0xC0))
"""The bytes that begin no character of several bytes."""
_PER_CHARACTER: Final = (
    (1, bytes([*range(0xCE, 0xD4), *range(0xD6, 0xDC)])),  # Greek, Cyrillic, Hebrew, Arabic
    (2, bytes([*range(0xC0, 0xCE), 0xD4, 0xD5, *range(0xDC, 0xE0)])),  # Latin with marks, Armenian
    (2, bytes([*range(0xE3, 0xEA), *range(0xEB, 0xEE)])),  # Chinese, kana, Hangul
    (3, bytes([*range(0xE0, 0xE3), 0xEA, 0xEE, 0xEF])),
    (4, bytes(range(0xF0, 0x100))),
)
"""The tokens of a character, by the first of its bytes. Measured with the tokenizers of Qwen and of Mistral
(Tekken), over random characters of each class: 0.8, 1.8, 2.2, 3.0, 4.0 at most; over prose 0.3 to 0.9 for
each but emoji."""


def estimate_slices(
    request: GenerationRequest, fields: Mapping[str, Raw], image_tokens: int
) -> Slices[TokenCount]:
    """An estimate of all that `fields`, the body that goes out, hold; token ids count as they are. In slices,
    since a body may be long. `image_tokens` are those of an image."""
    beside, beside_len = 0, 0
    passed_over = _BOUNDED | request.prompt_beside | {request.prompt_param}
    for name, value in fields.items():
        if name in passed_over or memoryview(value)[0] not in _TEXT_BEGINS:
            continue
        # what of a prediction does not come true is billed beside each choice's own tokens
        times = (request.n or 1) if name == PREDICTION else 1
        beside += times * (yield from _text_slices(bytes(value)))
        beside_len += times * len(value)
    form = request.prompt_form
    if isinstance(form, ChatPrompt):
        messages = form.messages
        tokens, length = yield from _texts_slices(text for one in messages for text in one.texts)
        images = sum([isinstance(part, ImagePart) for one in messages for part in one.parts])
        fixed = ESTIMATE_MESSAGE_TOKENS * len(messages) + image_tokens * images
        fixed += ESTIMATE_TOOLS_TOKENS if form.tools else 0
        length += beside_len
        return TokenCount(tokens + beside + fixed, fixed + _likely(length), 1, None, length + fixed)
    if isinstance(form, BranchedPrompt):  # another make may compute for each prompt what all share
        return (yield from _branched_slices(form, beside, beside_len))
    prompt = form.prompt
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    ids = [len(item) for item in prompts if isinstance(item, list)]
    texts = [item for item in prompts if isinstance(item, str)]
    tokens, length = yield from _texts_slices(texts)
    longest = max([*ids, *(_likely(len(text)) for text in texts)]) + _likely(beside_len)
    most = sum(ids) + length + beside_len * len(prompts)
    return TokenCount(sum(ids) + tokens + beside * len(prompts), longest, len(prompts), None, most)


def _branched_slices(form: BranchedPrompt, beside: int, beside_len: int) -> Slices[TokenCount]:
    """An estimate of prompts that begin alike. All of them have what other fields hold: so many tokens, and
    so many bytes."""
    prompts = len(form.own)
    shared, shared_len = yield from _texts_slices([form.beginning])
    own, own_len = yield from _texts_slices(form.own)
    around_len = shared_len + beside_len
    longest = _likely(around_len + max(map(len, form.own))) + ESTIMATE_FRAME_TOKENS
    tokens = own + prompts * (shared + beside + ESTIMATE_FRAME_TOKENS)
    return TokenCount(
        tokens, longest, prompts, None, own_len + prompts * (around_len + ESTIMATE_FRAME_TOKENS)
    )


def _likely(length: int) -> int:
    """The tokens that so many bytes of text likely are."""
    return -(-length // LIKELY_BYTES)


def _texts_slices(texts: Iterable[str]) -> Slices[tuple[int, int]]:
    """The tokens and the bytes of several texts."""
    tokens = length = begun = 0
    for text in texts:
        data = text.encode()
        tokens += (yield from _text_slices(data)) if len(data) > SLICE_LEN else _tokens_of(data)
        length += len(data)
        if length - begun > SLICE_LEN:
            begun = length
            yield
    return tokens, length


def _text_slices(data: bytes) -> Slices[int]:
    """The tokens of a text of any length in UTF-8, or of JSON."""
    tokens = 0
    for at in range(0, len(data), SLICE_LEN):
        tokens += _tokens_of(data[at : at + SLICE_LEN])
        yield
    return tokens


def _tokens_of(data: bytes) -> int:
    """The tokens of a text, estimated by the classes of its bytes."""
    if data.isascii():
        dense = len(data.translate(None, _LETTERS))
        return dense - (dense - len(data)) // _LETTERS_EACH  # rounded up
    leads = data.translate(None, _NO_LEADS)
    of_leads = 0
    for tokens, class_ in _PER_CHARACTER:
        of_leads += tokens * (len(leads) - len(leads.translate(None, class_)))
    return of_leads + _tokens_of(data.translate(None, _ABOVE_ASCII))
