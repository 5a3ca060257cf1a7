"""The worlds of `tests.simulator`: the engine's limits, and the messages that arrive, drawn from a seed.

Requests arrive at random, share prefixes, come as several sequences with one prompt, and are aborted at
random moments: while they wait, run, are preempted, are in flight, after they ended, or before they came. At
random moments they are paused and resumed, some of them never.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from typing import Final

import msgspec

from engine.contract.messages import (
    AbortSequences,
    PauseSequences,
    ResumeSequences,
    SamplingParams,
    ServiceClass,
)
from engine.contract.packing import TOKENS
from engine.core.queue.newcomers import AddSequence, Prompt
from engine.core.scheduler_config import SchedulerConfig
from tests.fake_grammars import BAD

UNBOUNDED_QUEUE = SchedulerConfig(step_tokens_max=16, queue_len_max=1_000_000, stall_deadline_s=0.5)

Message = AddSequence | AbortSequences | PauseSequences | ResumeSequences

VECTOR_LEN: Final = 2
"""The numbers of a prompt's vector."""
CHEAP_S: Final = 1e-6
"""The time to copy a page where that is always cheaper than computing it."""


@dataclass(frozen=True, slots=True)
class SimConfig:
    """A world: the runner's size, the scheduler's settings, and the traffic."""

    requests: int = 60
    """Requests, each of which brings 1 to `n_max` sequences."""
    n_max: int = 3
    pages: int = 40
    page_size: int = 4
    host_pages: int = 0
    """Pages in host memory, which keep what the prefix cache evicts."""
    page_copy_s: float = 0.001
    state_bytes: int = 0
    """Of a model that keeps a state by slot."""
    state_windows: int = 0
    """The drafts of a step of such a model."""
    state_places: int = 0
    disk: bool = False
    """True if what they keep is also written to a disk."""
    slots: int = 6
    vocab_size: int = 50
    prompt_len_max: int = 40
    max_tokens_max: int = 24
    max_model_len: int = 56
    """The context length. `prompt_len_max` does not keep to it, so some sequences are rejected."""
    prefixes: int = 4
    """Distinct beginnings that prompts share; their lengths are random, and some end on a page."""
    salts: int = 2
    tenants: int = 1
    classes: int = 1
    """The number of service classes of the requests."""
    arrival_gap_s: float = 0.02
    abort_share: float = 0.2
    """The share of sequences that are aborted at a random moment."""
    in_flight_abort_share: float = 0.02
    """The share of steps during which some handle is aborted, known or not."""
    pause_share: float = 0.3
    """The share of sequences that are paused at random moments."""
    in_flight_pause_share: float = 0.02
    """The share of steps during which some handle is paused, and of steps during which some is resumed."""
    lost_share: float = 0.1
    """The share of pauses that no resumption ends."""
    grammar_share: float = 0.15
    """The share of requests whose answers follow a grammar."""
    scored_share: float = 0.1
    """The share of requests that ask for log-probabilities of tokens behind prompts which begin alike."""
    session_share: float = 0.3
    """The share of requests whose pages are kept for a next turn."""
    vector_share: float = 0.1
    """The share of requests that ask for their prompt's vector, and no answer."""
    drafts_max: int = 0
    """The most drafts that a row verifies; 0: none."""
    guesses_max: int = 0
    """The most guesses of the model's own."""
    right_share: float = 0.7
    """The share of drafted tokens that are right."""
    prediction_share: float = 0.3
    """Where there are drafts: the share of sequences whose caller predicts the answer, nearly right or
    not."""
    fails: bool = True
    """True if the model fails numerically for some sequences."""
    prompt_logprobs_share: float = 0.15
    logprobs_share: float = 0.3
    step_base_s: float = 0.005
    token_s: float = 0.0005
    scheduler: SchedulerConfig = UNBOUNDED_QUEUE

    @property
    def kv_tokens(self) -> int:
        return self.pages * self.page_size


