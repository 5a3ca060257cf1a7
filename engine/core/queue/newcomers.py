"""Sequences that come: from the request that the API process sent to the few that the scheduler takes in a
step.

The choices of a request share what is sent and kept of them: the sampling parameters but for their seeds, and
the ids of their prompt. What is computed of the ids alone is computed once.

Taking one in costs the host some 40 us, and for each token of its prompt 100 ns, or 7 ns where another choice
has brought the prompt: its page identities are computed, its prefix is looked up. A tenant that sends a
thousand at once would hold up everybody's next token by that, and whoever comes meanwhile. So they wait in
the `Intake`, and before each step as many are taken in as `TAKEN_MAX` and `TAKEN_TOKENS_MAX` allow: one of
each tenant, then another of each. A tenant's own come in the order in which they were sent. One that is
aborted there goes no further. (Identities could wait for the first look-up of an admission. But a request
with a deadline for its first token, as nearly all have, is judged when it comes, by what the cache lacks.)
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, overload

import msgspec

from engine.contract.messages import (
    AddRequest,
    SamplingParams,
    ServiceClass,
)
from engine.contract.packing import TOKENS, unpacked
from engine.core.pages.block_manager import PageChain

# -- from a request -------------------------------------------------------------------------------


class Prompt(Sequence[int]):
    """The token ids of a prompt, which all of its choices share, with what is computed of them alone."""

    __slots__ = ("_chain", "_highest", "_shared", "tokens")

    def __init__(self, tokens: array[int], shared: Prompt | None = None) -> None:
        """`shared` is what the prompt begins with, as others do. None where nothing is known of that."""
        self.tokens = tokens
        self._shared = shared
        self._highest = -1
        self._chain: PageChain | None = None

    @property
    def shared_len(self) -> int:
        """The number of tokens that it begins with as others do; 0 where nothing is known of that."""
        return 0 if self._shared is None else len(self._shared)

    @property
    def highest(self) -> int:
        """The highest id. The prompt must not be empty."""
        if self._highest < 0:
            shared = self._shared
            if shared is None or not shared.tokens:
                self._highest = max(self.tokens)
            else:
                self._highest = max(shared.highest, max(self.tokens[len(shared) :], default=0))
        return self._highest

    def chain(self, salt: bytes, page_size: int) -> PageChain:
        """The page identities of one more choice. Salt and page size must be the same for all of them."""
        if self._chain is None:
            shared = self._shared
            self._chain = PageChain(salt, page_size) if shared is None else shared.chain(salt, page_size)
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
    def unpacked(ids: bytes, shared: Prompt | None = None) -> Prompt:
        """The prompt of packed ids behind those of `shared`."""
        return Prompt(unpacked(ids) if shared is None else shared.tokens + unpacked(ids), shared)

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
    has_next_turn: bool = False
    prediction: array[int] | None = None
    """The tokens that its answer is expected to have; None: nothing is."""

    @property
    def shared_len(self) -> int:
        """The number of tokens that it begins with as others of its request do; 0 where none is known."""
        return self.prompt_ids.shared_len if isinstance(self.prompt_ids, Prompt) else 0


def sequences_of(request: AddRequest) -> Iterator[AddSequence]:
    """The sequences of a request, in the order of their handles."""
    common, handle = request.sampling, request.handle
    beginning = Prompt.unpacked(request.shared) if request.shared else None
    prediction = unpacked(request.prediction) if request.prediction else None
    for asked in request.prompts:
        prompt = Prompt.unpacked(asked.ids, beginning)
        for choice, seed in enumerate(asked.seeds):
            sampling = msgspec.structs.replace(
                common,
                seed=seed,
                max_tokens=asked.max_tokens,
                min_tokens=asked.min_tokens,
                prompt_logprobs=None if choice else common.prompt_logprobs,
                scored=asked.scored,
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
                request.has_next_turn,
                prediction,
            )
            handle += 1


# -- the intake -----------------------------------------------------------------------------------


TAKEN_MAX: Final = 64
"""Newcomers of one step: 2 to 3 ms of the host's time."""
TAKEN_TOKENS_MAX: Final = 128 * 1024
"""Tokens of their prompts after which no other is taken in before the step."""


class Intake:
    """The newcomers that wait. The API process bounds their number: they count for its waiting queue.

    The time here is part of the hand-over: a few steps, and none for a tenant that sends no more than its
    turns. It counts against a deadline for a first token.
    """

    def __init__(self) -> None:
        self._of_tenant: dict[str, deque[int]] = {}
        """Handles by tenant; the tenant whose turn it is comes first. Those that were taken by name or
        dropped stay until their turn."""
        self.waiting: dict[int, tuple[AddSequence, float]] = {}
        """Newcomers and when they came, by handle, in the order of their arrival."""
        self._newest = 0

    @property
    def newest(self) -> int:
        """The newest handle that has been taken in with all before it; 0: none."""
        return next(iter(self.waiting)) - 1 if self.waiting else self._newest

    def put(self, newcomer: AddSequence, now: float) -> None:
        self._newest = newcomer.handle
        self.waiting[newcomer.handle] = newcomer, now
        self._of_tenant.setdefault(newcomer.tenant, deque()).append(newcomer.handle)

    def take(self, now: float) -> list[AddSequence]:
        """The newcomers of the next step, with what is left of the time for their first tokens: nothing, or
        less, where they waited longer."""
        taken: list[AddSequence] = []
        tokens = 0
        while self._of_tenant and len(taken) < TAKEN_MAX and tokens < TAKEN_TOKENS_MAX:
            tenant = next(iter(self._of_tenant))
            handles = self._of_tenant.pop(tenant)
            handle = handles.popleft()
            if handles:
                self._of_tenant[tenant] = handles
            for newcomer in self.take_named((handle,), now):
                taken.append(newcomer)
                tokens += len(newcomer.prompt_ids)
        return taken

    def take_named(self, handles: Iterable[int], now: float) -> list[AddSequence]:
        """The newcomers of these handles that wait here, in the form of `take`: something is said of them,
        which presupposes them."""
        waited = [self.waiting.pop(handle) for handle in handles if handle in self.waiting]
        return [_after(now - came_at, newcomer) for newcomer, came_at in waited]

    def drop(self, handles: Iterable[int]) -> list[int]:
        """Forget those of these handles that wait here. Returns them."""
        return [handle for handle in handles if self.waiting.pop(handle, None) is not None]

    def lift_deadlines(self, handles: Iterable[int]) -> None:
        """Let the first tokens of those of these handles that wait here come at any time."""
        for handle in handles:
            if (entry := self.waiting.get(handle)) is not None:
                newcomer, came_at = entry
                self.waiting[handle] = msgspec.structs.replace(newcomer, first_token_s=math.inf), came_at


def _after(waited_s: float, newcomer: AddSequence) -> AddSequence:
    """A newcomer that has waited for so long."""
    if newcomer.first_token_s == math.inf or not waited_s:
        return newcomer
    return msgspec.structs.replace(newcomer, first_token_s=newcomer.first_token_s - waited_s)
