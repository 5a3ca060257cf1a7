"""Chat and completions, the way of one request:

    read -> validate -> tokenize -> admit -> submit -> (stream | collect) -> settle

A `Generation` exists from the moment its sequences are in the core's queue. Whatever happens to it
then (its end, an error, a client who leaves at any await), `close` runs once and tells the core to
drop exactly the sequences that have not ended.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TypeVar

from engine.api.admission import (
    AnyRequest,
    Choice,
    cache_salt,
    logprobs_asked,
    plan_choices,
    service_class,
    stop_ids,
    timeout_s,
    trusted_ids,
)
from engine.api.core_client import Share
from engine.api.detokenizer import Detokenizer
from engine.api.encoding import AnswerEncoder, ChatEncoder, CompletionEncoder, Echo, Heading
from engine.api.exchange import Exchange, Tally
from engine.api.model import ServedModel
from engine.api.outputs import ChoiceOutput, Delta, RequestOutput, Timing
from engine.api.state import EngineState
from shared import sse
from shared.errors import RequestAborted
from shared.ids import (
    IGNORED_FIELDS_HEADER,
    QUEUE_TIMEOUT_HEADER,
    REQUEST_TIMEOUT_HEADER,
    SERVICE_TIER_HEADER,
)
from shared.openai import (
    BODY_LEN_MAX,
    ChatRequest,
    CompletionRequest,
    PromptTokensDetails,
    Usage,
)
from shared.validation import Parsed, parse, prompt_count

R = TypeVar("R", ChatRequest, CompletionRequest)


async def chat_completions(state: EngineState, exchange: Exchange) -> None:
    await _generate(state, exchange, ChatRequest)


async def completions(state: EngineState, exchange: Exchange) -> None:
    await _generate(state, exchange, CompletionRequest)


async def _generate(state: EngineState, exchange: Exchange, kind: type[R]) -> None:
    exchange.is_generation = True
    model, limits = state.ready_model()
    with state.working():
        arrival = Arrival()
        with state.listed(exchange.request_id, arrival):
            with exchange.enter("read"):
                body = await exchange.request.body(
                    len_max=BODY_LEN_MAX, deadline_s=state.config.body_timeout_s
                )
            with exchange.enter("validate"):
                parsed = parse(body, kind)
                state.check_name(parsed.request.model)
            with exchange.enter("tokenize"):
                prompts = await _prompt_ids(model, parsed.request, limits.vocab_size)
                echoes = await _echoes(model, parsed.request, prompts)
        if arrival.is_aborted:
            raise RequestAborted("The request was aborted.")
        choices = plan_choices(parsed.request, prompts, limits, model.eos_ids, model.sampling)
        generation = Generation(state, exchange, parsed, model, choices, echoes)
        with state.listed(exchange.request_id, generation):
            await generation.run()


class Arrival:
    """A request that is read and tokenized. One that is aborted by then does not reach the core."""

    is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


async def _prompt_ids(model: ServedModel, request: AnyRequest, vocab_size: int) -> list[list[int]]:
    """One list per prompt: those that came along when they can be trusted, else tokenized here."""
    prompts = prompt_count(request.prompt) if isinstance(request, CompletionRequest) else 1
    trusted = trusted_ids(request, model.tokenizer.hash, prompts, vocab_size)
    if trusted is not None:
        return trusted
    return await model.threads.prompt_ids(request)


async def _echoes(model: ServedModel, request: AnyRequest, prompts: list[list[int]]) -> list[Echo] | None:
    """The prompts as completions repeat them, when they are to."""
    if not isinstance(request, CompletionRequest) or not request.echo:
        return None
    wants_starts = request.logprobs is not None
    return await model.threads.run(
        lambda: [_echo(model, text, ids, wants_starts) for text, ids in _texts(request, prompts)]
    )


def _texts(request: CompletionRequest, prompts: list[list[int]]) -> list[tuple[str | None, list[int]]]:
    """Each prompt's own text, None where it was given as ids."""
    if isinstance(request.prompt, str):
        return [(request.prompt, prompts[0])]
    texts = [item if isinstance(item, str) else None for item in request.prompt]
    return list(zip(texts if len(prompts) > 1 else texts[:1], prompts, strict=True))


