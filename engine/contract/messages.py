"""The messages that cross the walls of the core; nothing else does.

Two walls. Between the API process and the core process go msgpack messages over ZeroMQ: requests,
aborts and pauses inward, one `StepOutput` per step outward. Between the core and the runner goes a `Plan`
inward and a `RunResult` outward; they are plain data as well, so that one plan can be broadcast to
every tensor-parallel rank.

Columns, not objects: data of every token are lists of ints with one entry per row; only events that
happen once in a sequence's life (start, finish) have a Struct of their own.

A sequence is named by its `handle`, an integer that the API process counts up and never reuses, so
that an abort can hit no other sequence. A `slot` is a row of the runner's batch state, reused after its owner
left it.

Times are durations in seconds, measured by the core's own monotonic clock: no two processes ever
compare their clocks.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, Protocol

import msgspec

from engine.contract.packing import TOKEN_LEN, Biases, packed, unpacked
from engine.contract.records import StepRecord


class FinishReason(IntEnum):
    """The reason for a sequence's end."""

    STOP = 1
    """A stop token id (or end-of-sequence) was sampled; it is the last token of the sequence."""
    LENGTH = 2
    """`max_tokens`, or the context length."""
    ABORTED = 3
    """The API process aborted the sequence."""
    NUMERIC = 4
    """The model produced NaN or infinity for this sequence."""
    REJECTED = 5
    """The core did not queue the sequence: the queue was full, or it can never run here."""
    STALLED = 6
    """The sequence stayed paused until its stall deadline, or too many others were paused after it."""
    TOO_LATE = 7
    """Its first token did not come by its deadline, or could not have."""
    GRAMMAR = 8
    """Its grammar could not be compiled, or its matcher failed: the answer is not what was asked for."""

    @property
    def is_callers(self) -> bool:
        """True if the caller chose the moment: it left, did not read, or set a deadline. What was under way
        for it then is charged."""
        return self in (FinishReason.ABORTED, FinishReason.STALLED)


class ServiceClass(IntEnum):
    """The service class of a sequence. The scheduler favours higher classes, which have larger numbers."""

    FLEX = 0
    DEFAULT = 1
    PRIORITY = 2


class SamplingParams(msgspec.Struct, array_like=True, frozen=True):
    """The parameters by which the tokens of one sequence are chosen, validated and with defaults filled in.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` is always set: the
    token at position p depends on (seed, p) and the logits alone, never on the rest of the batch.
    """

    seed: int
    """An unsigned integer of 64 bits."""
    max_tokens: int
    """Output tokens at most; with the prompt no more than the context length. 0: the prompt is computed, and
    nothing is sampled."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Biases = Biases()
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the sequence when sampled, the model's end-of-sequence ids included unless the request
    ignores them."""
    min_tokens: int = 0
    """Output tokens before which `stop_token_ids` cannot be sampled."""
    logprobs: int | None = None
    """The number of likeliest tokens reported with each token's log-probability; None: no such."""
    prompt_logprobs: int | None = None
    """The number of likeliest tokens reported with each prompt token but the first. Until they are sent, such
    a sequence takes nothing from the prefix cache, because cached positions are not computed and so have no
    logits."""
    vector_len: int = 0
    """The numbers of the prompt's vector, where that is asked for; 0: it is not. Then `max_tokens` is 0, and
    the sequence takes nothing from the prefix cache and leaves nothing there: a vector may be of all
    tokens."""
    scored: bytes = b""
    """Token ids, packed, whose log-probabilities behind the prompt are asked for; b"": none are. Then
    `max_tokens` is 0: nothing is sampled."""

    @property
    def needs_history(self) -> bool:
        """True if the choice of the next token looks at the tokens before it."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of the distribution before temperature and truncation, as OpenAI's are.

    `top_ids` are the likeliest tokens, best first, as many as were asked for.
    """

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


# -- API process -> core --------------------------------------------------------------------------


END_TOKENS_MAX: Final = 48
"""The most tokens of a model that end its answers. With those of a request they are a sequence's
`stop_token_ids`."""


