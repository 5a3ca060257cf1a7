"""The sending of a request: the choice of a replica, and of another when one fails.

Rules:

1. A request is sent again only until its answer begins, with a stream's first event (which some APIs send
   when a core admits the request, before there is a token), or with what is held of
   any other answer: its client has been sent nothing until then. It goes to a replica that was not asked
   before, after the stream at the one before was reset, so that never two work on it at a time. What
   `relay.http1` sends once more on a new connection (where a kept one had closed, its rule 5) has reached
   nobody before; where that is not sure and the second is lost as well, no third is sent.
2. After a replica that was sent nothing, or had begun nothing of it (no connection, not ready; what a core
   held that hangs is not ready either, unless it had begun), every other may be asked. After one that may
   have worked on it (its stream broke, it answered 5xx, its queue was full), `REPEATS_MAX` others are asked,
   within the budget (`routing.retries`): neither an overload nor a request that breaks engines is to be
   multiplied by the number of replicas. After one that would not take it from any gateway (`FINAL`), none is.
3. An error that reports tokens is final: to compute them again would cost more than was reserved.
4. Only the replica that answers is charged for. Where none of the model's does, and one broke off after it
   was sent the request, nobody knows what it computed, and the reservation is charged, once.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from types import TracebackType
from typing import Final, Self

from msgspec import Struct, field

from gateway.client.deadlines import Watch
from gateway.config.whole import ModelConfig
from gateway.endpoints.dialect import Dialect
from gateway.relay.stream import LATE, Opened, Progress, open_answer
from gateway.relay.upstream import Outbound, Upstream
from gateway.request.exchange import Exchange
from gateway.request.record import RETRIES, observe_attempt
from gateway.routing.health import Outcome
from gateway.routing.policy import Affinity, RouteReason
from gateway.routing.replicas import Placement, Replica, Replicas
from gateway.routing.retries import RetryBudget
from shared.process.clock import Clock
from shared.wire import engine_words
from shared.wire.errors import (
    ApiError,
    ConnectTimeout,
    EngineFailed,
    FirstTokenTimeout,
    InterTokenTimeout,
    NotReady,
    Overloaded,
    PathNotServed,
    UpstreamDenied,
    UpstreamFailed,
    UpstreamLost,
    UpstreamLostTwice,
    UpstreamRefused,
    UpstreamUnreachable,
    forget_frames,
)
from shared.wire.ids import ReplicaId
from shared.wire.load_report import LOAD_HEADER, parse_load

REPEATS_MAX: Final = 1
"""The number of other replicas that are asked after one that was sent the request."""
LOOK_S: Final = 0.25
"""The time between two looks for silent replicas, in seconds."""
UNSENT: Final = (ConnectTimeout, UpstreamUnreachable, NotReady)
"""The failures of a replica that was sent nothing, or had begun nothing of it."""
REPEATED: Final = (*UNSENT, Overloaded, EngineFailed, UpstreamFailed)
"""The failures of one replica after which another may be asked."""
FINAL: Final = (UpstreamRefused, UpstreamLostTwice)
"""Those of them after which none is: another would not take it either, or it has broken two already."""
TOLD: Final = (UpstreamRefused, UpstreamDenied)
"""The failures that no request causes, and that operators alone can mend."""
NOT_THERE: Final = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)
"""The statuses by which an engine says that it has no such path."""
OUTCOMES: Final[Mapping[type[BaseException], Outcome]] = {
    ConnectTimeout: Outcome.UNREACHABLE,
    UpstreamUnreachable: Outcome.UNREACHABLE,
    NotReady: Outcome.UNREACHABLE,
    UpstreamLost: Outcome.LOST,
    UpstreamLostTwice: Outcome.LOST,
    UpstreamFailed: Outcome.FAILED,
    UpstreamDenied: Outcome.FAILED,
    UpstreamRefused: Outcome.REFUSED,
    EngineFailed: Outcome.FAILED,
    FirstTokenTimeout: Outcome.LATE,
    InterTokenTimeout: Outcome.STALLED,
}
"""The errors that count as a failure of the replica. All others are neutral."""
NOBODY_RETRY_S: Final = 1.0
"""The `Retry-After` of a request whose model has no member that is ready, in seconds."""


class Prepared(Struct, frozen=True):
    """A request that may be dispatched."""

    model: ModelConfig
    outbound: Outbound
    affinity: Affinity
    """Where the prompt may be cached."""
    dialect: Dialect
    is_fallback: bool = False
    """True if the caller asked for another model, which could not answer."""
    is_optional: bool = False
    """True if engines of other makes may lack its path."""


class Dispatched(Struct, frozen=True):
    """A request that a replica has begun to answer."""

    model: ModelConfig
    placement: Placement
    opened: Opened


class Attempt:
    """`with Attempt() as attempt:` around the awaits of one attempt, which others may end: `give_up` makes it
    raise UpstreamLost."""

    __slots__ = ("_cancellations", "_given_up", "_task")

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._given_up = False
        self._cancellations = 0

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancellations = task, task.cancelling()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        assert task is not None
        if self._given_up and task.uncancel() <= self._cancellations and kind is asyncio.CancelledError:
            raise UpstreamLost("The engine answered nothing.", detail=engine_words.OTHERS_DO) from None

    def give_up(self) -> None:
        """End the attempt. Later calls, and calls after its end, change nothing."""
        if self._task is not None and not self._given_up:
            self._given_up = True
            self._task.cancel()


class Sending(Struct, eq=False):
    """The repetitions of one request."""

    budget: RetryBudget
    tenant: str
    tried: set[ReplicaId] = field(default_factory=set)
    repeats: int = 0
    places: int = 0
    """The places that it has in the budget: as many as repetitions, or one more for the next."""

    def may_repeat(self) -> bool:
        """Take a place for a repetition. Returns False where the rules or the budget allow none."""
        if self.places == self.repeats:
            if self.repeats >= REPEATS_MAX:
                return False
            if not self.budget.take(self.tenant):
                RETRIES.inc("refused")
                return False
            self.places += 1
        return True

    def repeat(self) -> bool:
        """Note a repetition, if there may be one."""
        may = self.may_repeat()
        self.repeats += may
        return may

    def give_back(self) -> None:
        for _ in range(self.places):
            self.budget.give_back(self.tenant)


class Dispatcher:
    """The sending of requests to replicas."""

    def __init__(self, replicas: Replicas, upstream: Upstream) -> None:
        self._replicas: Final = replicas
        self._upstream: Final = upstream
        self._budgets: Final = defaultdict[str, RetryBudget](RetryBudget)

    async def send(self, exchange: Exchange, prepared: Prepared) -> Dispatched:
        """Dispatch the request to a replica, and to another where the rules allow it. `end` must follow, and
        the caller closes the answer. Raises ApiError."""
        exchange.mark(("route", exchange.clock.monotonic()))
        budget = self._budgets[prepared.model.name]
        budget.active += 1
        sending = Sending(budget, exchange.record.tenant or "")
        failure: ApiError | None = None
        try:
            while True:
                place = self._replicas.place(prepared.model.name, prepared.affinity, sending.tried)
                if place is None:
                    raise failure or _nobody()
                exchange.record.placed(RouteReason.FALLBACK if prepared.is_fallback else place.route)
                if failure is not None:
                    RETRIES.inc("unsent" if isinstance(failure, UNSENT) else "repeated")
                try:
                    return await self._answered(exchange, prepared, place, sending)
                except REPEATED as error:
                    forget_frames(error)  # some refer to the error, and all to the request
                    failure = error
                    sending.tried.add(place.replica.id)
                    exchange.record.attempt_failed(place.replica.id, error, exchange.stages)
                    self._replicas.release(place, outcome_of(error, exchange.watch))
                    if isinstance(error, TOLD):
                        self._replicas.refused(place.replica, error)
                    if not self._goes_elsewhere(exchange, prepared, sending, error):
                        raise
                except BaseException as error:
                    self._replicas.release(place, outcome_of(error, exchange.watch))
                    raise
        except BaseException:
            budget.active -= 1
            raise
        finally:
            sending.give_back()
            del failure  # its traceback refers to this frame, a cycle that would keep the body

    def begins_anew(self, exchange: Exchange, prepared: Prepared) -> bool:
        """Make the progress ready for another model, after all that could answer for this one have failed.
        Returns False where an answer reported tokens: they are not to be computed twice."""
        progress = exchange.progress
        if _tokens_of(progress):
            return False
        is_lost = progress.dispatched and not progress.refused
        exchange.progress = progress.anew(prepared.dialect, lost=is_lost)
        return True

    def told(self, dispatched: Dispatched) -> None:
        """Note that an answer which had opened before has its first token."""
        self._replicas.told(dispatched.placement)

    def end(self, exchange: Exchange, dispatched: Dispatched, error: BaseException | None) -> None:
        """Note the end of a request, and the error that ended it."""
        self._budgets[dispatched.model.name].active -= 1
        if (closing := exchange.progress.closing) is not None and closing.load:
            self._replicas.observe(dispatched.placement.replica, closing.load)
        if dispatched.placement.history_len:
            exchange.record.computed_anew(
                dispatched.placement.history_len, self._replicas.lost_home(dispatched.placement), closing
            )
        self._replicas.release(dispatched.placement, outcome_of(error, exchange.watch))

    def _goes_elsewhere(
        self, exchange: Exchange, prepared: Prepared, sending: Sending, failure: ApiError
    ) -> bool:
        """Whether another replica may be asked after a failure (rule 2): not after an error that reports
        tokens (rule 3). Makes the progress ready for another replica."""
        progress, is_unsent = exchange.progress, isinstance(failure, UNSENT)
        if is_unsent and not progress.refused:
            progress.dispatched = False
        if _tokens_of(progress) or isinstance(failure, FINAL) or not (is_unsent or sending.repeat()):
            return False
        is_lost = progress.dispatched and not progress.refused
        exchange.progress = progress.anew(prepared.dialect, lost=is_lost)
        exchange.mark(("route", exchange.clock.monotonic()))
        exchange.watch.relax()
        return True

    def _answered(
        self, exchange: Exchange, prepared: Prepared, place: Placement, sending: Sending
    ) -> Awaitable[Dispatched]:
        """Send the request to one replica, and wait for the beginning of its answer."""
        exchange.mark(("connect", exchange.clock.monotonic()))
        exchange.record.replica = place.replica.id
        if not exchange.streams:
            return self._begin(exchange, prepared, place, sending)
        exchange.watch.expect(exchange.timeouts.first_token_s, FirstTokenTimeout, LATE)
        return self._begin_stream(exchange, prepared, place, sending)

    async def _begin_stream(
        self, exchange: Exchange, prepared: Prepared, place: Placement, sending: Sending
    ) -> Dispatched:
        """Send a stream, and wait for its beginning. It is given up when its replica is found silent."""

        def on_late() -> None:
            if sending.may_repeat():
                attempt.give_up()

        with Attempt() as attempt:
            return await self._begin(exchange, prepared, place, sending, on_late)

    async def _begin(
        self,
        exchange: Exchange,
        prepared: Prepared,
        place: Placement,
        sending: Sending,
        on_late: Callable[[], None] | None = None,
    ) -> Dispatched:
        replica, request, progress = place.replica, prepared.outbound, exchange.progress
        progress.report.counted = partial(self._replicas.counted, place)

        def connected() -> None:
            progress.dispatched = True
            exchange.mark(("wait", exchange.clock.monotonic()))
            if on_late is not None:
                self._replicas.awaits(place, prepared.model.name, on_late)

        answer = await self._upstream.send(
            replica.protocol,
            replica.url,
            request,
            exchange.timeouts.connect_s,
            connected,
            progress.report,
            is_repeated=sending.repeats > 0,
        )
        observe_attempt(replica.id)
        if (load := parse_load(answer.headers.get(LOAD_HEADER))) is not None:
            self._replicas.observe(replica, load)
            self._replicas.counted(place)  # the engine's own count has it
        try:
            knows_tenant = answer.tokenizer is not None and request.names_tenant
            progress.blanks_cached = not (knows_tenant or request.is_salted)
            opened = await open_answer(
                answer,
                progress,
                prepared.dialect,
                exchange.watch,
                exchange.timeouts.inter_token_s,
                streams=exchange.streams,
                hides_usage=request.asks_for_usage,
            )
        except BaseException as error:
            await answer.aclose()
            if prepared.is_optional and isinstance(error, UpstreamRefused) and answer.status in NOT_THERE:
                raise PathNotServed(f"The engine of this model has no {request.path}.") from None
            raise
        self._replicas.began(place, is_opening=opened.is_opening)
        return Dispatched(prepared.model, place, opened)


async def watch_replicas(replicas: Replicas, upstream: Upstream, clock: Clock) -> None:
    """Look for replicas that are silent, until cancelled."""

    def is_mute(replica: Replica) -> bool:
        return upstream.is_mute(replica.protocol, replica.url)

    while True:
        await clock.sleep(LOOK_S)
        replicas.look(is_mute)


def _nobody() -> NotReady:
    return NotReady("No engine of this model is ready.", retry_after_s=NOBODY_RETRY_S)


def _tokens_of(progress: Progress) -> int:
    """The tokens that the engine reports as computed; 0 when it reports nothing."""
    closing = progress.closing
    return 0 if closing is None else closing.prompt_tokens + closing.completion_tokens


def outcome_of(error: BaseException | None, watch: Watch) -> Outcome:
    """The outcome for the replica of a dispatch that ended with `error`, or without one when it is None."""
    if error is None:
        return Outcome.WORKED
    cause = watch.reason if isinstance(error, asyncio.CancelledError) else error
    return Outcome.NEUTRAL if cause is None else OUTCOMES.get(type(cause), Outcome.NEUTRAL)
