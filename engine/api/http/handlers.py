"""The route table, and the handlers of all endpoints but those that generate (`generate.py`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeVar

import msgspec

from engine.api.answer.exchange import EngineExchange
from engine.api.answer.table import ANSWERS
from engine.api.ask.admission import Limits, out_of_vocab
from engine.api.ask.asking import read
from engine.api.ask.engine_state import EngineState
from engine.api.ask.model import ServedModel
from engine.api.http.generate import generate
from shared.apis.holding import Holding
from shared.apis.messages import CountTokensRequest, CountTokensResponse
from shared.apis.models import VERSION_HEADER, ModelInfo, ModelInfoList, ModelList
from shared.apis.prompt import ChatPrompt
from shared.apis.requests import AbortResponse
from shared.apis.responses.answer import InputTokens
from shared.apis.responses.request import InputTokensRequest, nothing_stored
from shared.apis.tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from shared.fairness.fair_threads import Slices
from shared.process.probes import METHODS, PROBES, answer_probe
from shared.text.prompts import prompt_slices, text_slices
from shared.wire.errors import InvalidRequest, MethodNotAllowed, RouteNotFound
from shared.wire.ids import RequestId
from shared.wire.paths import no_such_path

_encode = msgspec.json.Encoder().encode
T = TypeVar("T", bound=msgspec.Struct)

Handler = Callable[[EngineState, EngineExchange], Awaitable[None]]


class NamedHandler(Protocol):
    async def __call__(self, state: EngineState, exchange: EngineExchange, name: str) -> None: ...


# -- probes ---------------------------------------------------------------------------------------


async def probe(state: EngineState, exchange: EngineExchange) -> None:
    """Answer one of `PROBES`. The engine's port is inside the hop, so problems are told."""
    exchange.is_quiet = True
    status, body = answer_probe(exchange.endpoint, state.health, tells_problems=True)
    await exchange.send(body, status=status)


async def metrics(state: EngineState, exchange: EngineExchange) -> None:
    exchange.is_quiet = True
    told = state.metrics.exposition(exchange.request.headers.get("accept"))
    await exchange.send(told.body, content_type=told.content_type)


# -- the model ------------------------------------------------------------------------------------


async def list_models(state: EngineState, exchange: EngineExchange) -> None:
    exchange.speak()
    cards = [state.card()]
    is_anthropics = VERSION_HEADER in exchange.request.headers
    await exchange.send(_encode(ModelInfoList.of(cards) if is_anthropics else ModelList(data=cards)))


async def get_model(state: EngineState, exchange: EngineExchange, name: str) -> None:
    exchange.speak()
    state.check_name(name)
    card, is_anthropics = state.card(), VERSION_HEADER in exchange.request.headers
    await exchange.send(_encode(ModelInfo.of(card) if is_anthropics else card))


async def get_tokenizer(state: EngineState, exchange: EngineExchange) -> None:
    await exchange.send(state.loaded_model().bundle_json)


async def tokenize(state: EngineState, exchange: EngineExchange) -> None:
    model, limits = state.ready_model()
    with Holding(state.memory, exchange.tenant) as holding:
        parsed = await read(state, exchange, TokenizeRequest, holding)
        parsed.require_supported()
        request = parsed.request
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("Give either prompt or messages.", param="prompt")
        if request.messages is not None and request.add_special_tokens:
            message = "A chat has the special tokens that its template writes."
            raise InvalidRequest(message, param="add_special_tokens")
        with exchange.enter("tokenize"):
            answer = await state.threads.run(exchange.tenant, _tokenized(model, limits, request))
        await exchange.send(answer)


def _tokenized(model: ServedModel, limits: Limits, request: TokenizeRequest) -> Slices[bytes]:
    tokenizer = model.tokenizer
    if isinstance(chat := request.prompt_form, ChatPrompt):
        [ids] = yield from prompt_slices(tokenizer, chat, None)
    else:
        special = request.add_special_tokens is not False
        ids = yield from text_slices(
            tokenizer, request.prompt or "", None, "prompt", add_special_tokens=special
        )
    return _encode(TokenizeResponse(len(ids), limits.room.most, ids))


