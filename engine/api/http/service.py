"""One request in, one answer out: every error becomes an answer here, and only here.

Handlers are cancel-safe: the server cancels this task when the client leaves. What a handler holds, it
releases in its own `finally`; the end is recorded here.
"""

from __future__ import annotations

import asyncio

from engine.api.answer.exchange import EngineExchange, House
from engine.api.ask.engine_state import EngineState
from engine.api.http.handlers import OPERATORS_PATHS, find_route
from shared.process import logs
from shared.wire.errors import ApiError, InternalError, RouteNotFound
from shared.wire.http import ClientGone, HttpRequest, Responder
from shared.wire.paths import no_such_path

log = logs.get(__name__)


class Service:
    """The handler of a listener's requests."""

    def __init__(self, state: EngineState, *, is_for_operators: bool = False) -> None:
        """`is_for_operators`: only probes and metrics are answered."""
        self._state = state
        self._is_for_operators = is_for_operators

    async def handle(self, request: HttpRequest, responder: Responder) -> None:
        state = self._state
        tokenizer_hash = None if state.model is None else state.model.tokenizer.hash
        house = House(tokenizer_hash, state.load, state.clock, state.tracing)
        exchange = EngineExchange(request, responder, house)
        try:
            await self._answer(exchange)
        except ClientGone:
            exchange.client_left()
        except asyncio.CancelledError:
            exchange.client_left()
            raise
        finally:
            total_s = exchange.complete()
            if exchange.is_generation:
                state.metrics.requests.inc(exchange.end_reason)
                state.metrics.e2e_s.observe(total_s, exemplar=exchange.exemplar(total_s))

    async def _answer(self, exchange: EngineExchange) -> None:
        try:
            exchange.check_tenant()
            path = exchange.request.path
            if self._is_for_operators and path not in OPERATORS_PATHS:
                raise RouteNotFound(no_such_path(path, OPERATORS_PATHS.__contains__))
            route = find_route(exchange.request.method, path)
            exchange.endpoint = route.name
            await route.run(self._state, exchange)
        except ApiError as error:
            await exchange.send_error(error)
        except ClientGone:
            raise
        except Exception as error:
            log.exception("request.failed")
            detail = type(error).__name__
            await exchange.send_error(
                InternalError("The server had an error while processing your request.", detail=detail)
            )
