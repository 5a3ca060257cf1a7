"""The other gateways, asked on an operator's behalf: what this one was not asked for, they may have served.

Rules

1. They are asked at once, beside each other, and have `ANSWER_S` together. One that does not answer, or
   refuses, is named in the answer and holds up nobody longer; no request of a caller ever waits for one.
2. A gateway asks for an operator with a proof (`proof_of`): nobody sends an operator's key on. It is made
   with the hash of that key, which all gateways have, for one method, target and gateway, and holds for
   `PROOF_S`. So whoever writes into Redis, which says where the others are, learns no key, and cannot use a
   proof elsewhere.
3. With a proof one may only ask what is asked of all gateways: requests, their records, usage, and to end a
   request. What changes keys needs a key. Who was asked with a proof asks nobody else.
4. A tenant that cancels a response has it ended by any operator's proof, among its own requests alone.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp import web

from gateway.client.responses import error_response, json_response
from gateway.identity.caller import Principal
from gateway.identity.keys import KeyTable
from gateway.operators.asking import Ask, ask_each, read_answer, whole_of, without_known
from gateway.operators.operations import Operation
from gateway.operators.together import OperatorAnswer, is_same, limit_of
from gateway.operators.versions import KNOWN, unchanged, version_of
from shared.apis.requests import AbortResponse
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.wire.errors import NotFound, Unauthenticated
from shared.wire.ids import REQUEST_ID_HEADER, KeyId, RequestId, TenantId

if TYPE_CHECKING:  # a gateway without Redis has no use for its client
    from gateway.redis.members import GatewayList, GatewayMember

PROOF_HEADER: Final = "x-penstock-peer"
"""The proof, with the operator and the time: `OPERATOR SECONDS HEX`."""
PROOF_S: Final = 60.0
"""How long a proof holds, and how far clocks may be apart, in seconds."""
ANSWER_S: Final = 2.0
ANSWERS_LEN_MAX: Final = 64 * 1024 * 1024
"""Bytes of all their answers together."""
_PROOF: Final = re.compile(r"([A-Za-z0-9._-]{1,64}) ([0-9]{1,12}) ([0-9a-f]{64})")

log = logs.get(__name__)

_PASSED: Final = (REQUEST_ID_HEADER, KNOWN)

Own = Callable[[web.BaseRequest], Awaitable[web.Response]]
"""This gateway's answer to a request."""
Keys = Callable[[], KeyTable]
"""The operators' keys of the moment."""


def proof_of(digest: bytes, url: str, method: str, target: str, at_s: int) -> str:
    """The proof that whoever has a key with this digest asks the gateway at `url`."""
    return hmac.new(digest, f"penstock {url} {method} {target} {at_s}".encode(), "sha256").hexdigest()