async def count_tokens(state: EngineState, exchange: EngineExchange) -> None:
    """Count the tokens of a conversation of Messages."""
    exchange.speak()
    await exchange.send(_encode(CountTokensResponse(await _counted(state, exchange, CountTokensRequest))))


async def input_tokens(state: EngineState, exchange: EngineExchange) -> None:
    """Count the tokens of what a response would be asked."""
    await exchange.send(_encode(InputTokens(await _counted(state, exchange, InputTokensRequest))))


async def _counted(
    state: EngineState, exchange: EngineExchange, kind: type[CountTokensRequest] | type[InputTokensRequest]
) -> int:
    model, _ = state.ready_model()
    with Holding(state.memory, exchange.tenant) as holding:
        parsed = await read(state, exchange, kind, holding)
        parsed.require_supported()
        with exchange.enter("tokenize"):
            counting = prompt_slices(model.tokenizer, parsed.request.prompt_form, None)
            [ids] = await state.threads.run(exchange.tenant, counting)
        return len(ids)


async def detokenize(state: EngineState, exchange: EngineExchange) -> None:
    model, limits = state.ready_model()
    with Holding(state.memory, exchange.tenant) as holding:
        parsed = await read(state, exchange, DetokenizeRequest, holding)
        parsed.require_supported()
        request = parsed.request

        def detokenized() -> bytes:
            if max(request.tokens, default=0) >= limits.vocab_size:
                raise out_of_vocab("tokens", limits.vocab_size)
            text = model.tokenizer.decode(request.tokens, skip_special_tokens=False)
            return _encode(DetokenizeResponse(text))

        with exchange.enter("detokenize"):
            answer = await state.threads.call(exchange.tenant, detokenized)
        await exchange.send(answer)


# -- requests -------------------------------------------------------------------------------------


async def abort_request(state: EngineState, exchange: EngineExchange, name: str) -> None:
    aborted = state.abort(RequestId(name), exchange.tenant)
    await exchange.send(_encode(AbortResponse(name, aborted)))


# -- routes ---------------------------------------------------------------------------------------

EXACT: Final[dict[str, dict[str, Handler]]] = {
    **{kind.path: {"POST": partial(generate, kind=kind)} for kind in ANSWERS},
    "/v1/models": {"GET": list_models},
    CountTokensRequest.path: {"POST": count_tokens},
    TokenizeRequest.path: {"POST": tokenize},
    DetokenizeRequest.path: {"POST": detokenize},
    InputTokensRequest.path: {"POST": input_tokens},
    "/penstock/tokenizer": {"GET": get_tokenizer},
    **{path: dict.fromkeys(METHODS, probe) for path in PROBES},
    "/metrics": {"GET": metrics},
}
OPERATORS_PATHS: Final = frozenset({*PROBES, "/metrics"})
"""The handlers of a listener for operators."""
NAMED: Final[dict[str, dict[str, NamedHandler]]] = {
    "/v1/models/": {"GET": get_model},
    "/v1/requests/": {"DELETE": abort_request},
}
"""Handlers by prefix. The rest of the path is a name, and may have slashes, as models' names may."""


@dataclass(frozen=True, slots=True)
class FoundRoute:
    name: str
    run: Handler


def find_route(method: str, path: str) -> FoundRoute:
    """The handler of a path and a method, and the route's name for the log. Raises RouteNotFound, NotFound
    and MethodNotAllowed."""
    if (exact := EXACT.get(path)) is not None:
        return FoundRoute(path, _of_method(exact, method, path))
    for prefix, named in NAMED.items():
        name = path.removeprefix(prefix)
        if name and name != path:
            handler = _of_method(named, method, prefix)
            return FoundRoute(prefix + "{id}", partial(handler, name=name))
    raise nothing_stored(path) or RouteNotFound(no_such_path(path, _exists))


def _exists(path: str) -> bool:
    return path in EXACT or any(path.startswith(prefix) and path != prefix for prefix in NAMED)


H = TypeVar("H")


def _of_method(handlers: dict[str, H], method: str, path: str) -> H:
    if method == "HEAD" and "GET" in handlers:
        method = "GET"  # both servers leave the body of the answer out
    if method not in handlers:
        allow = ", ".join(handlers)
        raise MethodNotAllowed(f"{path} takes {allow}.", allow=allow)
    return handlers[method]
