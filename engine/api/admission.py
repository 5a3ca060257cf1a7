"""The door: from a well-formed request and its prompts' ids to sampling parameters, or to a refusal.

Pure. Whatever passes here can run to its end on an otherwise empty engine; nothing that cannot is
ever queued. Every refusal names the `param` to change.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from engine.core.messages import CoreReady, SamplingParams, ServiceClass
from shared.errors import ContextLengthExceeded, InvalidRequest, NeverFits
from shared.openai import ChatRequest, CompletionRequest

SEED_MASK: Final = 2**64 - 1
TIMEOUT_S_MAX: Final = 86_400.0

AnyRequest = ChatRequest | CompletionRequest
N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sequence can have, from what the core measured."""

    max_model_len: int
    kv_tokens: int
    """Tokens that the whole KV pool holds."""
    vocab_size: int

    @property
    def context_len(self) -> int:
        """Tokens that a prompt and its answer may have together. The last one takes no room in the KV pool,
        as nothing is computed from it."""
        return min(self.max_model_len, self.kv_tokens + 1)

    @staticmethod
    def of(core: CoreReady) -> Limits:
        return Limits(core.max_model_len, core.pages * core.page_size, core.vocab_size)


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What a request leaves open. A model's generation_config.json says what suits it; the rest is
    OpenAI's."""

    temperature: Annotated[float, Meta(ge=0.0)] = 1.0
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0)] = 1.0


@dataclass(frozen=True, slots=True)
class Choice:
    """One sequence to run."""

    prompt_index: int
    prompt_ids: list[int]
    sampling: SamplingParams


def plan_choices(
    request: AnyRequest,
    prompts: Sequence[list[int]],
    limits: Limits,
    eos_ids: frozenset[int],
    defaults: SamplingDefaults,
) -> list[Choice]:
    """`n` choices for every prompt, in OpenAI's order: all of the first prompt's, then the second's."""
    _check_ids(request, prompts, limits.vocab_size)
    seed = secrets.randbits(64) if request.seed is None else request.seed & SEED_MASK
    choices = []
    for prompt_index, prompt_ids in enumerate(prompts):
        max_tokens = max_tokens_of(request, len(prompt_ids), limits)
        for i in range(request.n or 1):
            sampling = _sampling(request, derive_seed(seed, i), max_tokens, eos_ids, defaults)
            choices.append(Choice(prompt_index, prompt_ids, sampling))
    return choices


def max_tokens_of(request: AnyRequest, prompt_len: int, limits: Limits) -> int:
    """Tokens to sample at most, at least 1. Raises when prompt and answer cannot fit.

    A bound that the caller did not name (chat: the rest of the context, completions: 16) gives way to
    what there is room for.
    """
    prompt_param = "messages" if isinstance(request, ChatRequest) else "prompt"
    asked = request.output_tokens_max
    named = asked is not None and (isinstance(request, ChatRequest) or _names_max_tokens(request))
    wanted = max(asked, 1) if asked is not None and named else 1
    total = f"{prompt_len + wanted} tokens ({prompt_len} in the {prompt_param}, {wanted} in the completion)"
    # when the prompt alone is too long, it is the prompt that must change
    if prompt_len + wanted > limits.max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limits.max_model_len} tokens. "
            f"However, you requested {total}.",
            param=_max_tokens_param(request) if prompt_len < limits.max_model_len else prompt_param,
        )
    if prompt_len + wanted - 1 > limits.kv_tokens:  # the last token is never computed
        raise NeverFits(
            f"You requested {total}, but this engine's whole KV cache holds {limits.kv_tokens} tokens.",
            param=_max_tokens_param(request) if prompt_len <= limits.kv_tokens else prompt_param,
        )
    room = limits.context_len - prompt_len
    return room if asked is None else max(1, min(asked, room))


def _names_max_tokens(request: AnyRequest) -> bool:
    return isinstance(request, CompletionRequest) and request.max_tokens is not None


def derive_seed(seed: int, choice: int) -> int:
    """Choice i's own seed: the same whatever `n` is, and unrelated to its neighbours'."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + choice.to_bytes(4, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def cache_salt(tenant: str | None, own_salt: str | None) -> bytes:
    """Prefixes are shared within a tenant, and a caller's own salt narrows that further."""
    if not tenant and not own_salt:
        return b""
    digest = hashlib.sha256()
    for part in (tenant or "", own_salt or ""):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.digest()


