"""The APIs that generate. The way of one request is:

    read -> validate -> tokenize -> admit -> submit -> (stream | collect) -> settle

A `Generation` exists from the moment its sequences are in the core's queue. Whatever its end (complete, an
error, a deadline, a client that leaves at any await), `_end` runs once, tells the core to end exactly the
sequences that have not ended, and hears what it had under way for them.

Rules

1. No work before its reservation: the bytes of a body, what is made of them, and what the answer may hold are
   reserved with the tenant before they are held. What a request holds of its body is freed once it is
   submitted.
2. Deadlines count from the request's arrival, on this process's clock: they hold whether or not the core
   steps.
3. Requests begin and end in turns, one in each turn of the loop, of one tenant after another.
4. A stream of an API that opens early begins when the core admits the request, with events that tell nothing
   of the answer. Of any other, nothing is written before the first token. Silence is broken by keep-alives
   where the API or an operator wants them: a timer for each stream, that no event moves, looks whether any
   was written since it looked last. A client that does not read gets none.
5. A prompt counts as computed once one of its choices has begun. What a request has cost is reported at its
   end, whatever that is.
6. A request of thousands of sequences takes milliseconds wherever all of them are looked through. Other
   requests run between any two of these steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Final

from msgspec import UNSET, UnsetType

from engine.api.answer.detokenizer import Detokenizer, PartsDetokenizer
from engine.api.answer.encoder import AnswerEncoder
from engine.api.answer.exchange import SLOW_S, WRITE_LEN, EngineExchange
from engine.api.answer.outputs import ChoiceOutput, Delta, RequestOutput
from engine.api.answer.stop_strings import StopStrings
from engine.api.answer.text_room import TextRoom
from engine.api.ask.admission import text_len
from engine.api.ask.asking import CheckedRequest, Deadlines, ask
from engine.api.ask.engine_state import EngineState
from engine.api.ask.model import ServedModel
from engine.api.core.client import Share
from engine.api.core.parts import Branches, Parts
from engine.api.told.attribution import milliseconds
from engine.api.told.vllm_metrics import EndedSequence
from shared.apis.generation import CompletionTokensDetails, GenerationRequest, PromptTokensDetails, Usage
from shared.apis.holding import Holding
from shared.process.clock import Timer
from shared.process.shield import shielded
from shared.wire import sse
from shared.wire.causes import Cause, CauseCode
from shared.wire.errors import ApiError, RequestAborted

CROWD: Final = 256
"""The sequences of a request that are looked through in a millisecond. Of more than that, others run in
between."""
STREAM_COPIES: Final = 4
"""The copies of a stream's text where its end tells it again: as it came, twice in an item that is done, and
in an event."""
UNDER_WAY_S: Final = 0.2
"""The time in which the core is heard out about the sequences of a request that ended before them, in
seconds: less than the time for which a gateway waits for the report (`gateway.request.pipeline.REPORT_S`)."""


async def generate(state: EngineState, exchange: EngineExchange, kind: type[GenerationRequest]) -> None:
    """Answer a request of one of the APIs that generate."""
    exchange.is_generation = True
    model, _ = state.ready_model()
    with state.working(), Holding(state.memory, exchange.tenant) as holding:
        deadlines = Deadlines.of(exchange, state.clock)
        arrival = Arrival()
        with state.listed(exchange.request_id, exchange.tenant, arrival):
            asked = await deadlines.bounded(ask(state, exchange, kind, holding))
            if len(asked.choices) > CROWD:
                await asyncio.sleep(0)
        if arrival.is_aborted:
            raise RequestAborted("The request was aborted.")
        exchange.id_header = asked.api.id_header
        holding.hold(asked.answer_len)
        exchange.stage = "queue"
        prompt_lens = [len(choice.prompt_ids) for choice in asked.choices]
        if asked.branches is not None:
            prompt_lens = asked.branches.lens(0, 1)
        state.core.check_room(exchange.tenant, len(prompt_lens), sum(prompt_lens))
        generation = Generation(state, exchange, asked, model, deadlines, holding)
        del asked  # frees the prompts, which the core has once they are submitted
        with state.listed(exchange.request_id, exchange.tenant, generation):
            await generation.run()


class Arrival:
    """A request that is read and tokenized. If it is aborted meanwhile, it does not reach the core."""

    is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


class Generation:
    """A request whose sequences are in the core."""

    _is_open: bool
    """True once the events of a stream were written that come before any of its answer."""
    _is_silent = True
    """True if no event was written since the keep-alives' timer went off last."""
    _predicts: bool
    """True if the caller predicts its answers."""
    _shared_len: int
    """The tokens with which all prompts begin, where that is known."""
    _parts: Parts | None
    """Sends the prompts, where they begin alike."""
    _beats: Timer | None = None
    """The timer of keep-alives. None where the stream has none."""

    def __init__(
        self,
        state: EngineState,
        exchange: EngineExchange,
        asked: CheckedRequest,
        model: ServedModel,
        deadlines: Deadlines,
        holding: Holding,
    ) -> None:
        """`holding` holds the memory of the answer."""
        self._state = state
        self._exchange = exchange
        self._deadlines = deadlines
        self._streams = asked.streams
        self._api = asked.api
        self._is_open = not asked.api.opens_early
        self._n, self._share = asked.n, asked.share
        self._prompts, self._sampling = asked.prompts, asked.choices[0].sampling
        self._shared_len = 0 if asked.branches is None else asked.branches.shared_len
        self._grammar, self._grammar_kind = asked.form.grammar, asked.form.kind
        self._prediction, self._predicts = asked.prediction or b"", asked.prediction is not None
        reading = asked.form.reading
        self._reads = reading is not None
        """True if its answers have parts of several kinds."""
        self._reasons = reading is not None and reading.format.reasoning is not None
        """True if the model marks its reasoning."""
        self._prompt_lens = [len(choice.prompt_ids) for choice in asked.choices[:: asked.n]]
        lens = [len(choice.prompt_ids) for choice in asked.choices]
        self._bearer = lens.index(min(lens))
        """The choice whose first token has a deadline, that of the request: of those with the shortest prompt
        the first one, which begins before the others, as things stand."""
        self._tokens_max = [choice.sampling.max_tokens for choice in asked.choices]
        self._output = self._request_output(asked, holding)
        self._stops = StopStrings(asked.stop_strings) if asked.stop_strings else None
        self._no_text = Detokenizer(model.tokenizer.decode_stream([]))
        """The detokenizer of sequences of which nothing is sampled, however many."""
        self._outputs = [self._choice_output(asked, model, index) for index in range(len(asked.choices))]
        self._is_crowd = len(self._outputs) > CROWD
        self._parts = None if asked.branches is None else self._parts_of(asked.branches, asked.share)
        self._encoder = self._make_encoder(asked, model)
        if asked.api.failing is not None:
            exchange.failing = asked.api.failing(self._encoder)
        self._awaits_scores = asked.echoes is not None and asked.heading.logprobs is not None
        self._handles: list[int] = []
        self._is_settled = False

    async def run(self) -> None:
        submitted_at = self._exchange.stages.enter("handover")
        for output in self._outputs:
            output.submitted_at = submitted_at
        try:
            with self._deadlines.watch(self._expire, self._is_waiting):
                if self._is_crowd:
                    await self._let_others_run()
                self._submit()
                self._exchange.tally = sse.Closing(end_reason="")
                self._exchange.sequences = len(self._outputs)
                self._exchange.has_grammar = bool(self._grammar_kind)
                if not self._streams:
                    self._exchange.tell_load()
                await (self._stream() if self._streams else self._respond())
        finally:
            await self._end()

    async def _let_others_run(self) -> None:
        """Leave the loop to others for a turn. Raises the error that ended the request meanwhile, which is
        then not sent to the core."""
        await asyncio.sleep(0)
        if self._output.error is not None:
            raise self._output.error

    def _submit(self) -> None:
        first_token_s = self._deadlines.first_token_left_s
        if (parts := self._parts) is not None:
            self._handles = parts.handles
            parts.start(first_token_s)
            return
        prompts, self._prompts = self._prompts, []
        grammar, self._grammar = self._grammar, ""
        prediction, self._prediction = self._prediction, b""
        asked = self._exchange.request_id, prompts, self._sampling, self._outputs, self._share
        self._handles = self._state.core.submit(*asked, first_token_s, self._bearer, grammar, prediction)

    def abort(self) -> None:
        """End the request, as `DELETE /v1/requests/{id}` asks."""
        self._expire(RequestAborted("The request was aborted."))

    def _expire(self, error: ApiError) -> None:
        """End the request with `error`. The core is told at once, because the request's own task may
        be waiting for a client that does not read."""
        if not self._is_settled:
            self._state.core.abort(self._handles)
            self._output.fail(error)

    def _is_waiting(self) -> bool:
        return not self._output.has_begun

    def _on_end(self) -> None:
        """Hold a client that stops reading what is left of its answer to the stall deadline. The core
        cannot: the sequence has ended."""
        self._exchange.end_within(self._state.config.stall_deadline_s)

    # -- answering --------------------------------------------------------------------------------

    async def _stream(self) -> None:
        exchange, output, responder = self._exchange, self._output, self._exchange.responder
        held = list[Delta]()
        await exchange.start_stream()
        own_s = self._state.config.stream_keepalive_s
        if (keepalive_s := self._api.keepalive_s if own_s is None else own_s) is not None:
            self._beat(keepalive_s)
        is_first = True
        while not output.is_done:
            deltas = await output.take()
            if not deltas:
                await exchange.write(self._meanwhile())
                continue
            if is_first:
                self._lift_deadline()
                is_first = False
            exchange.answers()
            self._state.core.resume(self._handles)
            if self._awaits_scores:
                deltas, held = self._with_scores(held + deltas)
            pieces: list[bytes] = []
            size = 0
            for delta in deltas:
                for event in self._encoder.events(delta):
                    pieces.append(event)
                    size += len(event)
                    if size >= WRITE_LEN:
                        await exchange.write(b"".join(pieces))
                        await asyncio.sleep(0)
                        pieces, size = [], 0
            if output.is_done:
                if (turn := self._state.ends.ask(exchange.tenant)) is not None:
                    await exchange.write(b"".join(pieces))
                    await turn
                    pieces = []
                pieces.append(self._ending())
            if pieces:
                self._is_silent = False
                await exchange.write(b"".join(pieces))
        exchange.is_served = True
        await responder.finish()

    def _lift_deadline(self) -> None:
        """Lift the deadline of the first token, where a choice has one that is not its bearer."""
        if self._outputs[self._bearer].first_token_at is None:
            self._state.core.lift_deadline(self._handles[self._bearer])

    def _meanwhile(self) -> bytes:
        """The bytes that a stream is sent while there is no output: its opening, once, or a keep-alive.
        Before the opening that is a comment, which is no event."""
        if self._is_open:
            return self._api.keepalive
        if not self._output.has_begun:
            return sse.KEEPALIVE
        self._is_open, self._is_silent = True, False
        return self._encoder.opening(self._usage(self._tally(self._state.clock.monotonic())))

    def _beat(self, after_s: float) -> None:
        """Have a keep-alive written where nothing was since the last call, unless the client does not read
        what there was; and look again after as long."""
        if self._beats is not None and self._is_silent and self._output.is_awaited:
            self._output.stir()
        self._is_silent = True
        clock = self._state.clock
        self._beats = clock.call_at(clock.monotonic() + after_s, partial(self._beat, after_s))

    def _with_scores(self, deltas: list[Delta]) -> tuple[list[Delta], list[Delta]]:
        """The deltas that can be sent, and those that must wait because the log-probabilities of
        their prompt, which are sent first, have not come. The first choice of a prompt computes them
        for all of its choices."""
        can_be: list[Delta] = []
        cannot: list[Delta] = []
        for delta in deltas:
            scored = self._outputs[delta.index - delta.index % self._n]
            waits = scored.first_token_at is None and scored.finish_reason is None
            (cannot if waits else can_be).append(delta)
        return can_be, cannot

    def _ending(self) -> bytes:
        self._settle()
        return self._encoder.ending(self._usage(self._exchange.tally)) + self._exchange.closing_comment()

    async def _respond(self) -> None:
        deltas: list[Delta] = sorted(await self._output.take(), key=lambda delta: delta.index)
        if self._is_crowd:
            await asyncio.sleep(0)
        if (turn := self._state.ends.ask(self._exchange.tenant)) is not None:
            await turn
        self._settle()
        self._exchange.answers()
        closing = sse.encode_closing(self._exchange.closing()).decode()
        headers = {sse.CLOSING_HEADER: closing}
        if self._is_crowd:
            await asyncio.sleep(0)
        await self._write_whole(self._encoder.whole(deltas, self._usage(self._exchange.tally)), headers)

    async def _write_whole(self, pieces: Iterator[bytes], headers: Mapping[str, str]) -> None:
        """Send a small answer at once, with its length, and a large one in pieces as they are
        made."""
        exchange = self._exchange
        made: list[bytes] = []
        size, is_begun = 0, False
        for piece in pieces:
            made.append(piece)
            size += len(piece)
            if size < WRITE_LEN:
                continue
            if not is_begun:
                await exchange.start_body(headers)
                is_begun = True
            await exchange.write(b"".join(made))
            await asyncio.sleep(0)
            made, size = [], 0
        if not is_begun:
            await exchange.send(b"".join(made), headers=headers)
            return
        await exchange.write(b"".join(made))
        exchange.is_served = True
        await exchange.responder.finish()

    # -- accounts ---------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Settle, after the core was heard out about the sequences that have not ended, and forget them."""
        core, exchange, output = self._state.core, self._exchange, self._output
        if self._beats is not None:
            self._beats.cancel()
        if self._parts is not None:
            self._parts.close()
        try:
            if self._handles and not self._is_settled:
                exchange.fate = exchange.fate or output.error
                core.abort(self._handles)
                await shielded(output.wait_left_core(UNDER_WAY_S))
        finally:
            if not self._is_settled:
                self._settle()
            core.release(self._handles)
            output.close()

    def _settle(self) -> None:
        """Note what the request has cost, once: its tally, its stages, the metrics."""
        assert not self._is_settled
        self._is_settled = True
        exchange, metrics = self._exchange, self._state.metrics
        now = exchange.stages.enter("flush")
        exchange.stage = min((output.stage for output in self._outputs), key=_STAGES.index)
        exchange.tally = tally = self._tally(now)
        last = max(self._outputs, key=lambda output: output.timing(now).life_s)
        timing = last.timing(now)
        parts = {
            "stalled": timing.stalled_s,
            "preempted": timing.preempted_s,
            "queue": timing.queue_s,
            "prefill": timing.prefill_s,
            "decode": timing.decode_s,
        }
        exchange.stages.carve("handover", {stage: seconds for stage, seconds in parts.items() if seconds})
        if not self._handles:
            return
        exchange.causes += last.causes(now, shared=len(self._outputs) > 1)
        if self._state.core.silences and (silent_s := self._state.core.silent_s(last.submitted_at, now)):
            exchange.causes.append(Cause(code=CauseCode.CORE_SILENT, ms=milliseconds(silent_s)))
        self._settle_form(tally)
        metrics.prompt_tokens.inc(by=tally.prompt_tokens)
        metrics.count_uncharged(choice=self._prompt_tokens_again())
        request_s = now - exchange.started_at
        exemplar = exchange.exemplar(request_s)
        first_token_at = [
            output.first_token_at for output in self._outputs if output.first_token_at is not None
        ]
        first_token_s = min(first_token_at) - exchange.started_at if first_token_at else None
        if metrics.vllm is not None:
            ended = [self._ended(index, output, now) for index, output in enumerate(self._outputs)]
            metrics.vllm.on_end(ended, first_token_s, request_s, exemplar)
        if first_token_s is not None:
            metrics.ttft_s.observe(first_token_s, exemplar=exemplar)
        for output in self._outputs:
            metrics.queue_s.observe(output.timing(now).queue_s, exemplar=exemplar)
            if output.finish_reason is not None and output.completion_tokens > 1:
                gap_s = output.timing(now).decode_s / (output.completion_tokens - 1)
                metrics.tpot_s.observe(gap_s, exemplar=exemplar)

    def _settle_form(self, tally: sse.Closing) -> None:
        """Note what is not in every answer: reasoning, calls, and what its grammar took."""
        exchange, metrics = self._exchange, self._state.metrics
        if tally.reasoning_tokens or tally.calls:
            metrics.reasoning_tokens.inc(by=tally.reasoning_tokens)
            metrics.calls.inc(by=tally.calls)
        if not self._grammar_kind:
            return
        if tally.masks_ms >= SLOW_S * 1e3:
            exchange.causes.append(Cause(code=CauseCode.MASKS, ms=tally.masks_ms))
        metrics.grammar_requests.inc(self._grammar_kind)
        for output in self._outputs:
            metrics.masks_s.observe(output.grammar_s)

    def _ended(self, index: int, output: ChoiceOutput, now: float) -> EndedSequence:
        error = self._exchange.fate or self._output.error
        is_abort = error is None or isinstance(error, RequestAborted)
        ended = "stop" if output.finish_reason == "tool_calls" else output.finish_reason
        return EndedSequence(
            reason=ended or ("abort" if is_abort else "error"),
            prompt_len=self._shared_len + self._prompt_lens[index // self._n],
            tokens=output.completion_tokens,
            tokens_max=self._tokens_max[index],
            timing=output.timing(now),
        )

    def _tally(self, now: float) -> sse.Closing:
        """The costs of all sequences together; of the times, those of the one that ended last."""
        timings = [output.timing(now) for output in self._outputs]
        last = max(timings, key=lambda timing: timing.life_s)
        mispredicted = sum(output.mispredicted for output in self._outputs) if self._predicts else 0
        return sse.Closing(
            end_reason="",
            prompt_tokens=self._prompt_tokens(),
            completion_tokens=mispredicted + sum(output.completion_tokens for output in self._outputs),
            cached_tokens=self._cached_tokens(),
            host_tokens=sum(output.host_len for output in self._outputs[:: self._n]),
            disk_tokens=sum(output.disk_len for output in self._outputs[:: self._n]),
            reasoning_tokens=sum(output.reasoning_tokens for output in self._outputs) if self._reads else 0,
            calls=sum(output.calls for output in self._outputs) if self._reads else 0,
            drafted_tokens=sum(output.drafted for output in self._outputs),
            accepted_tokens=sum(output.accepted for output in self._outputs),
            accepted_prediction_tokens=(
                sum(output.predicted for output in self._outputs) if self._predicts else 0
            ),
            rejected_prediction_tokens=mispredicted,
            masks_ms=milliseconds(sum(output.grammar_s for output in self._outputs)),
            queue_ms=milliseconds(last.queue_s),
            prefill_ms=milliseconds(last.prefill_s),
            decode_ms=milliseconds(last.decode_s),
            preempted_ms=milliseconds(last.preempted_s),
            preemptions=sum(timing.preemptions for timing in timings),
            swaps=sum(timing.swaps for timing in timings),
            stalled_ms=milliseconds(last.stalled_s),
        )

    def _prompt_tokens(self) -> int:
        """The number of prompt tokens that count as computed. A prompt counts once, however many
        choices it has, and only when one of them has begun."""
        n = self._n
        begun = [output.has_begun for output in self._outputs]
        shared_len = self._shared_len if any(begun) else 0
        if n > 1:
            begun = [any(begun[first : first + n]) for first in range(0, len(begun), n)]
        return shared_len + sum(compress(self._prompt_lens, begun))

    def _cached_tokens(self) -> int:
        """The number of these tokens that were found in the prefix cache. Those with which all prompts begin
        count as the sequence had them that found the fewest: it computed the others for all."""
        shared_len, outputs = self._shared_len, self._outputs[:: self._n]
        if not shared_len:
            return sum(output.cached_len for output in outputs)
        lens = [output.cached_len for output in outputs if output.has_begun]
        behind = sum(max(0, length - shared_len) for length in lens)
        return min([shared_len, *lens]) + behind if lens else 0

    def _prompt_tokens_again(self) -> int:
        """The number of prompt tokens that sequences computed beside the one that is charged for them: those
        of a prompt with several choices, and those with which several prompts begin. All but the last of a
        prompt could have been found in the prefix cache."""
        if shared_len := self._shared_len:
            again = [max(0, shared_len - output.cached_len) for output in self._outputs if output.has_begun]
            return sum(again) - max(again, default=0)
        if self._n == 1:
            return 0
        lacking = [
            [
                length - 1 - output.cached_len
                for output in self._outputs[i * self._n : (i + 1) * self._n]
                if output.has_begun
            ]
            for i, length in enumerate(self._prompt_lens)
        ]
        return sum(sum(lens) - max(lens, default=0) for lens in lacking)

    def _usage(self, tally: sse.Closing | None) -> Usage:
        assert tally is not None
        return Usage(
            tally.prompt_tokens,
            tally.completion_tokens,
            tally.prompt_tokens + tally.completion_tokens,
            PromptTokensDetails(tally.cached_tokens),
            self._details(tally),
        )

    def _details(self, tally: sse.Closing) -> CompletionTokensDetails | UnsetType:
        """The parts of the completion's tokens, where it may have several."""
        if self._predicts:
            predicted = tally.accepted_prediction_tokens, tally.rejected_prediction_tokens
            return CompletionTokensDetails(tally.reasoning_tokens, *predicted)
        return CompletionTokensDetails(tally.reasoning_tokens) if self._reasons else UNSET

    # -- making -----------------------------------------------------------------------------------

    def _request_output(self, asked: CheckedRequest, holding: Holding) -> RequestOutput:
        room, copies = None, STREAM_COPIES if asked.streams else 1
        if asked.keeps_text:
            room = TextRoom(holding, asked.answer_len, text_len(asked.choices), copies)
        return RequestOutput(
            len(asked.choices),
            whole=not asked.streams,
            tells_begin=asked.streams and asked.api.opens_early,
            on_end=self._on_end,
            room=room,
        )

    def _choice_output(self, asked: CheckedRequest, model: ServedModel, index: int) -> ChoiceOutput:
        choice, core = asked.choices[index], self._state.core
        reading, min_tokens = asked.form.reading, choice.sampling.min_tokens
        if choice.sampling.vector_len or asked.branches is not None:
            detokenizer = self._no_text
        elif reading is None:
            decoder = model.tokenizer.decode_stream(choice.prompt_ids)
            detokenizer = Detokenizer(decoder, self._stops, min_tokens)
        else:
            decoder = model.tokenizer.decode_stream(choice.prompt_ids)
            detokenizer = PartsDetokenizer(decoder, reading.machine(), self._stops, min_tokens)
        return ChoiceOutput(
            index,
            self._output,
            detokenizer,
            stop_token_ids=asked.stop_ids,
            keeps_entries=asked.heading.sends_token_ids or asked.heading.logprobs is not None,
            tells_calls=reading is not None and reading.tells_calls,
            submitted_at=self._state.clock.monotonic(),
            steps=core.steps,
            prompt_len=self._shared_len + len(choice.prompt_ids),
            service_class=asked.share.service_class,
        )

    def _parts_of(self, branches: Branches, share: Share) -> Parts:
        core, config = self._state.core, self._state.config
        assert core.info is not None
        goes_ahead = config.prefix_cache and branches.shared_len >= core.info.page_size
        asked = core, self._exchange.request_id, branches, self._outputs, self._output, share
        parts = Parts(*asked, goes_ahead=goes_ahead)
        self._output.on_each = parts.ended
        return parts

    def _make_encoder(self, asked: CheckedRequest, model: ServedModel) -> AnswerEncoder:
        prompts = [choice.prompt_ids for choice in asked.choices] if asked.heading.sends_token_ids else []
        scored = [self._outputs[index - index % asked.n] for index in range(len(asked.choices))]
        echoes = [asked.echoes[choice.prompt_index] if asked.echoes else None for choice in asked.choices]
        answered = replace(asked.answered, scored=scored, prompts=prompts, echoes=echoes)
        return asked.api.encoder(asked.heading, model.tokenizer, answered)


_STAGES = ("queue", "prefill", "preempted", "decode", "stalled")
"""The stages of a sequence, in order. A request is in the stage of its sequence that is furthest behind."""