class AddPrompt(msgspec.Struct, array_like=True, frozen=True):
    """The sequences of one prompt."""

    ids: bytes
    """Its token ids, packed (`engine.contract.packing`), behind those that all prompts share."""
    max_tokens: int
    min_tokens: int
    seeds: list[int]
    """The seed of each sequence."""
    scored: bytes = b""
    """The tokens that are scored behind this prompt (`SamplingParams.scored`)."""


class AddRequest(msgspec.Struct, array_like=True, frozen=True, tag="add"):
    """Queue the sequences of a request, those of one prompt after those of another.

    What they share is sent once, however many there are: biases alone may take 12 KB.
    """

    handle: int
    """The first sequence's; the others' follow without a gap."""
    request_id: str
    prompts: list[AddPrompt]
    sampling: SamplingParams
    """The first sequence's. The others differ in what `AddPrompt` says, and only the first of each prompt
    has `prompt_logprobs`."""
    cache_salt: bytes = b""
    """The salt of the prefix cache: only sequences with equal salts share prefixes."""
    tenant: str = ""
    """A short key of the tenant; tenants share the engine fairly."""
    service_class: ServiceClass = ServiceClass.DEFAULT
    first_token_s: float = math.inf
    """The time from its arrival after which the first token of the sequence at `bearer` is of no use, in
    seconds."""
    bearer: int = 0
    grammar: str = ""
    """The grammar that every answer follows, as llguidance reads it (`engine.contract.grammars`); empty:
    none. It was compiled before it was sent."""
    has_next_turn: bool = False
    """True if a prompt that goes on from the answer is likely to come within seconds, as when the tool that
    it calls has run."""
    prediction: bytes = b""
    """The tokens, packed, that each answer is expected to have; empty: nothing is."""
    shared: bytes = b""
    """Token ids, packed, with which all prompts begin. What follows them is each prompt's alone: others find
    the pages of these, and of nothing behind them. b"": the prompts share nothing that is known."""


class AbortSequences(msgspec.Struct, array_like=True, frozen=True, tag="abort"):
    """End these sequences. Idempotent: unknown and finished handles are passed over."""

    handles: list[int]


class PauseSequences(msgspec.Struct, array_like=True, frozen=True, tag="pause"):
    """Compute nothing for these sequences until they are resumed, because their clients do not read.

    Idempotent, in any status; unknown and finished handles are passed over. Tokens that are being computed
    while this arrives still come, one for each step in flight. One paused for `stall_deadline_s` ends.
    """

    handles: list[int]


class ResumeSequences(msgspec.Struct, array_like=True, frozen=True, tag="resume"):
    """Compute these sequences again. Idempotent: handles that are not paused are passed over."""

    handles: list[int]


class LiftDeadlines(msgspec.Struct, array_like=True, frozen=True, tag="lift"):
    """Let these sequences have first tokens at any time: their request has begun with another. Idempotent."""

    handles: list[int]


class Ping(msgspec.Struct, array_like=True, frozen=True, tag="ping"):
    """A liveness check, answered by a `Pong` of the same number before the next step."""

    number: int


class StopCore(msgspec.Struct, array_like=True, frozen=True, tag="stop"):
    """End the core now. The API process drains first, and sends this when no sequence is left."""


READ_EVERY: Final = 32
"""The number of messages from the core after each of which the API process says that it has read them."""


class Read(msgspec.Struct, array_like=True, frozen=True, tag="read"):
    """The API process has read so many of the core's messages. The wire's own, which hands it to nobody."""

    messages: int


CoreInput = AddRequest | AbortSequences | PauseSequences | ResumeSequences | LiftDeadlines | Ping | StopCore


# -- core -> API process --------------------------------------------------------------------------


class TimedStep(msgspec.Struct, array_like=True, frozen=True):
    """A step that was timed while warming up: row i computed `lengths[i]` tokens from `positions[i]` on."""

    positions: list[int]
    lengths: list[int]
    seconds: float