def random_config(seed: int) -> SimConfig:
    """A world with random limits and traffic. Some worlds cannot serve a single prompt."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 8, 16])
    max_model_len = rng.randint(8, 80)
    context_pages = max_model_len // page_size
    slots = rng.randint(1, 12)
    return SimConfig(
        requests=rng.randint(4, 40),
        n_max=rng.randint(1, 6),
        pages=max(2, rng.randint(context_pages // 2, context_pages * 4 + 2)),
        page_size=page_size,
        slots=slots,
        host_pages=rng.choice([0, 3, 1000]),
        page_copy_s=rng.choice([0.001, CHEAP_S]),
        disk=seed % 4 == 0,
        vocab_size=rng.choice([10, 50, 1000]),
        prompt_len_max=rng.randint(1, 60),
        max_tokens_max=rng.randint(1, 40),
        max_model_len=max_model_len,
        prefixes=rng.randint(1, 5),
        salts=rng.randint(1, 2),
        tenants=rng.choice([1, 2, 5]),
        classes=rng.randint(1, 3),
        arrival_gap_s=rng.choice([0.0005, 0.005, 0.05]),
        abort_share=rng.random() * rng.choice([0.0, 0.3, 1.0]),
        in_flight_abort_share=rng.random() * rng.choice([0.0, 0.3]),
        pause_share=rng.random() * rng.choice([0.0, 0.5, 1.0]),
        in_flight_pause_share=rng.random() * rng.choice([0.0, 0.3, 1.0]),
        lost_share=rng.random() * rng.choice([0.0, 0.2, 1.0]),
        prompt_logprobs_share=rng.random() * rng.choice([0.0, 0.3, 1.0]),
        vector_share=(0.0, 0.2, 0.0, 1.0, 0.5)[seed % 5],
        grammar_share=(0.0, 0.0, 0.3, 1.0)[seed // 2 % 4],
        scored_share=(0.0, 0.2, 0.0, 1.0)[seed // 4 % 4],
        drafts_max=(0, 0, 3, 15)[seed // 8 % 4],
        right_share=(0.0, 0.5, 0.9, 1.0)[seed // 32 % 4],
        guesses_max=(0, 2)[seed // 16 % 2],
        scheduler=SchedulerConfig(
            step_tokens_max=slots + rng.choice([0, 1, 5, 40]),
            queue_len_max=rng.choice([3, *[1_000_000] * 3]),
            watermark=rng.choice([0.0, 0.01, 0.1, 0.5]),
            preemptions_max=rng.randint(1, 4),
            prefix_cache=rng.random() < 0.8,
            stall_deadline_s=rng.choice([0.001, 0.1, 5.0]),
            session_keep_s=rng.choice([0.0, 0.05, 30.0]),
        ),
    )


def random_history_of_states(seed: int) -> SimConfig:
    """A small world of a model with states, whose few sequences meet at many boundaries of pages."""
    rng = random.Random(seed)
    page_size, max_model_len, slots = rng.choice([1, 2, 4, 8]), rng.randint(16, 64), rng.randint(1, 4)
    return SimConfig(
        requests=rng.randint(3, 6),
        n_max=rng.randint(1, 3),
        pages=rng.randint(1, 3) * max_model_len // page_size + 1,
        page_size=page_size,
        page_copy_s=rng.choice([CHEAP_S, 0.001]),
        state_bytes=64,
        state_places=rng.choice([1, 2, 5, 40]),
        drafts_max=(0, 3, 15)[seed % 5 % 3],
        state_windows=(3, 15, 40)[seed // 5 % 3],
        right_share=(0.0, 0.5, 0.9, 1.0)[seed // 15 % 4],
        guesses_max=(0, 4)[seed // 3 % 2],
        slots=slots,
        prompt_len_max=max_model_len // 2,
        max_tokens_max=rng.randint(1, 16),
        max_model_len=max_model_len,
        prefixes=rng.randint(1, 3),
        salts=1,
        tenants=rng.randint(1, 2),
        classes=rng.randint(1, 2),
        arrival_gap_s=rng.choice([0.001, 0.02, 0.1]),
        abort_share=rng.choice([0.0, 0.2]),
        pause_share=rng.choice([0.0, 0.3]),
        scheduler=SchedulerConfig(
            step_tokens_max=slots + rng.choice([1, 5, 40]),
            queue_len_max=1_000_000,
            stall_deadline_s=0.5,
            preemptions_max=rng.randint(1, 3),
            session_keep_s=rng.choice([0.0, 0.05, 30.0]),
            state_every_len=rng.choice([1, 4, 512]),
        ),
    )


def _pooled(message: AddSequence) -> AddSequence:
    """The same for its prompt's vector alone."""
    sampling = SamplingParams(seed=message.sampling.seed, max_tokens=0, vector_len=VECTOR_LEN)
    return msgspec.structs.replace(message, sampling=sampling, grammar="", has_next_turn=False)


def draw_messages(rng: random.Random, config: SimConfig) -> list[tuple[float, Message]]:
    """All arrivals, aborts, pauses and resumptions with their times, in the order of the times."""
    return _Traffic(rng, config).messages()


