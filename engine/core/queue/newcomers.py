"""Sequences that come: from the request that the API process sent to what the scheduler takes.

The choices of a request share what is sent and kept of them: the sampling parameters but for their seeds, and
the ids of their prompt. What is computed of the ids alone is computed once.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import overload

import msgspec

from engine.contract.messages import (
    AddPrompt,
    AddRequest,
    SamplingParams,
    ServiceClass,
)
from engine.contract.packing import TOKENS, packed, unpacked
from engine.core.pages.block_manager import PageChain


class Prompt(Sequence[int]):
    """The token ids of a prompt, which all of its choices share, with what is computed of them alone."""

    __slots__ = ("_chain", "_highest", "tokens")

    def __init__(self, tokens: array[int]) -> None:
        self.tokens = tokens
        self._highest = -1
        self._chain: PageChain | None = None

    @property
    def highest(self) -> int:
        """The highest id. The prompt must not be empty."""
        if self._highest < 0:
            self._highest = max(self.tokens)
        return self._highest

    def chain(self, salt: bytes, page_size: int) -> PageChain:
        """The page identities of one more choice. Salt and page size must be the same for all of them."""
        if self._chain is None:
            self._chain = PageChain(salt, page_size)
        return self._chain.branch(len(self.tokens))

    @staticmethod
    def of(ids: Sequence[int]) -> Prompt | None:
        """The prompt of these ids; None where one of them cannot be a token's."""
        if isinstance(ids, Prompt):
            return ids
        try:
            return Prompt(array(TOKENS, ids))
        except OverflowError:
            return None

    @staticmethod
    def unpacked(ids: bytes) -> Prompt:
        return Prompt(unpacked(ids))

    def __eq__(self, other: object) -> bool:
        return self.tokens == other.tokens if isinstance(other, Prompt) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> array[int]: ...
    def __getitem__(self, at: int | slice) -> int | array[int]:
        return self.tokens[at]


class AddSequence(msgspec.Struct, frozen=True):
    """A sequence to queue."""

    handle: int
    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    cache_salt: bytes = b""
    tenant: str = ""
    service_class: ServiceClass = ServiceClass.DEFAULT
    first_token_s: float = math.inf
    """The time from its arrival after which its first token is of no use, in seconds."""
    grammar: str = ""


def sequences_of(request: AddRequest) -> Iterator[AddSequence]:
    """The sequences of a request, in the order of their handles."""
    shared, handle = request.sampling, request.handle
    for asked in request.prompts:
        prompt = Prompt.unpacked(asked.ids)
        for choice, seed in enumerate(asked.seeds):
            sampling = msgspec.structs.replace(
                shared,
                seed=seed,
                max_tokens=asked.max_tokens,
                min_tokens=asked.min_tokens,
                prompt_logprobs=None if choice else shared.prompt_logprobs,
            )
            yield AddSequence(
                handle,
                request.request_id,
                prompt,
                sampling,
                request.cache_salt,
                request.tenant,
                request.service_class,
                request.first_token_s if handle - request.handle == request.bearer else math.inf,
                request.grammar,
            )
            handle += 1


def alone(sequence: AddSequence) -> AddRequest:
    """The request of one sequence."""
    sampling = sequence.sampling
    prompt = AddPrompt(packed(sequence.prompt_ids), sampling.max_tokens, sampling.min_tokens, [sampling.seed])
    return AddRequest(
        sequence.handle,
        sequence.request_id,
        [prompt],
        sampling,
        sequence.cache_salt,
        sequence.tenant,
        sequence.service_class,
        sequence.first_token_s,
        grammar=sequence.grammar,
    )
