"""Admission, the door: from a well-formed request and its prompts' ids to sampling parameters, or to a
refusal.

Pure. Whatever passes here can run to its end on an otherwise empty engine; nothing that cannot is
ever queued. Every refusal names the `param` to change.

What an answer may hold is bounded before anything of it is computed (`answer_len`): choices times tokens
times what a token takes with all that is told about it, and the prompt where each choice repeats it.
Log-probabilities are what makes answers large: with
the 20 likeliest tokens each, a token takes two kilobytes. A maximum that the caller stated is refused when it
is too much; one that was left open is made smaller.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import UNSET, Meta

from engine.api.core.parts import READ_ONLY, Branches
from engine.contract.embedders import Embedder
from engine.contract.messages import (
    AddPrompt,
    RunnerInfo,
    SamplingParams,
    ServiceClass,
)
from engine.contract.packing import TOKEN_LEN, Biases
from engine.contract.packing import packed as packed_ids
from shared.apis.embeddings import EmbeddingsRequest
from shared.apis.generation import GenerationRequest
from shared.apis.holding import TOKEN_BYTES
from shared.apis.prompt import BranchedPrompt, ChatPrompt, TextPrompt
from shared.text.branches import check_room
from shared.wire.errors import ContextLengthExceeded, InvalidRequest, NeverFits
from shared.wire.room import Room
from shared.wire.shapes import TOKENS_MAX

SEED_MASK: Final = 2**64 - 1
ANSWER_LEN_MAX: Final = 32 * 1024 * 1024
"""The most bytes that one request's answer may take while it waits to be written, by the estimate of this
module."""
TEXT_BYTES: Final = 16
"""Estimated bytes of a token's text."""
ENTRY_BYTES: Final = 160
"""Estimated bytes of a token that is kept as an entry of its own, with its position."""
ID_BYTES: Final = 8
"""Estimated bytes of a token id in a list of them."""
LOGPROB_BYTES: Final = 75
"""Estimated bytes of one token id with its log-probability."""
SCORE_BYTES: Final = 64
"""Estimated bytes of a token's log-probability, and of what an answer says of it."""
VECTOR_BYTES: Final = 256
"""Estimated bytes of what is held of a vector beside its numbers."""
NUMBER_BYTES: Final = 4
"""Bytes of a number of a vector."""
WINDOW_TOKENS: Final = 192
"""The most tokens of a choice that a stream holds: twice the number that pauses its sequence, and those that
were on their way."""

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one sequence, from what the core measured."""

    max_model_len: int
    kv_tokens: int
    """Tokens that fit into the whole KV pool."""
    vocab_size: int
    vector_len: int = 0
    """The numbers of a prompt's vector; 0: the model makes none."""

    @property
    def room(self) -> Room:
        """The room for a prompt and its answer."""
        return Room(self.max_model_len, self.kv_tokens)

    @staticmethod
    def of(core: RunnerInfo) -> Limits:
        return Limits(core.max_model_len, core.pages * core.page_size, core.vocab_size, core.vector_len)


class SamplingDefaults(msgspec.Struct, frozen=True):
    """The sampling parameters of a request that does not set them: those of the model's
    generation_config.json, else OpenAI's defaults."""

    temperature: Annotated[float, Meta(ge=0.0)] = 1.0
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0)] = 1.0


@dataclass(frozen=True, slots=True)
class Choice:
    """One sequence to run. Where a prompt's log-probabilities are asked for, the first choice of that
    prompt computes them for all of its choices."""

    prompt_index: int
    prompt_ids: list[int]
    sampling: SamplingParams


def plan_choices(
    request: GenerationRequest,
    prompts: Sequence[list[int]],
    limits: Limits,
    stops: frozenset[int],
    defaults: SamplingDefaults,
) -> list[Choice]:
    """The choices of a request in OpenAI's order: all `n` of the first prompt's, then those of the
    second. `check_fields` has passed it, and `stops` are its `stop_ids`. The prompts' ids are not looked at:
    `engine.api.ask.prompt_packing` has done that. Raises InvalidRequest, ContextLengthExceeded and
    NeverFits."""
    if not all(prompts):
        raise InvalidRequest(f"{request.prompt_param} must not be empty.", param=request.prompt_param)
    n = request.n or 1
    room = answer_room(request, prompts)
    seed = secrets.randbits(64) if request.seed is None else request.seed & SEED_MASK
    shared = _sampling(request, stops, defaults)
    choices = []
    for prompt_index, prompt_ids in enumerate(prompts):
        max_tokens = min(max_tokens_of(request, len(prompt_ids), limits), room)
        for i in range(n):
            sampling = msgspec.structs.replace(
                shared,
                seed=derive_seed(seed, prompt_index, i),
                max_tokens=max_tokens,
                min_tokens=min(shared.min_tokens, max_tokens),
                prompt_logprobs=None if i else shared.prompt_logprobs,
            )
            choices.append(Choice(prompt_index, prompt_ids, sampling))
    return choices


