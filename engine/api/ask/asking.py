"""From a request's bytes to sequences that may be submitted, within its caller's deadlines.

Everything that holds the request's body is local to `ask`, and is freed when `ask` returns.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from engine.api.answer.encoder import Answered, Heading, Repeated
from engine.api.answer.exchange import EngineExchange
from engine.api.answer.rows import Echo
from engine.api.answer.table import ANSWERS, AnswerApi
from engine.api.ask.admission import (
    Choice,
    Limits,
    answer_len,
    branches_of,
    cache_salt,
    check_fields,
    out_of_vocab,
    plan_choices,
    plan_scores,
    plan_vectors,
    prompts_of,
    scores_len,
    service_class,
    stop_ids,
    stop_tokens,
    trusted_ids,
    trusted_prediction,
    vectors_len,
)
from engine.api.ask.echo import echoed
from engine.api.ask.engine_state import EngineState
from engine.api.ask.forms import AnswerForm
from engine.api.ask.model import ServedModel
from engine.api.ask.prompt_packing import pack
from engine.api.core.client import Share
from engine.api.core.parts import Branches
from engine.contract.messages import AddPrompt
from shared.apis.embeddings import EmbeddingsRequest
from shared.apis.generation import GenerationRequest
from shared.apis.holding import Holding, weigh, weigh_long
from shared.apis.prediction import PREDICTION
from shared.apis.prompt import BranchedPrompt, PromptForm, TextPrompt
from shared.apis.request import Request
from shared.apis.tools import ToolMode
from shared.apis.validation import INLINE_LEN_MAX, Parsed, parse, parse_slices
from shared.fairness.fair_threads import Slices
from shared.process.clock import Clock
from shared.text.branches import pieces_of, scored_tokens
from shared.text.prompts import text_slices
from shared.wire.errors import ApiError, QueueTimeout, RequestTimeout
from shared.wire.ids import (
    FIRST_TOKEN_TIMEOUT_HEADER,
    QUEUE_TIMEOUT_HEADER,
    REQUEST_TIMEOUT_HEADER,
    SERVICE_TIER_HEADER,
    SESSION_HEADER,
)
from shared.wire.request_body import check_page
from shared.wire.shapes import BODY_LEN_MAX
from shared.wire.timeouts import stated_timeout_ms, stated_timeout_s

_AT_ONCE: Final = 0.0
"""A time of any loop's that has passed."""
T = TypeVar("T")
S = TypeVar("S", bound=Request)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The time limits that the caller set, in seconds from the request's arrival. Each is None where the
    caller set none."""

    queue_s: float | None
    in_all_s: float | None
    first_token_s: float | None
    started_at_s: float
    """The request's arrival, in seconds on `clock`."""
    clock: Clock

    @classmethod
    def of(cls, exchange: EngineExchange, clock: Clock) -> Deadlines:
        """The deadlines that the request's headers state. Raises InvalidRequest where one is not a
        number in range."""
        headers = exchange.request.headers
        return cls(
            stated_timeout_s(QUEUE_TIMEOUT_HEADER, headers.get(QUEUE_TIMEOUT_HEADER)),
            stated_timeout_s(REQUEST_TIMEOUT_HEADER, headers.get(REQUEST_TIMEOUT_HEADER)),
            stated_timeout_ms(FIRST_TOKEN_TIMEOUT_HEADER, headers.get(FIRST_TOKEN_TIMEOUT_HEADER)),
            exchange.started_at,
            clock,
        )

    @property
    def first_token_left_s(self) -> float:
        """The time for which a first token is still of use, in seconds; infinite where none is stated."""
        if self.first_token_s is None:
            return math.inf
        return max(0.0, self.started_at_s + self.first_token_s - self.clock.monotonic())

    async def bounded(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the work that comes before the queue, within both limits. Raises RequestTimeout and
        QueueTimeout."""
        bounds = [bound for bound in (self.queue_s, self.in_all_s) if bound is not None]
        if not bounds:
            return await work
        try:
            async with asyncio.timeout(None) as scope:
                timer = self.clock.call_at(
                    self.started_at_s + min(bounds), partial(scope.reschedule, _AT_ONCE)
                )
                try:
                    return await work
                finally:
                    timer.cancel()
        except TimeoutError:
            raise _late(queued=self.queue_s == min(bounds)) from None

    def watch(self, expire: Callable[[ApiError], None], is_waiting: Callable[[], bool]) -> ExitStack:
        """Call `expire` with the error when a deadline has passed, until the returned stack is
        closed. `is_waiting` says whether the request still waits for its first admission."""
        timers = ExitStack()

        def queue_is_over() -> None:
            if is_waiting():
                expire(_late(queued=True))

        if self.queue_s is not None:
            timers.callback(self.clock.call_at(self.started_at_s + self.queue_s, queue_is_over).cancel)
        if self.in_all_s is not None:
            end_s = self.started_at_s + self.in_all_s
            timers.callback(self.clock.call_at(end_s, lambda: expire(_late(queued=False))).cancel)
        return timers


def _late(*, queued: bool) -> ApiError:
    if queued:
        return QueueTimeout(f"The engine did not begin within {QUEUE_TIMEOUT_HEADER}.")
    return RequestTimeout(f"The answer was not complete within {REQUEST_TIMEOUT_HEADER}.")


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that may be submitted. It holds nothing of the body."""

    api: AnswerApi
    heading: Heading
    streams: bool
    keeps_text: bool
    """True if the answer's text is held to its end."""
    n: int
    stop_strings: Sequence[str]
    stop_ids: frozenset[int]
    form: AnswerForm
    share: Share
    choices: Sequence[Choice]
    prompts: list[AddPrompt]
    branches: Branches | None
    """Its prompts, where they begin alike. None where nothing is known of that."""
    echoes: Sequence[Echo] | None
    answered: Answered
    """The facts that the answer may tell, without those of its choices."""
    prediction: bytes | None
    """The tokens, packed, that its caller expects each answer to have. None where it predicts nothing."""
    answer_len: int
    """The most bytes that the answer holds at any time, and the core of what is predicted of it."""


async def read(state: EngineState, exchange: EngineExchange, kind: type[S], holding: Holding) -> Parsed[S]:
    """Read and parse a request's body, and check that it names the model that is served. Raises
    ApiError."""
    check_page(exchange.request.headers)
    with exchange.enter("body"):
        body = await exchange.request.body(
            len_max=BODY_LEN_MAX, deadline_s=state.config.body_timeout_s, hold=holding.hold
        )
        if (turn := state.begins.ask(exchange.tenant)) is not None:
            await turn
    with exchange.enter("validate"):
        if len(body) <= INLINE_LEN_MAX:
            parsed = parse(body, kind, weigh(body, holding))
        else:
            await weigh_long(body, holding, state.threads, exchange.tenant)
            parsed = await state.threads.run(exchange.tenant, parse_slices(body, kind), holds=True)
        if (name := parsed.request.model) is not None:
            state.check_name(name)
            exchange.model = name
        exchange.ignored_fields = parsed.ignored_header
    return parsed


async def ask(
    state: EngineState, exchange: EngineExchange, kind: type[GenerationRequest], holding: Holding
) -> CheckedRequest:
    """Read, validate and tokenize a request, and plan its sequences. Raises ApiError."""
    model, limits = state.ready_model()
    tenant = exchange.tenant
    parsed = await read(state, exchange, kind, holding)
    exchange.streams = bool(parsed.request.stream)
    model.capabilities.check(parsed.request)
    parsed.require_supported()
    with exchange.enter("tokenize"):
        request = parsed.request
        check_fields(request, limits.vocab_size)
        prompt = request.prompt_form
        prompts, packed = await _prompt_ids(state, tenant, model, request, prompt, limits)
        stops = stop_ids(request, model.eos_ids, model.special_ids)
        choices, branches = _planned(model, request, prompt, prompts, packed, limits, stops)
        echoes = await _echoes(state, tenant, model, request, prompt, prompts)
        prediction = await _prediction(state, tenant, model, request, limits)
    form = await state.forms.of(model, exchange, parsed, prompt, prompts[0])
    api, share = ANSWERS[type(request)], _share(exchange, request)
    repeated = None if api.repeats is None else api.repeats(request, parsed.fields)
    return CheckedRequest(
        api=api,
        heading=_heading(state, request, api.id_prefix),
        streams=bool(request.stream),
        keeps_text=request.keeps_answer or not request.stream,
        n=request.n or 1,
        stop_strings=request.stop_strings,
        stop_ids=stops,
        form=form,
        share=share,
        choices=choices,
        prompts=[] if branches is not None else prompts_of(choices, packed, request.n or 1),
        branches=branches,
        echoes=echoes,
        answered=Answered(
            stop_tokens=stop_tokens(request, model.special_ids),
            is_cut_by_context=choices[0].sampling.max_tokens < (request.output_tokens_max or 0),
            sampling=choices[0].sampling,
            service_class=share.service_class,
            repeated=repeated,
            in_base64=isinstance(request, EmbeddingsRequest) and request.encoding_format == "base64",
            wall=state.clock.wall,
        ),
        prediction=prediction,
        answer_len=_held_len(request, choices, branches, repeated) + form.held_len + len(prediction or b""),
    )


def _heading(state: EngineState, request: GenerationRequest, id_prefix: str) -> Heading:
    return Heading(
        id=id_prefix + secrets.token_hex(12),
        created=int(state.clock.wall()),
        model=request.model,
        system_fingerprint=state.fingerprint(),
        sends_usage=request.include_usage,
        sends_token_ids=bool(request.return_token_ids),
        logprobs=request.logprobs_asked,
        sends_reasoning=request.shows_reasoning,
        hides_reasoning=request.hides_reasoning,
    )


def _planned(
    model: ServedModel,
    request: GenerationRequest,
    prompt: PromptForm,
    pieces: list[list[int]],
    packed: list[bytes],
    limits: Limits,
    stops: frozenset[int],
) -> tuple[list[Choice], Branches | None]:
    """The sequences of a request; where its prompts begin alike, these too. Raises what `plan_choices`,
    `plan_scores` and `plan_vectors` do."""
    if isinstance(prompt, BranchedPrompt):
        shared, *own = pieces
        choices = plan_scores(prompt, len(shared), own, limits)
        return choices, branches_of(choices, packed, scored_tokens(model.tokenizer, prompt))
    if isinstance(request, EmbeddingsRequest):
        assert model.embedder is not None
        return plan_vectors(request, pieces, limits, model.embedder), None
    return plan_choices(request, pieces, limits, stops, model.sampling), None


def _held_len(
    request: GenerationRequest,
    choices: Sequence[Choice],
    branches: Branches | None,
    repeated: Repeated | None,
) -> int:
    """The bytes that an answer holds, but for its form's."""
    repeated_len = 0 if repeated is None else repeated.held_len
    if branches is not None:
        return repeated_len + scores_len(branches.prompts)
    return repeated_len + (answer_len(request, choices) if request.answers else vectors_len(choices))


async def _prompt_ids(
    state: EngineState,
    tenant: str,
    model: ServedModel,
    request: GenerationRequest,
    prompt: PromptForm,
    limits: Limits,
) -> tuple[list[list[int]], list[bytes]]:
    """The token ids of each prompt, or of each piece of prompts that begin alike, and the same packed: the
    gateway's where they can be trusted, else made here. Raises InvalidRequest, and what
    `CoreClient.check_room` raises."""

    async def make() -> list[list[int]]:
        return await state.threads.run(tenant, pieces_of(model.tokenizer, prompt, limits.room))

    trusted = trusted_ids(request, model.tokenizer.hash, prompt.count())
    if trusted is not None and isinstance(prompt, BranchedPrompt) and prompt.is_cut:
        longest = len(trusted[0]) + max(map(len, trusted[1:]))  # the gateway may not have known the room
        trusted = trusted if longest <= limits.room.prompt_most else None
    if isinstance(prompt, TextPrompt) and prompt.cut is not None:
        most = limits.room.prompt_most  # the gateway may not have known it
        trusted = None if trusted is None or max(map(len, trusted)) > most else trusted
    ids = await make() if trusted is None else trusted
    n = request.n or 1
    # a request that finds no room costs nothing more
    if not isinstance(prompt, BranchedPrompt):
        state.core.check_room(tenant, n * len(ids), n * sum(map(len, ids)))
    packed = await pack(ids, limits.vocab_size, state.threads, tenant)
    if packed is None and trusted is not None:
        ids = await make()
        packed = await pack(ids, limits.vocab_size, state.threads, tenant)
    if packed is None:
        raise out_of_vocab(request.prompt_param, limits.vocab_size)
    return ids, packed


async def _prediction(
    state: EngineState, tenant: str, model: ServedModel, request: GenerationRequest, limits: Limits
) -> bytes | None:
    """The tokens, packed, of what the caller predicts: the gateway's where they can be trusted, else made
    here. None where it predicts nothing. Raises InvalidRequest."""
    if (text := request.predicted_text) is None:
        return None
    packed = None
    if (ids := trusted_prediction(request, model.tokenizer.hash)) is not None:
        packed = await pack([ids], limits.vocab_size, state.threads, tenant)
    if packed is None:
        work = text_slices(model.tokenizer, text, None, PREDICTION, add_special_tokens=False)
        ids = await state.threads.run(tenant, work)
        packed = await pack([ids], limits.vocab_size, state.threads, tenant)
    if packed is None:
        raise out_of_vocab(PREDICTION, limits.vocab_size)
    return packed[0]


async def _echoes(
    state: EngineState,
    tenant: str,
    model: ServedModel,
    request: GenerationRequest,
    prompt: PromptForm,
    prompts: list[list[int]],
) -> list[Echo] | None:
    """The prompts as the answer repeats them; None where that is not asked for, or they are a chat."""
    if not request.echoes or not isinstance(prompt, TextPrompt):
        return None
    wants_starts, texts = request.logprobs_asked is not None, _texts(prompt, prompts)
    return await state.threads.run(tenant, _echo_slices(model, texts, wants_starts))


def _echo_slices(
    model: ServedModel, texts: list[tuple[str | None, list[int]]], wants_starts: bool
) -> Slices[list[Echo]]:
    echoes = []
    for given, ids in texts:
        if wants_starts or given is None:
            text, starts = yield from echoed(model.tokenizer, given, ids)
        else:
            text, starts = given, []
        echoes.append(Echo(text, ids, starts if wants_starts else []))
        yield
    return echoes


def _texts(given: TextPrompt, prompts: list[list[int]]) -> list[tuple[str | None, list[int]]]:
    """Each prompt's text with its token ids. The text is None where the prompt was given as ids."""
    if isinstance(given.prompt, str):
        return [(given.prompt, prompts[0])]
    texts = [item if isinstance(item, str) else None for item in given.prompt]
    return list(zip(texts if len(prompts) > 1 else texts[:1], prompts, strict=True))


def _share(exchange: EngineExchange, request: GenerationRequest) -> Share:
    headers = exchange.request.headers
    return Share(
        tenant=exchange.tenant,
        service_class=service_class(request, headers.get(SERVICE_TIER_HEADER)),
        cache_salt=cache_salt(exchange.tenant, request.cache_salt),
        has_next_turn=bool(
            headers.get(SESSION_HEADER)
            or request.prompt_cache_key
            or request.tool_choice_asked.mode is not ToolMode.NONE
        ),
    )
