"""The requests that others have: the other gateways on the same Redis, and the workers beside this one.

What was before a request in an engine's queue, and the tries of its SDK before it, are most often elsewhere:
a load balancer gives each to another. They are asked for their lists, which nobody asks others for, and have
`ANSWER_S` together, so that whoever asked this gateway is not kept waiting for longer than others wait for it
(`gateway.operators.peers`). One that does not answer leaves out what it knows; it is named where records are
asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Final
from urllib.parse import urlencode

import msgspec

from gateway.operators.together import OperatorAnswer
from shared.trace.request_records import RequestPage, RequestSummary
from shared.wire.ids import KeyId
from shared.wire.undecodable import UNDECODABLE

ANSWER_S: Final = 1.0
LIMIT: Final = 1000
"""Requests of each that are looked at."""

Others = Callable[[KeyId, str, float], Awaitable[Sequence[OperatorAnswer]]]
"""Asks some of them for an operator what is at a target, and returns their answers. The last is the time that
they have, in seconds."""


class Elsewhere:
    """Those who are asked."""

    def __init__(self, *others: Others) -> None:
        self._others: Final = others

    async def requests(self, operator: KeyId, path: str, **query: str | None) -> list[RequestSummary]:
        """Their requests that are asked for."""
        told = {name: text for name, text in query.items() if text is not None}
        target = f"{path}?{urlencode({**told, 'limit': LIMIT})}"
        answers = await asyncio.gather(*(ask(operator, target, ANSWER_S) for ask in self._others))
        return [one for some in answers for answer in some for one in _requests(answer)]


NOBODY: Final = Elsewhere()
"""Where there is nobody else."""


def _requests(answer: OperatorAnswer) -> Sequence[RequestSummary]:
    if answer.status != HTTPStatus.OK:
        return ()
    try:
        return msgspec.json.decode(answer.body, type=RequestPage).data
    except UNDECODABLE:  # of another version
        return ()
