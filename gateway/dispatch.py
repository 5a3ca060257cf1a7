"""The sending of a request: the choice of a replica, and of another when one fails.

Rules:

1. Nothing is dispatched twice, except to another replica when no connection was had to the first, when that
   one refused at its door (503), or when its connection broke before it answered. A 503 that reports tokens
   is final: to compute them again would cost more than was reserved. When the queue was full, or the request
   had been dispatched, no more than `ELSEWHERE_MAX` other replicas are asked: an overload is not to be
   multiplied by the number of replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from gateway.client.deadlines import Watch
from gateway.config import ModelConfig
from gateway.exchange import Exchange
from gateway.record import observe_attempt
from gateway.relay.upstream import Answer, Outbound, Upstream
from gateway.routing.health import Outcome
from gateway.routing.policy import Affinity
from gateway.routing.replicas import Placement, Replica, Replicas
from shared.errors import (
    ApiError,
    ConnectTimeout,
    EngineFailed,
    FirstTokenTimeout,
    InterTokenTimeout,
    NotReady,
    Overloaded,
    UpstreamFailed,
    UpstreamLost,
    UpstreamUnreachable,
    forget_frames,
)
from shared.ids import ReplicaId
from shared.sse import Closing

ELSEWHERE_MAX: Final = 1
"""The number of other replicas that are asked after one whose queue was full, or whose connection broke."""
ELSEWHERE: Final = (ConnectTimeout, UpstreamUnreachable, NotReady, Overloaded, UpstreamLost)
"""The failures of one replica after which another may be asked."""
OUTCOMES: Final[Mapping[type[BaseException], Outcome]] = {
    ConnectTimeout: Outcome.UNREACHABLE,
    UpstreamUnreachable: Outcome.UNREACHABLE,
    NotReady: Outcome.UNREACHABLE,
    UpstreamLost: Outcome.LOST,
    UpstreamFailed: Outcome.FAILED,
    EngineFailed: Outcome.FAILED,
    FirstTokenTimeout: Outcome.LATE,
    InterTokenTimeout: Outcome.STALLED,
}
"""The errors that count as a failure of the replica. All others are neutral."""


class Prepared(Struct, frozen=True):
    """A request that may be dispatched."""

    model: ModelConfig
    outbound: Outbound
    affinity: Affinity
    """Where the prompt may be cached."""


class Dispatched(Struct, frozen=True):
    """A request that a replica has begun to answer."""

    model: ModelConfig
    placement: Placement
    answer: Answer
    hides_usage: bool


class Dispatcher:
    """The sending of requests to replicas."""

    def __init__(self, replicas: Replicas, upstream: Upstream) -> None:
        self._replicas: Final = replicas
        self._upstream: Final = upstream

    async def send(self, exchange: Exchange, prepared: Prepared) -> Dispatched:
        """Dispatch the request to a replica, and to another where rule 1 allows it. The caller gives the
        place back, and closes the answer. Raises ApiError."""
        exchange.stages.enter("route")
        failure: ApiError | None = None
        tried: set[ReplicaId] = set()
        elsewhere = 0
        try:
            while True:
                place = None
                if elsewhere <= ELSEWHERE_MAX:
                    place = self._replicas.place(prepared.model.name, prepared.affinity, tried)
                if place is None:
                    raise failure or UpstreamUnreachable("No engine serves this model.")
                exchange.record.placed(place.route)
                try:
                    answer = await self._connect(exchange, place.replica, prepared.outbound)
                    return Dispatched(prepared.model, place, answer, prepared.outbound.asks_for_usage)
                except ELSEWHERE as error:
                    forget_frames(error)  # some refer to the error, and all to the request
                    failure = error
                    tried.add(place.replica.id)
                    elsewhere += isinstance(error, Overloaded | UpstreamLost)
                    exchange.progress.begin_anew(lost=isinstance(error, UpstreamLost))
                    self._replicas.release(place, outcome_of(error, exchange.watch))
                    observe_attempt(place.replica.id, error.code)
                    exchange.stages.enter("route")
                except BaseException as error:
                    self._replicas.release(place, outcome_of(error, exchange.watch))
                    raise
        finally:
            del failure  # its traceback refers to this frame, a cycle that would keep the body

    async def _connect(self, exchange: Exchange, replica: Replica, request: Outbound) -> Answer:
        exchange.stages.enter("connect")
        exchange.record.replica = replica.id
        if exchange.streams:
            within_s = exchange.timeouts.first_token_s
            exchange.watch.expect(within_s, FirstTokenTimeout, "The engine produced no token in time.")

        def connected() -> None:
            exchange.progress.dispatched = True
            exchange.stages.enter("wait")

        answer = await self._upstream.send(
            replica.protocol,
            replica.url,
            request,
            exchange.timeouts.connect_s,
            connected,
            exchange.progress.report,
        )
        observe_attempt(replica.id, "connected")
        if answer.status == NotReady.status and not _tokens_of(answer.closing):
            # a refusal; over HTTP/2 it may come as a GOAWAY instead, which is NotReady as well
            try:
                raise await answer.error()
            finally:
                await answer.aclose()
        return answer


def _tokens_of(closing: Closing | None) -> int:
    """The tokens that the engine reports as computed; 0 when it reports nothing."""
    return 0 if closing is None else closing.prompt_tokens + closing.completion_tokens


def outcome_of(error: BaseException | None, watch: Watch) -> Outcome:
    """The outcome for the replica of a dispatch that ended with `error`, or without one when it is None."""
    if error is None:
        return Outcome.WORKED
    cause = watch.reason if isinstance(error, asyncio.CancelledError) else error
    return Outcome.NEUTRAL if cause is None else OUTCOMES.get(type(cause), Outcome.NEUTRAL)