class RunnerInfo(msgspec.Struct, array_like=True, frozen=True):
    """The properties of a runner that is warm."""

    pages: int
    page_size: int
    slots: int
    max_model_len: int
    vocab_size: int
    dtype: str
    load_s: float
    warmup_s: float
    page_bytes: int = 0
    """Size of one page in all layers, in bytes."""
    host_pages: int = 0
    """Pages in host memory, which keep what the prefix cache evicts; 0: there is no such memory."""
    page_copy_s: float = 0.0
    """Time to copy a page there or back, measured while warming up, in seconds; 0.0: not measured."""
    is_async: bool = False
    """True if it computes beside the host: `launch` returns before the plan is executed."""
    timed_steps: tuple[TimedStep, ...] = ()
    """Steps of different shapes, from which the learned cost of a step begins. Empty: not measured."""
    arithmetic: str = ""
    """The kernels and all else, beside the weights and `dtype`, that decides the bits of keys and values and
    how a page is laid out. No setting that leaves these alone is in it."""
    state_bytes: int = 0
    """Bytes of the state that a slot keeps of its sequence beside pages; 0: the model has none. Pages are of
    no use without it, and it is lost with the slot."""
    state_places: int = 0
    """Places for copies of states; 0: there are none, and no prefix is cached of a model that has states."""
    state_copy_s: float = 0.0
    """Time to copy a state to its place or back, measured while warming up, in seconds; 0.0: not measured."""
    drafts_max: int = 0
    """The most drafts that a row can verify, with the same tokens as without; 0: none. By a CPU they are the
    same to the bit, by a GPU as far as in any other batch (`engine.runtime.device.device_runner`)."""
    drafts_together: int = 0
    """The most drafts of a step, over all rows; 0: as many as there is room for tokens."""
    verify_shapes: list[int] = []
    """The numbers of tokens to one of which a step without prompts in which rows verify drafts is padded,
    ascending. A step of more tokens is not padded."""
    vector_len: int = 0
    """The numbers of the vector that it makes of a prompt (`engine.contract.embedders`); 0: it makes none."""
    guesses_max: int = 0
    """The most tokens that the model's own MTP layer guesses behind a row's newest; 0: it has none."""
    guess_share: float = 0.0
    """The time that one guess takes, as a part of a decode's, measured while warming up."""
    state_windows: int = 0
    """The most drafts of all rows of a step, of a model that has states: each takes a state beside those of
    slots until the next step."""


