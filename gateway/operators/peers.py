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
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import aiohttp
from aiohttp import web
from yarl import URL

from gateway.client.responses import error_response, json_response
from gateway.identity.caller import Principal
from gateway.identity.keys import KeyTable
from gateway.operators.operations import Operation
from gateway.operators.together import OperatorAnswer, PartOf, limit_of, together
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.wire.errors import NotFound, Unauthenticated
from shared.wire.ids import REQUEST_ID_HEADER, KeyId

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
        self, request: web.BaseRequest, operation: Operation, operator: KeyId, own: Awaitable[web.Response]
    ) -> web.Response:
        """The answer of all gateways, of which `own` is this one's. Raises what `own` raises, but for
        NotFound."""
        others = self.members.others
        if not others:
            return await own
        try:
            first = _answer(await own)
        except NotFound as error:
            first = _answer(error_response(error, {}))
        answers: dict[str | None, OperatorAnswer] = {None: first}
        told = await asyncio.gather(*(self._ask(one, request, operator, len(others)) for one in others))
        silent = []
        for member, answer in zip(others, told, strict=True):
            if answer is None:
                silent.append(member.name)
            else:
                answers[member.name] = answer
        whole = together(answers, silent, operation.merges, limit_of(request.query), PartOf.GATEWAY)
        return json_response(whole.status, whole.body, {})

    async def _ask(
        self, member: GatewayMember, request: web.BaseRequest, operator: KeyId, count: int
    ) -> OperatorAnswer | None:
        """A gateway's answer; None where it has none, or refuses."""
        method = "GET" if request.method == "HEAD" else request.method
        target, at_s = request.raw_path, int(self._clock.wall())
        [digest, *_] = self._keys().digests(operator)
        proof = proof_of(digest, member.url, method, target, at_s)
        headers = {PROOF_HEADER: f"{operator} {at_s} {proof}"}
        if (id_ := request.headers.get(REQUEST_ID_HEADER)) is not None:
            headers[REQUEST_ID_HEADER] = id_
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await self._read(member, method, target, headers, ANSWERS_LEN_MAX // count)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            log.warning("gateway.silent", gateway=member.name, reason=str(error) or type(error).__name__)
            return None
        if answer.status not in (HTTPStatus.OK, HTTPStatus.NOT_FOUND):
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
            return OperatorAnswer(answer.status, {}, bytes(read))


def _answer(response: web.Response) -> OperatorAnswer:
    body = response.body
    assert isinstance(body, bytes)
    return OperatorAnswer(response.status, {}, body)