def _scored(rng: random.Random, add: AddSequence, shared: Prompt, config: SimConfig) -> AddSequence:
    """One of the prompts that begin with the same tokens, behind which tokens are scored. Each is a request
    of its own: it is charged for all that it computes."""
    own = array(TOKENS, [rng.randrange(config.vocab_size) for _ in range(rng.randint(1, 9))])
    tokens = array(TOKENS, [rng.randrange(config.vocab_size) for _ in range(rng.randint(1, 4))])
    sampling = SamplingParams(add.sampling.seed, 0, scored=tokens.tobytes())
    prompt = Prompt.unpacked(own.tobytes(), shared)
    return msgspec.structs.replace(
        add, request_id=f"{add.request_id}_{add.handle}", prompt_ids=prompt, sampling=sampling
    )


class _Traffic:
    def __init__(self, rng: random.Random, config: SimConfig) -> None:
        self._rng = rng
        self._config = config

    def messages(self) -> list[tuple[float, Message]]:
        rng, config = self._rng, self._config
        messages: list[tuple[float, Message]] = []
        prefixes = [self._random_ids(rng.randint(1, config.prompt_len_max)) for _ in range(config.prefixes)]
        now, handle = 0.0, 0
        for request in range(config.requests):
            now += rng.expovariate(1 / config.arrival_gap_s)
            prompt = Prompt(array(TOKENS, self._prompt(prefixes)))
            grammar, has_next_turn = self._grammar(request), self._has_next_turn(request)
            is_pooled = random.Random(f"vector {request}").random() < config.vector_share  # of its own, too
            salt = bytes([rng.randrange(config.salts)])
            behind = random.Random(f"scored {request}")  # of its own, as below
            is_scored = not grammar and behind.random() < config.scored_share
            for _ in range(rng.randint(1, config.n_max)):
                handle += 1
                add = self._add(handle, f"req_{request}", prompt, salt, grammar, has_next_turn)
                if is_scored and not is_pooled:
                    add = _scored(behind, add, prompt, config)
                messages.append((now, _pooled(add) if is_pooled else add))
                if rng.random() < config.abort_share:
                    later = now + rng.expovariate(1 / 0.3)
                    messages += [(later, AbortSequences([handle]))] * rng.randint(1, 2)
                if rng.random() < config.pause_share:
                    messages += self._pauses(handle, now)
        return sorted(messages, key=lambda message: message[0])

    def _grammar(self, request: int) -> str:
        rng = random.Random(request)  # of its own: the other requests of a world are the same without
        if rng.random() >= self._config.grammar_share:
            return ""
        return BAD if rng.random() < 0.05 else f"grammar {rng.randrange(5)}"

    def _has_next_turn(self, request: int) -> bool:
        return random.Random(-1 - request).random() < self._config.session_share  # of its own, too

    def _add(
        self,
        handle: int,
        request_id: str,
        prompt: Prompt,
        salt: bytes,
        grammar: str,
        has_next_turn: bool,
    ) -> AddSequence:
        rng, config = self._rng, self._config
        return AddSequence(
            handle,
            request_id,
            prompt,
            self._sampling(),
            salt,
            tenant=f"tenant_{rng.randrange(config.tenants)}",
            service_class=rng.choice(list(ServiceClass)[: config.classes]),
            grammar=grammar,
            has_next_turn=has_next_turn,
        )

    def _pauses(self, handle: int, now: float) -> list[tuple[float, Message]]:
        rng, events = self._rng, list[tuple[float, Message]]()
        for _ in range(rng.randint(1, 4)):
            now += rng.expovariate(1 / 0.1)
            events += [(now, PauseSequences([handle]))] * rng.randint(1, 2)
            if rng.random() < self._config.lost_share:
                break
            now += rng.expovariate(1 / 0.1)
            events += [(now, ResumeSequences([handle]))] * rng.randint(1, 2)
        return events

    def _random_ids(self, length: int) -> list[int]:
        return [self._rng.randrange(self._config.vocab_size) for _ in range(length)]

    def _prompt(self, prefixes: list[list[int]]) -> list[int]:
        rng = self._rng
        prefix = rng.choice(prefixes) if rng.random() < 0.6 else []
        if prefix and rng.random() < 0.3:
            return prefix  # the same prompt again, maybe ending on a page
        return prefix + self._random_ids(rng.randint(1, max(1, self._config.prompt_len_max - len(prefix))))

    def _sampling(self) -> SamplingParams:
        rng, config = self._rng, self._config
        max_tokens = rng.randint(1, config.max_tokens_max)
        return SamplingParams(
            seed=rng.randrange(2**64) | (not config.fails),  # odd seeds do not fail
            max_tokens=max_tokens,
            stop_token_ids=tuple(range(rng.randrange(4))),
            min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
            logprobs=rng.randrange(3) if rng.random() < config.logprobs_share else None,
            prompt_logprobs=rng.randrange(3) if rng.random() < config.prompt_logprobs_share else None,
        )