class CoreReady(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    """The core is ready: weights are loaded, memory is measured, the runner is warm."""

    runner: RunnerInfo
    overlap: bool = False
    """True if a step is planned while another is computed."""


class CoreFailed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    """The core failed and ends. `message` is for the operator and holds no prompt text."""

    message: str


class CoreProgress(msgspec.Struct, array_like=True, frozen=True, tag="progress"):
    """The stage of the start that the core has reached, for the operator."""

    stage: str


class Pong(msgspec.Struct, array_like=True, frozen=True, tag="pong"):
    """The answer to a `Ping`: the loop is between two steps, or idle."""

    number: int


class Started(msgspec.Struct, array_like=True, frozen=True):
    """A sequence left the waiting queue for the first time."""

    handle: int
    cached_len: int
    """Prompt tokens served from the prefix cache, in any tier."""
    queue_s: float
    """Time in the queue, in seconds."""
    host_len: int = 0
    """The part of `cached_len` that came back from host memory."""
    disk_len: int = 0


class Finished(msgspec.Struct, array_like=True, frozen=True):
    """A sequence ended. Its five times add up to its life in the core."""

    handle: int
    reason: FinishReason
    queue_s: float
    """Time before the first admission, in seconds like the others."""
    prefill_s: float
    """Time from the first admission to the first token, without preempted time."""
    decode_s: float
    """Time from the first token to the end, without preempted time."""
    preempted_s: float
    """Time from each preemption to the next admission."""
    preemptions: int
    """Preemptions while it ran; losing its pages while it was stalled is not counted."""
    stalled_s: float = 0.0
    """Time from each pause to its resumption, and on until the sequence has a slot again if it stalled."""
    expected_s: float = 0.0
    """The estimate of its time to first token, for one that was refused as too late; 0.0 otherwise."""
    late_tokens: int = 0
    """Tokens that were sampled for it and are not reported: those in flight at its end, and one that was not
    finite."""
    again_tokens: int = 0
    """Tokens that were computed again, since it had given up its pages."""
    grammar_s: float = 0.0
    """Time that compiling its grammar took, as far as it was not compiled yet, and filling its masks, on
    threads beside the steps: no part of its life's five times."""
    drafted: int = 0
    """Drafts of its tokens that steps verified, or were verifying at its end."""
    accepted: int = 0
    """The part of them that were right."""
    mispredicted: int = 0
    """The part of them that were wrong and its caller's, who is charged for them (`StepOutput.predicted`)."""


class DiskCounts(msgspec.Struct, array_like=True, frozen=True):
    """A reading of the disk tier, in pages: those there, and counters of those that were written, dropped
    since too many waited, read, and missed, since they were gone or damaged."""

    files: int = 0
    written: int = 0
    dropped: int = 0
    read: int = 0
    missed: int = 0


class StateCounts(msgspec.Struct, array_like=True, frozen=True):
    """Snapshots of states (`engine.core.step.state_tier`), and what happened to them since the start."""

    free: int = 0
    """Places that hold none."""
    kept: int = 0
    saved: int = 0
    restored: int = 0
    """Sequences that began from one."""
    evicted: int = 0
    """Snapshots that made room for others."""
    stateless_tokens: int = 0
    """Prompt tokens whose pages were found at a first admission, and no state behind them."""


class CoreStats(msgspec.Struct, array_like=True, frozen=True):
    """A reading of the core's gauges and counters after a step."""

    waiting: int = 0
    """Sequences that wait for a slot and are not paused: new, preempted and resumed ones."""
    running: int = 0
    """Sequences that hold a slot."""
    pages_free: int = 0
    """Pages that no sequence holds and that contain nothing."""
    pages_cached: int = 0
    """Pages that no sequence holds and that contain a prefix that may be hit."""
    pages_owned: int = 0
    prefix_query_tokens: int = 0
    """Counter: prompt tokens looked up in the prefix cache at a first admission."""
    prefix_hit_tokens: int = 0
    """Counter: prompt tokens that were found there."""
    preemptions: int = 0
    """Counter: sequences that gave up their pages, stalled ones included, or their slots alone (`yields`)."""
    step_s: float = 0.0
    """Duration of the last step, from its plan (or the commit before, if that was later) to its commit."""
    step_tokens: int = 0
    """Tokens that the last step computed."""
    stalled: int = 0
    """Sequences that are paused, with or without pages."""
    class_waiting: tuple[int, ...] = ()
    """For each class, FLEX first: the sequences of `waiting` that do not hold a slot."""
    class_waited_s: tuple[float, ...] = ()
    """For each class: the age of the oldest of these, in seconds; 0.0 where there is none."""
    swaps_in: int = 0
    """Counter: sequences that were preempted and admitted again with pages from host memory."""
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    host_pages_used: int = 0
    host_pages_free: int = 0
    waiting_tokens: int = 0
    """Prompt tokens that wait for their first admission."""
    class_tokens: tuple[int, ...] = ()
    """For each class: the tokens that sequences lack which run or are due (`Sequence.lacking_len`), without
    the one of each running sequence that has its prompt."""
    newest: int = 0
    """The handle of the newest sequence that was added before this reading."""
    host_pages_kept: int = 0
    """Pages in host memory with prefixes that the device lost."""
    prefix_host_tokens: int = 0
    """Counter: the part of `prefix_hit_tokens` that came back from host memory."""
    prefix_disk_tokens: int = 0
    disk: DiskCounts = DiskCounts()
    yields: int = 0
    """Counter: sequences that gave up their slots alone, to a tenant that held less."""
    pages_kept: int = 0
    """The part of `pages_cached` that is kept for the next turns of sessions."""
    kept_found: int = 0
    """Counter: pages that were found again while they were kept."""
    kept_evicted: int = 0
    """Counter: pages that were evicted while they were kept, since nothing else was left."""
    states: StateCounts = StateCounts()


class Move(IntEnum):
    """A change of what a sequence holds that its client feels."""

    PREEMPTED_CLASS = 1
    """It gave slot and pages up to a sequence of a higher class."""
    PREEMPTED_SHARE = 2
    """It gave its slot up to a tenant that held less."""
    PREEMPTED_PAGES = 3
    """It gave them up to others that grew."""
    PREEMPTED_STALLED = 4
    """It gave its pages up while its client did not read."""
    READMITTED = 5


class Moved(msgspec.Struct, array_like=True, frozen=True):
    """A sequence was preempted, or admitted again."""

    handle: int
    move: Move
    swapped: bool = False
    """True if it is admitted again with pages from host memory."""


class StepOutput(msgspec.Struct, array_like=True, frozen=True, tag="step"):
    """The results of one step, or news without a step. Sequence `handles[i]` got `tokens[i]`."""

    step: int = 0
    handles: list[int] = []
    tokens: list[int] = []
    logprobs: list[TokenLogprobs | None] = []
    """One entry for each token, or empty when no sequence of this step asked for them."""
    prompt_logprobs: list[tuple[int, list[TokenLogprobs]]] = []
    """Pairs of a handle and the log-probabilities of its next prompt positions, in order. The prompt's first
    token has none and is not sent."""
    started: list[Started] = []
    finished: list[Finished] = []
    """The sequences that ended; a sequence's last token comes in the same output."""
    stats: CoreStats = CoreStats()
    moved: list[Moved] = []
    record: StepRecord | None = None
    """The step that was committed last; None when none was since the last output."""
    vectors: list[tuple[int, bytes]] = []
    """Pairs of a handle and the vector of its prompt, little-endian float32. The sequence ends in the same
    output."""
    predicted: list[tuple[int, int, int]] = []
    """For each sequence that verified tokens of its prediction: its handle, how many of them were right, and
    how many were not."""
    scores: list[tuple[int, list[float]]] = []
    """Pairs of a handle and the log-probabilities of its `SamplingParams.scored`, in their order. The
    sequence ends in the same output."""


CoreOutput = CoreReady | CoreFailed | CoreProgress | Pong | StepOutput


# -- core <-> runner ------------------------------------------------------------------------------


class SlotAssignment(msgspec.Struct, array_like=True, frozen=True):
    """A sequence gets a slot: for the first time, or again after a preemption or a stall."""

    slot: int
    ids: bytes
    """All known tokens, packed: the prompt, and the output so far of a sequence that had a slot before."""
    prompt_len: int
    sampling: SamplingParams

    @staticmethod
    def of(slot: int, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams) -> SlotAssignment:
        return SlotAssignment(slot, packed(token_ids), prompt_len, sampling)

    @property
    def known_len(self) -> int:
        return len(self.ids) // TOKEN_LEN

    @property
    def token_ids(self) -> array[int]:
        return unpacked(self.ids)


class Want(IntEnum):
    """The result that a row of a plan is to bring beside its keys and values."""

    NOTHING = 0
    SAMPLE = 1
    """The token behind its last one."""
    VERIFY = 2
    """The tokens behind its newest known one and behind each of its drafts."""


class Plan(msgspec.Struct, array_like=True, frozen=True):
    """The plan of one step. The runner executes it in this order: leave, seat, grow, swap out, fork,
    swap in, save, restore, compute, sample.

    Row i computes tokens `[positions[i], positions[i] + lengths[i])` of `slots[i]`, writes their
    keys and values to that slot's pages, and brings `wants[i]`. The runner
    appends a sampled token to its own copy of the slot's tokens, so that the next plan need not
    carry it. Decode rows (one token, sampled) come before rows that verify, and these before prefill chunks.

    A row that verifies computes its sequence's newest token and the drafts behind it, and samples a token
    behind each of these as if all drafts before it were known. Of these tokens count the first, and each
    whose predecessor is the draft in its place (`agreed`): the runner appends these, and forgets the others.
    Where a model has states, the slot's is that behind the last draft that is right.
    """

    step: int
    left: list[int]
    """The slots whose sequences finished, were aborted, preempted or stalled since the last plan."""
    seated: list[SlotAssignment]
    grown: list[tuple[int, list[int]]]
    """Pairs of a slot and the pages appended to its page table. Page p of a slot holds its tokens
    `[p * page_size, (p + 1) * page_size)`. A seated slot starts from an empty table; of the pages it
    is given, the positions before its first row are computed already."""
    slots: list[int]
    positions: list[int]
    lengths: list[int]
    wants: list[Want]
    swapped_out: list[tuple[int, int]] = []
    """Pairs (page, host page): copy the page to the host page before this plan writes to the page."""
    swapped_in: list[tuple[int, int]] = []
    """Pairs (host page, page): copy the host page to the page, after all copies out and all forks, and before
    any page is read."""
    forked: list[tuple[int, int, int]] = []
    """Triples (source, page, length): copy the first `length` tokens of a page to another, in this order and
    after all copies out. The source may be the page itself."""
    masks: list[bytes] = []
    """Empty, or for each row that samples, in order, the tokens that its grammar allows, by which bit t of
    little-endian 32-bit words says whether token t is; of a token beyond its end nothing is. b"": all are. A
    row that verifies has a mask for each of its tokens."""
    drafts: list[list[int]] = []
    """For each row that verifies, in order, the tokens that are likely to follow, at least one."""
    saved: list[tuple[int, int, int]] = []
    """Triples (slot, place, back): copy the state that the slot has before this plan to the place. The slot
    may have been left, and seated again. With `back` the state is the one so many tokens before, of those
    that the slot passed by drafts in the plan before this one."""
    restored: list[tuple[int, int]] = []
    """Pairs (place, slot): copy the state in the place to the slot, after all copies out of slots."""
    guesses: list[int] = []
    """Empty, or for each row that samples, in order, how many tokens the model's MTP layer is to guess behind
    the newest."""

    @property
    def sampled(self) -> int:
        """The number of tokens that are sampled."""
        return len(self.wants) - self.wants.count(Want.NOTHING) + sum(map(len, self.drafts))


class RunResult(msgspec.Struct, array_like=True, frozen=True):
    """The results of a plan, in the order of its rows."""

    tokens: list[int]
    """One token for each row that sampled, and one more for each of its drafts; `NUMERIC_FAILURE` where the
    logits were not finite."""
    logprobs: list[TokenLogprobs | None]
    """One entry for each of these tokens, or empty when no sequence asked for them."""
    prompt_logprobs: list[tuple[int, list[TokenLogprobs]]]
    """For each slot that asked: the slot, and for each prompt position computed in this step the
    log-probabilities of the prompt token that follows it. The prompt's last position has no follower."""
    vectors: list[tuple[int, bytes]] = []
    """For each slot that asked and whose prompt was completed in this step: the slot, and the prompt's
    vector, `vector_len` numbers as little-endian float32; b"" where they are not finite."""
    scores: list[tuple[int, list[float]]] = []
    """For each slot that asked and whose prompt was completed in this step: the slot, and the
    log-probabilities of its `SamplingParams.scored`; NaN where the logits were not finite."""
    guesses: list[list[int]] = []
    """Empty, or for each row that samples, in order, what was guessed behind its newest token, no more than
    asked for."""


NUMERIC_FAILURE = -1
"""The token of a row whose logits were not finite."""


def agreed(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """The number of drafts of a row that are right: those before the first that differs from the token that
    was sampled in its place."""
    return next((at for at, draft in enumerate(drafts) if draft != sampled[at]), len(drafts))


class Pending(Protocol):
    """A plan that a runner has taken on and may still execute."""

    def collect(self) -> RunResult:
        """The plan's result. Waits until the plan is executed, and for no plan that was launched after it.

        Must be called once for each plan, in the order of their launches. Raises only when the whole engine
        is lost.
        """
        ...


class Runner(Protocol):
    """The core's view of the tensors. One implementation on torch, one fake for the simulator."""

    info: RunnerInfo

    def launch(self, plan: Plan) -> Pending:
        """Take on a plan. Plans are executed in the order of their launches, so a row may compute the token
        that the plan before samples, which the host has not seen. Raises only when the whole engine is
        lost."""
        ...