def plan_scores(
    form: BranchedPrompt, shared_len: int, prompts: Sequence[list[int]], limits: Limits
) -> list[Choice]:
    """A sequence for each of the prompts that begin with the same `shared_len` tokens; nothing is sampled.
    `prompts` are the ids of what each has behind these. Raises ContextLengthExceeded and NeverFits."""
    for index, ids in enumerate(prompts):
        check_room(limits.room, shared_len + len(ids), form.place(index))
    return [Choice(index, ids, READ_ONLY) for index, ids in enumerate(prompts)]


def branches_of(
    choices: Sequence[Choice], packed: Sequence[bytes], scored: Sequence[Sequence[int]]
) -> Branches:
    """The prompts as the core is told of them; `packed` are their pieces, what they share first."""
    shared, *own = packed
    together = zip(choices, own, scored, strict=True)
    prompts = [
        AddPrompt(ids, 0, 0, [choice.sampling.seed], packed_ids(tokens)) for choice, ids, tokens in together
    ]
    return Branches(shared, prompts)


def scores_len(prompts: Sequence[AddPrompt]) -> int:
    """The bytes of the log-probabilities that an answer holds."""
    return sum(ENTRY_BYTES + SCORE_BYTES * (len(one.scored) // TOKEN_LEN) for one in prompts)


def plan_vectors(
    request: EmbeddingsRequest,
    prompts: Sequence[list[int]],
    limits: Limits,
    embedder: Embedder,
) -> list[Choice]:
    """A sequence for each input, of which nothing is sampled. Raises InvalidRequest, ContextLengthExceeded
    and NeverFits."""
    vector_len, asked, room = limits.vector_len, request.dimensions, limits.room
    if asked is not None and not embedder.cuts.allow(asked, vector_len):
        raise InvalidRequest(
            f"dimensions must be {vector_len}, the length of this model's vectors, or one that it may be cut "
            f"to: {embedder.cuts}.",
            param="dimensions",
        )
    for index, prompt_ids in enumerate(prompts):
        if len(prompt_ids) > room.prompt_most:
            place = request.prompt_form.place(index)
            error, holds = room.refused(len(prompt_ids))
            raise error(f"{holds}, and {place} has {len(prompt_ids)}.", param=place)
    sampling = SamplingParams(seed=0, max_tokens=0, vector_len=vector_len if asked is None else asked)
    return [Choice(index, prompt_ids, sampling) for index, prompt_ids in enumerate(prompts)]


def vectors_len(choices: Sequence[Choice]) -> int:
    """The bytes of the vectors that an answer holds."""
    return len(choices) * (VECTOR_BYTES + NUMBER_BYTES * choices[0].sampling.vector_len)


def prompts_of(choices: Sequence[Choice], packed: Sequence[bytes], n: int) -> list[AddPrompt]:
    """The choices, `n` of each prompt, as the core is told of them."""
    return [
        AddPrompt(
            packed[first.prompt_index],
            first.sampling.max_tokens,
            first.sampling.min_tokens,
            [choice.sampling.seed for choice in choices[at : at + n]],
        )
        for at, first in zip(range(0, len(choices), n), choices[::n], strict=True)
    ]


# -- how much an answer may hold ------------------------------------------------------------------


def answer_room(request: GenerationRequest, prompts: Sequence[list[int]]) -> int:
    """The most tokens that each choice may have, at least 1, so that the whole answer stays within
    `ANSWER_LEN_MAX` bytes. Raises InvalidRequest where the caller asks for more."""
    token_len, choices = _token_len(request), (request.n or 1) * len(prompts)
    if request.stream and not request.keeps_answer and request.logprobs_asked is None:
        return TOKENS_MAX  # the answer is written as it comes, and paused when its client does not read
    stated = max(1, request.output_tokens_max or 1)
    left = ANSWER_LEN_MAX - (request.n or 1) * _scores_len(request, prompts)
    if not request.stream:
        left -= _repeated_len(request, prompts)
    if left >= choices * stated * token_len:
        return max(stated, left // (choices * token_len))
    told = request.logprobs_asked
    what = f"{choices} x {stated} tokens" + ("" if told is None else f" with {told} log-probabilities each")
    params = {"n": choices > 1, "logprobs": told is not None, request.max_tokens_param: True}
    prompt = ""
    if left < ANSWER_LEN_MAX:
        prompt = ", and those of the prompt" if _scores_len(request, prompts) else ", and the prompt in each"
    raise InvalidRequest(
        f"The answer may be too large: {what}{prompt}. Ask for less, or in several requests.",
        param=next(param for param, is_large in params.items() if is_large),
    )


def answer_len(request: GenerationRequest, choices: Sequence[Choice]) -> int:
    """The most bytes that an answer holds at any time, with the prompts that are repeated in it."""
    prompts = [choice.prompt_ids for choice in choices[:: request.n or 1]]
    held = sum(choice.sampling.max_tokens for choice in choices)
    # the choices of a prompt that is scored may all be computed before the one that scores it
    waits = request.echoes and request.logprobs_asked is not None and (request.n or 1) > 1
    if request.stream and not (waits or request.keeps_answer):
        held = min(held, WINDOW_TOKENS * len(choices))
    is_told = bool(request.return_token_ids) or request.echoes
    told = sum(map(len, prompts)) * TOKEN_BYTES if is_told else 0
    if not request.stream:
        told = max(told, _repeated_len(request, prompts))
    held = max(held, request.reasoning_kept_tokens)
    return held * _token_len(request) + _scores_len(request, prompts) + told


def text_len(choices: Sequence[Choice]) -> int:
    """The part of `answer_len` that is for the text of an answer that is held to its end."""
    return TEXT_BYTES * sum(choice.sampling.max_tokens for choice in choices)


def _token_len(request: GenerationRequest) -> int:
    logprobs = request.logprobs_asked
    if logprobs is not None:
        return TEXT_BYTES + ENTRY_BYTES + LOGPROB_BYTES * (1 + logprobs)
    return TEXT_BYTES + (ENTRY_BYTES if request.return_token_ids else 0)


def _scores_len(request: GenerationRequest, prompts: Sequence[list[int]]) -> int:
    """Bytes of the log-probabilities of all prompts, each counted once; 0 where they are not asked
    for."""
    if not request.echoes or (logprobs := request.logprobs_asked) is None:
        return 0
    return sum(map(len, prompts)) * (ENTRY_BYTES + LOGPROB_BYTES * (1 + logprobs))


def _repeated_len(request: GenerationRequest, prompts: Sequence[list[int]]) -> int:
    """Bytes of the prompts' text and ids in a whole answer: each choice of a completion has them, and a chat
    has its ids once."""
    tokens, length, form = sum(map(len, prompts)), 0, request.prompt_form
    if isinstance(form, ChatPrompt):
        return tokens * ID_BYTES if request.return_token_ids else 0
    if request.echoes and isinstance(form, TextPrompt):
        given = [form.prompt] if isinstance(form.prompt, str) else form.prompt
        # a token may be a hundred spaces, so that a text's own length counts where it is known
        length += max(tokens * TEXT_BYTES, sum(_bytes_max(one) for one in given if isinstance(one, str)))
    if request.return_token_ids:
        length += tokens * ID_BYTES
    return length * (request.n or 1)


def _bytes_max(text: str) -> int:
    """The most bytes that a text has in UTF-8. To encode a long one takes the loop some 15 ms."""
    return len(text) if text.isascii() else 4 * len(text)


def max_tokens_of(request: GenerationRequest, prompt_len: int, limits: Limits) -> int:
    """The most tokens to sample after a prompt of `prompt_len` tokens; 0 where the prompt is only scored.

    Where the caller set no maximum, OpenAI's default (chat: the rest of the context; completions: 16) is
    lowered to what there is room for. Raises ContextLengthExceeded and NeverFits where prompt and answer
    cannot fit.
    """
    prompt_param, asked = request.prompt_param, request.output_tokens_max
    wanted = max(request.stated_tokens_max or 1, 1)
    total = f"{prompt_len + wanted} tokens ({prompt_len} in the {prompt_param}, {wanted} in the completion)"
    # where the prompt alone is too long, the error names the prompt
    if prompt_len + wanted > limits.max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limits.max_model_len} tokens. "
            f"However, you requested {total}.",
            param=request.max_tokens_param if prompt_len < limits.max_model_len else prompt_param,
        )
    if prompt_len + wanted - 1 > limits.kv_tokens:  # nothing is computed from the last token
        raise NeverFits(
            f"You requested {total}, but this engine's whole KV cache holds {limits.kv_tokens} tokens.",
            param=request.max_tokens_param if prompt_len <= limits.kv_tokens else prompt_param,
        )
    room = limits.room.most - prompt_len
    return room if asked is None else min(asked, room)


def derive_seed(seed: int, prompt: int, choice: int) -> int:
    """The seed of one choice of one prompt. It does not depend on `n` or on the number of prompts, and
    seeds are unrelated, so that equal prompts are sampled independently."""
    key = seed.to_bytes(8, "little") + choice.to_bytes(4, "little") + prompt.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def cache_salt(tenant: str | None, own_salt: str | None) -> bytes:
    """The salt of a request's page hashes; requests of equal salts share cached prefixes. A tenant's
    requests share theirs, and a caller's own salt narrows that further. Empty without either."""
    if not tenant and not own_salt:
        return b""
    digest = hashlib.sha256()
    for part in (tenant or "", own_salt or ""):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.digest()


def service_class(request: GenerationRequest, tier_max: str | None) -> ServiceClass:
    """The service class of a request: the one that it asks for, capped by `tier_max`, the highest that
    the gateway grants. `tier_max` is None where no gateway names one."""
    priority = request.priority or 0
    asked = ServiceClass.DEFAULT
    if request.service_tier in _CLASSES:
        asked = _CLASSES[request.service_tier]
    elif request.service_tier in (None, "auto") and priority:
        asked = ServiceClass.PRIORITY if priority < 0 else ServiceClass.FLEX
    return min(asked, _CLASSES.get(tier_max or "", ServiceClass.PRIORITY))


_CLASSES: Final = {service_class.name.lower(): service_class for service_class in ServiceClass}


def trusted_ids(request: GenerationRequest, tokenizer_hash: str, prompts: int) -> list[list[int]] | None:
    """The prompts' token ids that the gateway sent along. None where there are none, or where they were
    not made by this model's tokenizer. Whether they are in range is not looked at."""
    extension = request.penstock
    if extension is None or extension.tokenizer != tokenizer_hash or len(extension.prompt_ids) != prompts:
        return None
    return extension.prompt_ids if all(extension.prompt_ids) else None


def trusted_prediction(request: GenerationRequest, tokenizer_hash: str) -> list[int] | None:
    """The ids of what the caller predicts that the gateway sent along, as `trusted_ids` has the prompts'."""
    extension = request.penstock
    if extension is None or extension.tokenizer != tokenizer_hash or extension.predicted_ids is UNSET:
        return None
    return extension.predicted_ids


def _sampling(
    request: GenerationRequest, stops: frozenset[int], defaults: SamplingDefaults
) -> SamplingParams:
    """The sampling parameters that all choices of a request share, made once: its biases may be many."""
    logprobs = request.logprobs_asked
    bias = request.logit_bias or {}
    return SamplingParams(
        seed=0,
        max_tokens=1,
        temperature=_or_default(request.temperature, defaults.temperature),
        top_k=max(_or_default(request.top_k, defaults.top_k), 0),
        top_p=_or_default(request.top_p, defaults.top_p),
        min_p=_or_default(request.min_p, defaults.min_p),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_or_default(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias=Biases.of((int(key), value) for key, value in bias.items() if value),
        stop_token_ids=tuple(sorted(stops)),
        min_tokens=request.min_tokens or 0,
        logprobs=logprobs,
        prompt_logprobs=logprobs if request.echoes else None,
    )


def _or_default(asked: N | None, default: N) -> N:
    return default if asked is None else asked


def stop_ids(
    request: GenerationRequest, eos_ids: frozenset[int], special_ids: Mapping[str, int]
) -> frozenset[int]:
    """The tokens that end a choice. A stop string that is one of the model's special tokens is that token,
    which has no text to be found in."""
    named = stop_tokens(request, special_ids)
    return frozenset((*named, *(request.stop_token_ids or ()), *(() if request.ignore_eos else eos_ids)))


def stop_tokens(request: GenerationRequest, special_ids: Mapping[str, int]) -> dict[int, str]:
    """The stop strings that are special tokens, by their ids."""
    return {special_ids[stop]: stop for stop in request.stop_strings if stop in special_ids}


def check_fields(request: GenerationRequest, vocab_size: int) -> None:
    """Raise InvalidRequest for what is refused whatever the prompts are, before they are tokenized."""
    if (request.n or 1) > 1 and request.output_tokens_max == 0:
        raise InvalidRequest("n must be 1 where max_tokens is 0: all choices would be the same.", param="n")
    if any(token >= vocab_size for token in request.stop_token_ids or ()):
        raise out_of_vocab("stop_token_ids", vocab_size)
    if any(int(key) >= vocab_size for key in request.logit_bias or ()):
        raise out_of_vocab("logit_bias", vocab_size)


def out_of_vocab(param: str, vocab_size: int) -> InvalidRequest:
    message = f"{param} has a token id outside of the vocabulary, which has {vocab_size} ids."
    return InvalidRequest(message, param=param)
