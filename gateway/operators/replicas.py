"""The replicas on the admin listener: `/admin/v1/replicas`.

An ID is as the list shows it, with the host and the port of the replica's URL; a slash in it is sent as %2F.
What an operator drains stays so until it is undrained, or nothing lists the replica any more. Of several
workers all drain it, those included that replace others. It is one gateway's knowledge: others are asked by
themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Annotated, Final
from urllib.parse import unquote

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from gateway.client.responses import json_response
from gateway.operators.operations import Asks, Merge, Operation, OperatorRequest
from gateway.routing.members import DrainCause, MemberPhase
from gateway.routing.replicas import Replica, Replicas
from shared.process import logs
from shared.wire.errors import NotFound

REPLICAS: Final = "/admin/v1/replicas"
REPLICA: Final = "/admin/v1/replicas/{replica}"
PAGE_LEN: Final = 100
PAGE_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class ReplicasQuery:
    """A page of replicas."""

    model: str | None = None
    """Only those of this model's pool."""
    after: str = ""
    """Only those behind this id."""
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = PAGE_LEN
    """Entries at most."""


class ReplicaView(Struct, frozen=True):
    """A replica as operators see it."""

    id: str
    url: str
    models: list[str]
    """The models whose pools list it; none when it is leaving."""
    phase: MemberPhase
    drained_by: list[DrainCause]
    """Who wants it to drain, besides what lists it."""
    health: str
    """well; ejected: it failed too often and is left alone for a time; trial: one request decides."""
    ejections: int
    """How often it was ejected."""
    requests: int
    """The requests of this process that are there."""
    waiting_tokens: int
    """Prompt tokens to be computed there, as far as this process knows."""
    routes: dict[str, int]
    """The requests that it was chosen for, by the reason."""


class ReplicaPage(Struct, frozen=True):
    """A part of the list."""

    data: list[ReplicaView]
    has_more: bool
    """True if there are more after the last one's id."""


_OfOne: Final = partial(
    Operation,
    errors=(NotFound,),
    asks=Asks.EVERY,
    merges={
        **dict.fromkeys(("models", "drained_by"), Merge.FIRST),
        **dict.fromkeys(("ejections", "requests", "waiting_tokens", "routes"), Merge.SUM),
    },
)


class ReplicaRoutes:
    """The handlers."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas: Final = replicas

    @Operation(
        f"GET {REPLICAS}",
        "List replicas, by their ids.",
        ReplicaPage,
        ReplicasQuery,
        asks=Asks.EVERY,
        merges={"data": Merge.JOIN, "has_more": Merge.ANY},
    )
    async def _list(self, asked: OperatorRequest) -> web.Response:
        query: ReplicasQuery = asked.query
        members = self._replicas.members(query.model)
        found = sorted((one for one in members if one.id > query.after), key=lambda one: one.id)
        page = [self._view(replica) for replica in found[: query.limit]]
        body = msgspec.json.encode(ReplicaPage(page, has_more=len(found) > len(page)))
        return json_response(HTTPStatus.OK, body, {})

    @_OfOne(f"GET {REPLICA}", "Show a replica.", ReplicaView)
    async def _show(self, asked: OperatorRequest) -> web.Response:
        return self._answer(self._find(asked))

    @_OfOne(f"POST {REPLICA}/drain", "Send it no new requests.", ReplicaView)
    async def _drain(self, asked: OperatorRequest) -> web.Response:
        return self._changed(asked, "drain", self._replicas.drain)

    @_OfOne(f"POST {REPLICA}/undrain", "Send it requests again.", ReplicaView)
    async def _undrain(self, asked: OperatorRequest) -> web.Response:
        return self._changed(asked, "undrain", self._replicas.undrain)

    def _changed(
        self, asked: OperatorRequest, action: str, change: Callable[[Replica, DrainCause], None]
    ) -> web.Response:
        """Change the replica that is asked for, and leave an audit line."""
        replica = self._find(asked)
        change(replica, DrainCause.OPERATOR)
        fields = {"action": action, "replica": replica.id, "phase": replica.phase.value}
        logs.audit("admin.change", {"logger": __name__, "operator": asked.operator.key, **fields})
        return self._answer(replica)

    def _find(self, asked: OperatorRequest) -> Replica:
        """Raises NotFound."""
        id_ = unquote(asked.id)
        if (replica := self._replicas.find(id_)) is None:
            raise NotFound(f"There is no replica {id_[:256]!r}.")
        return replica

    def _answer(self, replica: Replica) -> web.Response:
        return json_response(HTTPStatus.OK, msgspec.json.encode(self._view(replica)), {})

    def _view(self, replica: Replica) -> ReplicaView:
        return ReplicaView(
            id=replica.id,
            url=replica.url,
            models=sorted(replica.standings),
            phase=replica.phase,
            drained_by=sorted(replica.drained_by),
            health=replica.health.phase.value,
            ejections=replica.health.ejections,
            requests=replica.view.requests,
            waiting_tokens=replica.view.waiting_tokens,
            routes={route.value: count for route, count in sorted(replica.routes.items())},
        )