def _echo(model: ServedModel, text: str | None, ids: list[int], wants_starts: bool) -> Echo:
    starts = []
    if wants_starts:
        decoder, position = model.tokenizer.decode_stream([]), 0
        for token_id in ids:
            starts.append(position)
            position += len(decoder.step(token_id))
    return Echo(model.tokenizer.decode(ids) if text is None else text, ids, starts)


def _share(exchange: Exchange, request: AnyRequest) -> Share:
    headers = exchange.request.headers
    return Share(
        tenant=exchange.tenant or "",
        service_class=service_class(request, headers.get(SERVICE_TIER_HEADER)),
        cache_salt=cache_salt(exchange.tenant, request.cache_salt),
        queue_timeout_s=timeout_s(QUEUE_TIMEOUT_HEADER, headers.get(QUEUE_TIMEOUT_HEADER)),
        timeout_s=timeout_s(REQUEST_TIMEOUT_HEADER, headers.get(REQUEST_TIMEOUT_HEADER)),
    )


class Generation:
    """One admitted request."""

    def __init__(
        self,
        state: EngineState,
        exchange: Exchange,
        parsed: Parsed[ChatRequest] | Parsed[CompletionRequest],
        model: ServedModel,
        choices: Sequence[Choice],
        echoes: Sequence[Echo] | None,
    ) -> None:
        request: AnyRequest = parsed.request
        self._state = state
        self._exchange = exchange
        self._request = request
        self._choices = choices
        self._share = _share(exchange, request)
        self._ignored = parsed.ignored_header
        self._output = RequestOutput(len(choices), whole=not request.stream, on_end=self._on_end)
        self._outputs = [self._choice_output(model, i, choice) for i, choice in enumerate(choices)]
        self._encoder = self._make_encoder(model, echoes)
        self._handles: list[int] = []
        self._is_settled = False

    async def run(self) -> None:
        sequences = [(choice.prompt_ids, choice.sampling) for choice in self._choices]
        self._exchange.stage = "queue"
        try:
            self._handles = self._state.core.submit(
                self._exchange.request_id, sequences, self._outputs, self._share
            )
            self._exchange.tally = self._tally()
            await (self._stream() if self._request.stream else self._respond())
        finally:
            self._close()

    def abort(self) -> None:
        """Somebody asked for its end, by its request's id. The core hears of it now: this request's own
        task may be waiting for a client that does not read."""
        self._state.core.release(self._handles)
        self._output.fail(RequestAborted("The request was aborted."))

    def _on_end(self) -> None:
        """What the core does not see is held to its stall deadline as well: a client that does not read
        the end of its answer."""
        self._exchange.end_within(self._state.config.stall_deadline_s)

    # -- answering --------------------------------------------------------------------------------

    async def _stream(self) -> None:
        exchange, output, responder = self._exchange, self._output, self._exchange.responder
        events, core = self._encoder.events, self._state.core
        await exchange.start_stream(self._headers())
        while not output.is_done:
            deltas = await output.take()
            core.resume(self._handles)
            data = b"".join([events(delta) for delta in deltas])
            if output.is_done:
                data += self._ending()
            await responder.write(data)
        exchange.is_served = True
        await responder.finish()

    def _ending(self) -> bytes:
        self._settle()
        usage = self._encoder.usage_event(self._usage()) if self._request.include_usage else b""
        return usage + sse.DONE + sse.closing_comment(self._exchange.closing())

    async def _respond(self) -> None:
        deltas: list[Delta] = sorted(await self._output.take(), key=lambda delta: delta.index)
        self._settle()
        body = self._encoder.whole(deltas, self._usage())
        closing = sse.encode_closing(self._exchange.closing()).decode()
        await self._exchange.send(body, headers={**self._headers(), sse.CLOSING_HEADER: closing})

    def _headers(self) -> dict[str, str]:
        return {IGNORED_FIELDS_HEADER: self._ignored} if self._ignored else {}

    # -- accounts ---------------------------------------------------------------------------------

    def _close(self) -> None:
        if not self._is_settled:
            self._exchange.stage = min((output.stage for output in self._outputs), key=_STAGES.index)
            self._exchange.fate = self._exchange.fate or self._output.error
            self._settle()
        self._state.core.release(self._handles)

    def _settle(self) -> None:
        """Take stock, once: the tally, the stages, the metrics."""
        assert not self._is_settled
        self._is_settled = True
        exchange, metrics, now = self._exchange, self._state.metrics, self._state.clock.monotonic()
        exchange.tally = tally = self._tally()
        timing = tally.timing
        for stage, seconds in (
            ("queue", timing.queue_s),
            ("prefill", timing.prefill_s),
            ("decode", timing.decode_s),
            ("preempted", timing.preempted_s),
            ("stalled", timing.stalled_s),
        ):
            if seconds:
                exchange.stages.record(stage, seconds)
        if not self._handles:
            return
        metrics.prompt_tokens.inc(tally.prompt_tokens)
        first_token_at = [
            output.first_token_at for output in self._outputs if output.first_token_at is not None
        ]
        if first_token_at:
            metrics.ttft_s.observe(min(first_token_at) - exchange.started_at)
            metrics.queue_s.observe(timing.queue_s)
        for output in self._outputs:
            if output.finish_reason is not None and output.completion_tokens > 1:
                metrics.tpot_s.observe(output.timing(now).decode_s / (output.completion_tokens - 1))

    def _tally(self) -> Tally:
        now = self._state.clock.monotonic()
        timings = [output.timing(now) for output in self._outputs]
        return Tally(
            model=self._request.model,
            streams=bool(self._request.stream),
            choices=len(self._choices),
            prompt_tokens=sum(len(choice.prompt_ids) for choice in self._firsts()),
            completion_tokens=sum(output.completion_tokens for output in self._outputs),
            cached_tokens=sum(output.cached_len for output in self._outputs[:: self._request.n or 1]),
            timing=Timing(
                queue_s=max(timing.queue_s for timing in timings),
                prefill_s=max(timing.prefill_s for timing in timings),
                decode_s=max(timing.decode_s for timing in timings),
                preempted_s=max(timing.preempted_s for timing in timings),
                preemptions=sum(timing.preemptions for timing in timings),
                stalled_s=max(timing.stalled_s for timing in timings),
            ),
        )

    def _firsts(self) -> Sequence[Choice]:
        """The first choice of each prompt: a prompt counts once, however many choices it has."""
        return self._choices[:: self._request.n or 1]

    def _usage(self) -> Usage:
        tally = self._exchange.tally
        assert tally is not None
        return Usage(
            tally.prompt_tokens,
            tally.completion_tokens,
            tally.prompt_tokens + tally.completion_tokens,
            PromptTokensDetails(tally.cached_tokens),
        )

    # -- making -----------------------------------------------------------------------------------

    def _choice_output(self, model: ServedModel, index: int, choice: Choice) -> ChoiceOutput:
        request = self._request
        decoder = model.tokenizer.decode_stream(choice.prompt_ids)
        return ChoiceOutput(
            index,
            self._output,
            Detokenizer(decoder, request.stop_strings, choice.sampling.min_tokens),
            stop_token_ids=stop_ids(request, model.eos_ids),
            keeps_entries=bool(request.return_token_ids) or choice.sampling.logprobs is not None,
            discards=request.output_tokens_max == 0,
            submitted_at=self._state.clock.monotonic(),
        )

    def _make_encoder(self, model: ServedModel, echoes: Sequence[Echo] | None) -> AnswerEncoder:
        request = self._request
        is_chat = isinstance(request, ChatRequest)
        heading = Heading(
            id=("chatcmpl-" if is_chat else "cmpl-") + secrets.token_hex(12),
            created=int(self._state.clock.wall()),
            model=request.model,
            system_fingerprint=self._state.fingerprint(),
            sends_usage=request.include_usage,
            sends_token_ids=bool(request.return_token_ids),
            logprobs=logprobs_asked(request),
        )
        if is_chat:
            return ChatEncoder(heading, model.tokenizer, self._choices[0].prompt_ids)
        return CompletionEncoder(
            heading,
            model.tokenizer,
            self._outputs,
            [choice.prompt_ids for choice in self._choices],
            [echoes[choice.prompt_index] if echoes else None for choice in self._choices],
        )


_STAGES = ("queue", "prefill", "decode", "stalled")
"""In order: a request is where the choice is that is furthest behind."""
