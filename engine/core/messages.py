"""What crosses the walls of the core, and nothing else does.

Two walls. Between the API process and the core process go msgpack messages over ZeroMQ: requests,
aborts and pauses inward, one `StepOutput` per step outward. Between the core and the runner goes a `Plan`
inward and a `RunResult` outward; they are plain data as well, so that one plan can be broadcast to
every tensor-parallel rank.

Columns, not objects: what happens for every token is a list of ints with one entry per row; only
what happens once in a sequence's life (start, finish) has a Struct of its own.

A sequence is named by its `handle`, an integer that the API process counts up and never reuses, so
that an abort can hit no stranger. A `slot` is a seat in the runner, reused after its owner left.

Times are durations in seconds, measured by the core's own monotonic clock: no two processes ever
compare their clocks.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import msgspec


class FinishReason(IntEnum):
    STOP = 1
    """A stop token id (or end-of-sequence) was sampled; it is the last token of the sequence."""
    LENGTH = 2
    """`max_tokens`, or the context length."""
    ABORTED = 3
    """The API process asked for it."""
    NUMERIC = 4
    """The model produced NaN or infinity for this sequence."""
    REJECTED = 5
    """The core would not take it: the queue was full, or it can never fit."""
    STALLED = 6
    """It stayed paused until its stall deadline."""


class ServiceClass(IntEnum):
    """Whom the scheduler serves first; a higher class has the larger number."""

    FLEX = 0
    DEFAULT = 1
    PRIORITY = 2


class SamplingParams(msgspec.Struct, array_like=True, frozen=True):
    """How the tokens of one sequence are chosen. Already validated; every field has its final value.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` is always set: the
    token at position p depends on (seed, p) and the logits alone, never on who shares the batch.
    """

    seed: int
    """Unsigned, 64 bits."""
    max_tokens: int
    """At least 1, and prompt + max_tokens <= the context length."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the sequence. Holds the model's end-of-sequence ids too, unless the
    request ignores them."""
    min_tokens: int = 0
    """Until so many tokens are out, `stop_token_ids` cannot be sampled."""
    logprobs: int | None = None
    """With each token its log-probability, and those of so many of the likeliest tokens."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first. Until they are sent, such a sequence reads nothing
    from the prefix cache, because cached positions are not computed and so have no logits."""

    @property
    def needs_history(self) -> bool:
        """Whether the choice of the next token looks at the tokens before it."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of the distribution before temperature and truncation, as OpenAI's are.

    `top_ids` are the likeliest tokens, best first, as many as were asked for.
    """

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


# -- API process -> core --------------------------------------------------------------------------


class AddSequence(msgspec.Struct, array_like=True, frozen=True, tag="add"):
    handle: int
    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    cache_salt: bytes = b""
    """Prefixes are shared only between sequences of the same salt."""
    tenant: str = ""
    """Whose it is: tenants share the engine fairly. A short key."""
    service_class: ServiceClass = ServiceClass.DEFAULT


class AbortSequences(msgspec.Struct, array_like=True, frozen=True, tag="abort"):
    """Idempotent: handles that are unknown or finished already are passed over."""

    handles: list[int]


class PauseSequences(msgspec.Struct, array_like=True, frozen=True, tag="pause"):
    """Nobody reads what these bring: compute nothing for them until they are resumed.

    Idempotent, wherever they are: waiting, running, preempted; handles that are unknown or finished
    already are passed over. Tokens that are being computed while this arrives still come, one for each
    step in flight. Who stays paused for `stall_deadline_s` ends there.
    """

    handles: list[int]


class ResumeSequences(msgspec.Struct, array_like=True, frozen=True, tag="resume"):
    """Idempotent: handles that are not paused are passed over."""

    handles: list[int]


class Ping(msgspec.Struct, array_like=True, frozen=True, tag="ping"):
    """Are you there? Answered by a `Pong` of the same number before the next step."""

    number: int


class StopCore(msgspec.Struct, array_like=True, frozen=True, tag="stop"):
    """End now. Draining is the API process's business: it sends this when nothing is left."""


CoreInput = AddSequence | AbortSequences | PauseSequences | ResumeSequences | Ping | StopCore


# -- core -> API process --------------------------------------------------------------------------


class CoreReady(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    """Weights are loaded, memory is measured, the runner is warm."""

    pages: int
    page_size: int
    slots: int
    max_model_len: int
    vocab_size: int
    dtype: str
    load_s: float
    warmup_s: float
    overlap: bool = False
    """A step is planned while another is computed."""


class CoreFailed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    """Last words. `message` is for the operator and holds no prompt text."""

    message: str


class CoreProgress(msgspec.Struct, array_like=True, frozen=True, tag="progress"):
    """What the core is busy with while it starts, for the person who watches."""

    stage: str


class Pong(msgspec.Struct, array_like=True, frozen=True, tag="pong"):
    """The loop is between two steps, or idle."""

    number: int


class Started(msgspec.Struct, array_like=True, frozen=True):
    """A sequence left the waiting queue for the first time."""

    handle: int
    cached_len: int
    """Prompt tokens served from the prefix cache."""
    queue_s: float


class Finished(msgspec.Struct, array_like=True, frozen=True):
    """A sequence ended. Its five times add up to its life in the core."""

    handle: int
    reason: FinishReason
    queue_s: float
    """Waiting for the first admission."""
    prefill_s: float
    """From the first admission to the first token, preempted time aside."""
    decode_s: float
    """From the first token to the end, preempted time aside."""
    preempted_s: float
    """From each preemption to the next admission, in host memory or nowhere."""
    preemptions: int
    """Those that it suffered while it ran. Giving way while nobody read it is not counted."""
    stalled_s: float = 0.0
    """From each pause to its resumption, wherever it was, and on until it has a slot again."""


class CoreStats(msgspec.Struct, array_like=True, frozen=True):
    """A reading of the core after a step."""

    waiting: int
    """For a slot: newcomers, the preempted, and those resumed, unless they are paused."""
    running: int
    """Hold a slot."""
    pages_free: int
    """Free and holding nothing."""
    pages_cached: int
    """Unreferenced, holding a prefix that may be hit."""
    pages_owned: int
    prefix_query_tokens: int
    """Counters, since the start: prompt tokens looked up, and of those found."""
    prefix_hit_tokens: int
    preemptions: int
    step_s: float
    """How long the last step took, from its plan to its commit."""
    step_tokens: int
    stalled: int = 0
    """Paused, with or without pages."""
    class_waiting: tuple[int, ...] = ()
    """By class, FLEX first: how many of `waiting` do not hold a slot, and for how long the one that came
    first has been here."""
    class_waited_s: tuple[float, ...] = ()
    swaps_out: int = 0
    """Counters: of the preemptions, those that copied pages to host memory; and the admissions that copied
    pages from there."""
    swaps_in: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    host_pages_used: int = 0
    host_pages_free: int = 0
    waiting_tokens: int = 0
    """Prompt tokens of those who wait for their first admission."""


class StepOutput(msgspec.Struct, array_like=True, frozen=True, tag="step"):
    """All that one step brought, or the news of a moment without one. `handles[i]` produced `tokens[i]`."""

    step: int
    handles: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    """One per token, or empty when no sequence of this step asked."""
    prompt_logprobs: list[tuple[int, list[TokenLogprobs]]]
    """(handle, the next positions' in order). The prompt's first token has none and is not sent."""
    started: list[Started]
    finished: list[Finished]
    """A sequence's last token and its Finished come in the same output."""
    stats: CoreStats


CoreOutput = CoreReady | CoreFailed | CoreProgress | Pong | StepOutput


# -- core <-> runner ------------------------------------------------------------------------------


class SlotStart(msgspec.Struct, array_like=True, frozen=True):
    """A sequence takes a seat: admitted for the first time, or again after a preemption or a stall."""

    slot: int
    token_ids: list[int]
    """Everything known: the prompt, and whoever was seated before, the output so far."""
    prompt_len: int
    sampling: SamplingParams


class Plan(msgspec.Struct, array_like=True, frozen=True):
    """One step, decided. The runner executes it in this order: leave, seat, grow, replace, swap out,
    swap in, compute, sample.

    Row i computes tokens `[positions[i], positions[i] + lengths[i])` of `slots[i]`, writes their
    keys and values to that slot's pages, and samples the next token when `samples[i]`. The runner
    appends a sampled token to its own copy of the slot's tokens, so that the next plan need not
    carry it. Decode rows (one token, sampled) come before prefill chunks.
    """

    step: int
    left: list[int]
    """Slots whose owners finished, were aborted, preempted or stalled since the last plan."""
    seated: list[SlotStart]
    grown: list[tuple[int, list[int]]]
    """(slot, pages appended to its page table). Page p of a slot holds its tokens
    `[p * page_size, (p + 1) * page_size)`. A seated slot starts from an empty table; of the pages it
    is given, the positions before its first row are computed already."""
    slots: list[int]
    positions: list[int]
    lengths: list[int]
    samples: list[bool]
    swapped_out: list[tuple[int, int]] = []
    """(page, host page): copy the one to the other, before this plan writes to it."""
    swapped_in: list[tuple[int, int]] = []
    """(host page, page): copy it back, after all that go out and before anything is read."""
    replaced: list[tuple[int, int, int]] = []
    """(slot, index, page): this entry of its page table names another page now, which holds the same."""


class RunResult(msgspec.Struct, array_like=True, frozen=True):
    """What a plan brought, in the order of its rows."""

    tokens: list[int]
    """One per row that sampled; `NUMERIC_FAILURE` where the logits were not finite."""
    logprobs: list[TokenLogprobs | None]
    """One per row that sampled, or empty when nobody asked."""
    prompt_logprobs: list[tuple[int, list[TokenLogprobs]]]
    """(slot, for each prompt position computed in this step the log-probabilities of the prompt
    token that follows it), for slots that asked. The prompt's last position has no follower."""


NUMERIC_FAILURE = -1


class RunnerInfo(msgspec.Struct, array_like=True, frozen=True):
    """What the runner offers, once it is warm."""

    pages: int
    page_size: int
    slots: int
    max_model_len: int
    vocab_size: int
    dtype: str
    load_s: float
    warmup_s: float
    page_bytes: int = 0
    """Of one page, in all layers."""
    host_pages: int = 0
    """Pages in host memory, for those who are swapped out; 0: there is no such memory."""
    page_copy_s: float = 0.0
    """How long it takes to copy a page there or back, as measured while warming up; 0: not measured."""
    is_async: bool = False
    """It computes beside the host: `launch` returns before the plan is executed."""


class Pending(Protocol):
    """A plan that a runner has taken on."""

    def collect(self) -> RunResult:
        """What it brought; waits until it is executed, and for nothing that was launched after it. To be
        called once for each plan, in the order of their launches. Raises only when the whole engine is
        lost."""
        ...


class Runner(Protocol):
    """The core's view of the tensors. One implementation on torch, one fake for the simulator."""

    info: RunnerInfo

    def launch(self, plan: Plan) -> Pending:
        """Take on a plan. All that is launched is executed in the order of the launches, so a row may
        compute the token that the launch before samples, which the host has not seen. Raises only when
        the whole engine is lost."""
        ...