def service_class(request: AnyRequest, tier_max: str | None) -> ServiceClass:
    """What the request asks for, and no more than the tenant may have: `tier_max` is what the gateway
    says, None without one."""
    priority = request.priority or 0
    asked = ServiceClass.DEFAULT
    if request.service_tier in _CLASSES:
        asked = _CLASSES[request.service_tier]
    elif request.service_tier in (None, "auto") and priority:
        asked = ServiceClass.PRIORITY if priority < 0 else ServiceClass.FLEX
    return min(asked, _CLASSES.get(tier_max or "", ServiceClass.PRIORITY))


def timeout_s(header: str, value: str | None) -> float | None:
    """The caller's own bound, in seconds; None without one. Raises InvalidRequest."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds <= TIMEOUT_S_MAX:
        raise InvalidRequest(
            f"{header} must be a number of seconds above 0, up to {TIMEOUT_S_MAX:g}.", param=header
        )
    return seconds


_CLASSES: Final = {service_class.name.lower(): service_class for service_class in ServiceClass}


def trusted_ids(
    request: AnyRequest, tokenizer_hash: str, prompts: int, vocab_size: int
) -> list[list[int]] | None:
    """The ids that the gateway sent along, when they are of our tokenizer and make sense."""
    extension = request.penstock
    if extension is None or extension.tokenizer != tokenizer_hash or len(extension.prompt_ids) != prompts:
        return None
    if not all(ids and min(ids) >= 0 and max(ids) < vocab_size for ids in extension.prompt_ids):
        return None
    return extension.prompt_ids


def logprobs_asked(request: AnyRequest) -> int | None:
    """How many of the likeliest tokens to report with each token; None for no log-probabilities."""
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    return request.logprobs


def _sampling(
    request: AnyRequest, seed: int, max_tokens: int, eos_ids: frozenset[int], defaults: SamplingDefaults
) -> SamplingParams:
    logprobs = logprobs_asked(request)
    echoes = isinstance(request, CompletionRequest) and bool(request.echo)
    bias = request.logit_bias or {}
    return SamplingParams(
        seed=seed,
        max_tokens=max_tokens,
        temperature=_or_default(request.temperature, defaults.temperature),
        top_k=max(_or_default(request.top_k, defaults.top_k), 0),
        top_p=_or_default(request.top_p, defaults.top_p),
        min_p=_or_default(request.min_p, defaults.min_p),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_or_default(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias=tuple((int(key), value) for key, value in bias.items() if value),
        stop_token_ids=tuple(sorted(stop_ids(request, eos_ids))),
        min_tokens=min(request.min_tokens or 0, max_tokens),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echoes else None,
    )


def _or_default(asked: N | None, default: N) -> N:
    return default if asked is None else asked


def stop_ids(request: AnyRequest, eos_ids: frozenset[int]) -> frozenset[int]:
    return frozenset(request.stop_token_ids or ()) | (frozenset() if request.ignore_eos else eos_ids)


def _check_ids(request: AnyRequest, prompts: Sequence[list[int]], vocab_size: int) -> None:
    prompt_param = "messages" if isinstance(request, ChatRequest) else "prompt"
    for ids in prompts:
        if not ids:
            raise InvalidRequest(f"{prompt_param} must not be empty.", param=prompt_param)
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise _out_of_vocab(prompt_param, vocab_size)
    if any(token >= vocab_size for token in request.stop_token_ids or ()):
        raise _out_of_vocab("stop_token_ids", vocab_size)
    if any(int(key) >= vocab_size for key in request.logit_bias or ()):
        raise _out_of_vocab("logit_bias", vocab_size)


def _out_of_vocab(param: str, vocab_size: int) -> InvalidRequest:
    message = f"{param} has a token id outside of the vocabulary, which has {vocab_size} ids."
    return InvalidRequest(message, param=param)


def _max_tokens_param(request: AnyRequest) -> str:
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return "max_completion_tokens"
    return "max_tokens"
