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
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from gateway.client.responses import error_response, json_response
from gateway.identity.caller import Principal
from gateway.identity.keys import KeyTable
from gateway.operators.operations import Operation
from gateway.operators.together import OperatorAnswer, PartOf, is_same, limit_of, to_ask_again, together
from gateway.operators.versions import ETAG, KNOWN, etag_of_all, unchanged, version_of
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
        principal = self._keys().of_id(KeyId(match[1]), now_s)
        for digest in self._keys().digests(principal.key):
            if hmac.compare_digest(match[3], proof_of(digest, own.url, method, target, int(match[2]))):
                return principal
        raise Unauthenticated("This is no other gateway.", detail="a wrong proof")

    async def together(
        self, request: web.BaseRequest, operation: Operation, operator: KeyId, own: Own
    ) -> web.Response:
        """The answer of all gateways, of which `own` gives this one's. Raises what `own` raises, but for
        NotFound."""
        others = self.members.others
        if not others:
            return await own(request)
        asked: dict[str | None, GatewayMember | None] = {None: None}
        asked |= {member.name: member for member in others}
        answers = await self._round(asked, request, operator, own)
        is_whole = len(answers) == len(asked)
        if again := to_ask_again(answers, is_whole=is_whole):
            anew = request.clone(headers=_without(request.headers, KNOWN))
            late = await self._round({name: asked[name] for name in again}, anew, operator, own)
            answers = {name: one for name, one in answers.items() if name not in again} | late
        silent = [name for name in asked if name is not None and name not in answers]
        whole = together(answers, silent, operation.merges, limit_of(request.query), PartOf.GATEWAY)
        if is_same(whole):
            return unchanged({ETAG: request.headers[KNOWN]})
        return json_response(whole.status, whole.body, etag_of_all([whole.headers]))

    async def end(self, tenant: TenantId, request_id: RequestId) -> int:
        """End a tenant's requests of this id at the other gateways. Returns how many that were, as far as
        they say so."""
        others, operator = self.members.others, self._keys().any_working(self._clock.wall())
        if not others or operator is None:
            return 0
        target = f"/admin/v1/requests/{request_id}?tenant={quote(tenant, safe='')}"
        asked = (self._ask(one, "DELETE", target, {}, operator, len(others)) for one in others)
        told = [answer for answer in await asyncio.gather(*asked) if answer is not None]
        return sum(_aborted(answer) for answer in told)

    async def _round(
        self,
        asked: Mapping[str | None, GatewayMember | None],
        request: web.BaseRequest,
        operator: KeyId,
        own: Own,
    ) -> dict[str | None, OperatorAnswer]:
        """The answers of those that give one, by their names. None is this gateway."""
        answers: dict[str | None, OperatorAnswer] = {}
        if None in asked:
            try:
                answers[None] = _answer(await own(request))
            except NotFound as error:
                answers[None] = _answer(error_response(error, {}))
        others = [member for member in asked.values() if member is not None]
        method, target = "GET" if request.method == "HEAD" else request.method, request.raw_path
        passed = {name: request.headers[name] for name in _PASSED if name in request.headers}
        asking = (self._ask(one, method, target, passed, operator, len(others)) for one in others)
        told = await asyncio.gather(*asking)
        for member, answer in zip(others, told, strict=True):
            if answer is not None:
                answers[member.name] = answer
        return answers

    async def _ask(
        self,
        member: GatewayMember,
        method: str,
        target: str,
        passed: Mapping[str, str],
        operator: KeyId,
        count: int,
    ) -> OperatorAnswer | None:
        """A gateway's answer; None where it has none, or refuses."""
        at_s = int(self._clock.wall())
        [digest, *_] = self._keys().digests(operator)
        proof = proof_of(digest, member.url, method, target, at_s)
        headers = {PROOF_HEADER: f"{operator} {at_s} {proof}", **passed}
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await self._read(member, method, target, headers, ANSWERS_LEN_MAX // count)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            log.warning("gateway.silent", gateway=member.name, reason=str(error) or type(error).__name__)
            return None
        if answer.status not in (HTTPStatus.OK, HTTPStatus.NOT_MODIFIED, HTTPStatus.NOT_FOUND):
            log.warning("gateway.silent", gateway=member.name, reason=f"it answered {answer.status}")
            return None
        return answer

    async def _read(
        self, member: GatewayMember, method: str, target: str, headers: Mapping[str, str], len_max: int
    ) -> OperatorAnswer:
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=False)
        known = True if member.cert is None else aiohttp.Fingerprint(bytes.fromhex(member.cert))
        url = URL(f"{member.url}{target}", encoded=True)
        async with self._session.request(
            method, url, headers=headers, allow_redirects=False, ssl=known
        ) as answer:
            read = bytearray()
            async for piece in answer.content.iter_any():
                read += piece
                if len(read) > len_max:
                    raise ValueError(f"its answer has more than {len_max} bytes")
            return OperatorAnswer(answer.status, version_of(answer.headers), bytes(read))


def _aborted(answer: OperatorAnswer) -> int:
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(answer.body, type=AbortResponse).aborted
    return 0


def _answer(response: web.Response) -> OperatorAnswer:
    body = response.body or b""
    assert isinstance(body, bytes)
    return OperatorAnswer(response.status, version_of(response.headers), body)


def _without(headers: Mapping[str, str], name: str) -> CIMultiDict[str]:
    return CIMultiDict((one, value) for one, value in headers.items() if one.lower() != name)