class Peers:
    """The other gateways on the same Redis."""

    def __init__(self, members: GatewayList, keys: Keys, clock: Clock = SYSTEM_CLOCK) -> None:
        self.members: Final = members
        self._keys: Final = keys
        self._clock: Final = clock
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        """Take this gateway's word back, and close the connections."""
        await self.members.aclose()
        if self._session is not None:
            await self._session.close()

    def operator(self, proof: str, method: str, target: str) -> Principal:
        """The operator on whose behalf another gateway asks. Raises Unauthenticated."""
        own, now_s, match = self.members.own, self._clock.wall(), _PROOF.fullmatch(proof)
        if match is None or own is None or abs(now_s - int(match[2])) > PROOF_S:
            raise Unauthenticated("This is no other gateway, or its clock is another.", detail="no proof")
        for digest in self._keys().digests(KeyId(match[1])):
            if hmac.compare_digest(match[3], proof_of(digest, own.url, method, target, int(match[2]))):
                return self._keys().of_digest(digest, now_s)
        raise Unauthenticated("This is no other gateway.", detail="a wrong proof")

    async def together(
        self, request: web.BaseRequest, operation: Operation, operator: KeyId, own: Own
    ) -> web.Response:
        """The answer of all gateways, of which `own` gives this one's. Raises what `own` raises, but for
        NotFound."""
        others = self.members.others
        if not others:
            return await own(request)

        async def here(anew: bool) -> OperatorAnswer:
            asked = request.clone(headers=without_known(request.headers)) if anew else request
            try:
                return _answer(await own(asked))
            except NotFound as error:
                return _answer(error_response(error, {}))

        method = "GET" if request.method == "HEAD" else request.method
        passed = {name: request.headers[name] for name in _PASSED if name in request.headers}
        elsewhere = self._asks((method, request.raw_path), operator, passed, ANSWER_S)
        asks: dict[str | None, Ask] = {None: here, **elsewhere}
        answers, known = await ask_each(asks), request.headers.get(KNOWN, "")
        limit = limit_of(request.query)
        whole = await whole_of(asks, answers, operation.merges, limit, known)
        assert whole is not None, "this one has answered"
        if is_same(whole):
            return unchanged(whole.headers)
        return json_response(whole.status, whole.body, version_of(whole.headers))

    async def end(self, tenant: TenantId, request_id: RequestId) -> int:
        """End a tenant's requests of this id at the other gateways. Returns how many that were, as far as
        they say so."""
        operator = self._keys().any_working(self._clock.wall())
        if operator is None:
            return 0
        target = f"/admin/v1/requests/{request_id}?tenant={quote(tenant, safe='')}"
        told = await ask_each(self._asks(("DELETE", target), operator, {}, ANSWER_S))
        return sum(map(_aborted, told.values()))

    async def told_by_others(self, operator: KeyId, target: str, within_s: float) -> list[OperatorAnswer]:
        """The answers of the other gateways to a question of this one's own, for an operator."""
        return [*(await ask_each(self._asks(("GET", target), operator, {}, within_s))).values()]

    def _asks(
        self, asked: tuple[str, str], operator: KeyId, headers: Mapping[str, str], within_s: float
    ) -> dict[str | None, Ask]:
        """Asks the others this, which is a method and a target, each by its name."""
        others = self.members.others
        bounds = ANSWERS_LEN_MAX // max(1, len(others)), within_s
        return {one.name: partial(self._ask, one, asked, operator, headers, bounds) for one in others}

    async def _ask(
        self,
        member: GatewayMember,
        asked: tuple[str, str],
        operator: KeyId,
        passed: Mapping[str, str],
        bounds: tuple[int, float],
        anew: bool,
    ) -> OperatorAnswer | None:
        """A gateway's answer; None where it has none, or refuses."""
        (method, target), (len_max, within_s) = asked, bounds
        at_s = int(self._clock.wall())
        [digest, *_] = self._keys().digests(operator)
        proof = proof_of(digest, member.url, method, target, at_s)
        headers = {PROOF_HEADER: f"{operator} {at_s} {proof}", **(without_known(passed) if anew else passed)}
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=False)
        known = True if member.cert is None else aiohttp.Fingerprint(bytes.fromhex(member.cert))
        url = f"{member.url}{target}"
        try:
            async with asyncio.timeout(within_s):
                answer = await read_answer(self._session, method, url, len_max, headers=headers, ssl=known)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            log.warning("gateway.silent", gateway=member.name, reason=str(error) or type(error).__name__)
            return None
        if answer.status not in (HTTPStatus.OK, HTTPStatus.NOT_MODIFIED, HTTPStatus.NOT_FOUND):
            log.warning("gateway.silent", gateway=member.name, reason=f"it answered {answer.status}")
            return None
        return OperatorAnswer(answer.status, version_of(answer.headers), answer.body)


def _aborted(answer: OperatorAnswer) -> int:
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(answer.body, type=AbortResponse).aborted
    return 0


def _answer(response: web.Response) -> OperatorAnswer:
    body = response.body or b""
    assert isinstance(body, bytes)
    return OperatorAnswer(response.status, version_of(response.headers), body)
