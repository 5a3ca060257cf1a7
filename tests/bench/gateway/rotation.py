"""The row `rotation` of `python -m tests.bench edge`: callers whose keys are replaced while they ask.

Three kinds of callers ask a gateway at a steady rate, whether they are answered or not: while all of their
keys rotate, and alone, before that and after it.

    in turn    of an issuer that rotates through four keys, each used in the moment in which it is published,
               so that the first token with it comes before the gateway has fetched it
    in haste   of an issuer that rotates several times as often
    keys       API keys, each replaced once through the admin listener, old and new secret used in turns. To
               replace one takes some 30 ms of a thread, which reads the gateway's file as often as it must

A caller of an issuer sends tokens that the gateway has seen, of each key that is published, and new ones.
What is sent is good in that moment, so every 401 is a false one.

Then the first issuer goes on to rotate, while somebody else sends tokens of both with made-up key ids, each
another one: a fetch has just begun for one of these whenever a new key is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Final, Protocol

import httpx
import msgspec

from gateway.config.edge import IssuerConfig
from gateway.config.holders import GrantConfig
from gateway.config.whole import KeyConfig
from gateway.directory.development import ID, development_config, development_key
from gateway.identity.keys import mint_key
from tests.bench.client import ApiServer, LoadConnection, TimedRequest
from tests.bench.figures import Figure, at_least, at_most, figure, quantile
from tests.bench.gateway.issuing import ALGORITHM, AUDIENCE, KeyServer, SigningKey
from tests.bench.gateway.paced_engine import MODEL
from tests.bench.gateway.pacing import at_a_rate
from tests.bench.gateway.subjects import LIMITS, Engine, ServerUnderTest, gateway_of
from tests.bench.services import free_port

IN_TURN: Final = "in turn"
IN_HASTE: Final = "in haste"
KEYS: Final = "keys"
CALLERS: Final = (IN_TURN, KEYS, IN_TURN, IN_HASTE) * 2
"""The kinds of the eight callers, who ask one after another."""
NEW_EVERY: Final = 3
"""One token of so many is new to the gateway."""
MADE_UP: Final = "made up"
PATIENCE_S: Final = 30.0
GAP_S: Final = 31.0
"""The time between two rotations of the issuer that rotates in turn."""
BESIDE_TARGET: Final = at_most(1.1)


@dataclass(frozen=True, slots=True)
class Plan:
    """The load, and when what rotates. Times are in seconds."""

    rate: int = 200
    """Requests per second, of all callers together."""
    alone_s: float = 8.0
    """How long callers ask before anything rotates, and as long again when all is over."""
    beside_s: float = 2 * GAP_S + 8.0
    in_turn_s: tuple[float, ...] = tuple(2.0 + turn * GAP_S for turn in range(3))
    """The rotations of the issuer that leaves the gap: with its first key, through four."""
    in_haste_s: tuple[float, ...] = (5.0, 13.0, 21.0, 29.0, 37.0, 45.0)
    keys_every_s: float = 5.0
    overlap_s: float = 4.0
    """How long an issuer publishes, and its callers use, a key beside the one that replaces it."""
    made_up_rate: int = 40
    """Tokens with made-up key ids per second, at the end."""
    flooded_s: float = 20.0
    """How long they come."""
    flooded_turns_s: tuple[float, ...] = (3.0, 11.0)
    """The rotations meanwhile."""


class Caller(Protocol):
    def credential(self) -> str:
        """A key or a token that is good now."""
        ...


class Issuer:
    """An issuer that rotates, and its callers."""

    def __init__(self, name: str, server: KeyServer) -> None:
        self._name, self._server = name.replace(" ", "-"), server
        self._count = itertools.count()
        self._keys: list[SigningKey] = []
        self._held: dict[str, str] = {}
        self._use(self._made())

    @property
    def config(self) -> IssuerConfig:
        url, ca = self._server.url(self._name), self._server.certificate.cert
        return IssuerConfig(self._name, self._iss, (AUDIENCE,), (ALGORITHM,), jwks_url=url, ca=ca)

    @property
    def _iss(self) -> str:
        return f"https://{self._name}.test/"

    def credential(self) -> str:
        number = next(self._count)
        if number % NEW_EVERY == 0:
            return self._keys[-1].token(self._iss, "new", number)
        return self._held[self._keys[number % len(self._keys)].kid]

    def made_up(self) -> str:
        """A token whose key nobody has, by an id that was not seen before."""
        return replace(self._keys[-1], kid=f"made-up-{next(self._count)}").token(self._iss, "nobody")

    async def rotate(self, times_s: Iterable[float], overlap_s: float) -> None:
        """Replace the key at these times from now."""
        began_s = time.perf_counter()
        for at_s in times_s:
            await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
            self._use(self._keys[-1], self._made())
            await asyncio.sleep(overlap_s)
            self._use(self._keys[-1])

    def _made(self) -> SigningKey:
        key = SigningKey.made(f"{self._name}-{next(self._count)}")
        self._held[key.kid] = key.token(self._iss, "held")
        return key

    def _use(self, *keys: SigningKey) -> None:
        self._server.published[self._name] = keys
        self._keys = list(keys)


class MadeUp:
    """Somebody who makes up key ids of these issuers."""

    def __init__(self, *issuers: Issuer) -> None:
        self._issuers = itertools.cycle(issuers)

    def credential(self) -> str:
        return next(self._issuers).made_up()


class Keys:
    """API keys that are replaced one after the other, and their callers."""

    def __init__(self, count: int) -> None:
        minted = [mint_key("bench") for _ in range(count)]
        self.configs = tuple(KeyConfig(key.id, key.hash, ID) for key in minted)
        self._texts = {str(key.id): [key.text] for key in minted}
        self._turns = itertools.cycle(self._texts.values())
        self._count = itertools.count()

    def credential(self) -> str:
        texts = next(self._turns)
        return texts[next(self._count) // len(self._texts) % len(texts)]

    async def rotate(self, operator: httpx.AsyncClient, every_s: float) -> None:
        """Replace each key once."""
        for key_id, texts in self._texts.items():
            await asyncio.sleep(every_s)
            path = f"/admin/v1/keys/{key_id}/rotate"
            answer = (await operator.post(path, json={"overlap_s": 3600})).raise_for_status()
            texts.append(msgspec.json.decode(answer.content)["key"])


@dataclass(frozen=True, slots=True)
class Asked:
    """A request and the kind of its caller."""

    kind: str
    request: TimedRequest


class Load:
    """The requests of all callers, each on a connection that none of them uses at that moment."""

    def __init__(self, url: str, callers: dict[str, Caller], kinds: Sequence[str] = CALLERS) -> None:
        self._url, self._callers = url, callers
        self._kinds = itertools.cycle(kinds)
        self._idle: list[LoadConnection] = []
        self.asked: list[Asked] = []

    async def ask(self) -> None:
        kind = next(self._kinds)
        server = ApiServer(self._url, self._callers[kind].credential())
        request = ServerUnderTest(server).chat(1, stream=False)
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                break
        else:
            connection = await server.connect()
        self.asked.append(Asked(kind, await connection.exchange(request, PATIENCE_S)))
        self._idle.append(connection)

    async def run(self, rate: int, seconds: float) -> list[Asked]:
        """Ask at this rate. Returns what was asked."""
        self.asked, over = [], asyncio.Event()
        asyncio.get_running_loop().call_later(seconds, over.set)
        await at_a_rate(rate, self.ask, over)
        return self.asked

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


async def rotation(engine: Engine, plan: Plan = Plan()) -> list[Figure]:
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = await stack.enter_async_context(KeyServer(directory))
        in_turn, in_haste = Issuer(IN_TURN, server), Issuer(IN_HASTE, server)
        keys = Keys(int(plan.beside_s / plan.keys_every_s))
        url, operator = await stack.enter_async_context(_gateway(engine, (in_turn, in_haste), keys))
        load = Load(url, {IN_TURN: in_turn, IN_HASTE: in_haste, KEYS: keys})
        stack.callback(load.close)
        forged = Load(url, {MADE_UP: MadeUp(in_turn, in_haste)}, (MADE_UP,))
        stack.callback(forged.close)
        alone = await load.run(plan.rate, plan.alone_s)
        async with asyncio.TaskGroup() as group:
            rotating = [
                group.create_task(in_turn.rotate(plan.in_turn_s, plan.overlap_s)),
                group.create_task(in_haste.rotate(plan.in_haste_s, plan.overlap_s)),
                group.create_task(keys.rotate(operator, plan.keys_every_s)),
            ]
            beside = await load.run(plan.rate, plan.beside_s)
            for task in rotating:
                task.cancel()
        alone += await load.run(plan.rate, plan.alone_s)
        async with asyncio.TaskGroup() as group:
            turning = group.create_task(in_turn.rotate(plan.flooded_turns_s, plan.overlap_s))
            forging = group.create_task(forged.run(plan.made_up_rate, plan.flooded_s))
            flooded = await load.run(plan.rate, plan.flooded_s)
            turning.cancel()
    return [*figures_of(alone, beside, plan), *_flooded(flooded, forging.result())]


@contextlib.asynccontextmanager
async def _gateway(
    engine: Engine, issuers: Sequence[Issuer], keys: Keys
) -> AsyncIterator[tuple[str, httpx.AsyncClient]]:
    """The URL of a gateway that knows these callers, and its operator."""
    port, admin_port, key, admin_key = free_port(), free_port(), development_key(), development_key()
    admin = admin_port, admin_key
    config = development_config(
        port=port, key=key, model=MODEL, engine_url=engine.url, limits=LIMITS, admin=admin
    )
    config = replace(
        config,
        keys=keys.configs,
        issuers=tuple(issuer.config for issuer in issuers),
        grants=tuple(GrantConfig(issuer.config.id, tenant=ID) for issuer in issuers),
    )
    url, headers = f"http://127.0.0.1:{port}", {"authorization": f"Bearer {admin_key}"}
    base = f"http://127.0.0.1:{admin_port}"
    async with (
        gateway_of(config, ApiServer(f"{url}/v1"), f"{url}/readyz"),
        httpx.AsyncClient(base_url=base, headers=headers, trust_env=False, timeout=PATIENCE_S) as operator,
    ):
        yield f"{url}/v1", operator


def figures_of(alone: Sequence[Asked], beside: Sequence[Asked], plan: Plan) -> list[Figure]:
    """The figures of the answers that callers got while nothing rotated, and while all of it did."""
    unauthorized = [one for one in beside if one.request.status == HTTPStatus.UNAUTHORIZED]
    failed = [one for one in beside if one.request.status != HTTPStatus.OK]
    rate = len(beside) / plan.beside_s
    p99_ms = [_p99_ms(asked) for asked in (alone, beside)]
    return [
        figure("rotation: requests/s", rate, "requests/s", at_least(0.99 * plan.rate)),
        figure("rotation: false 401", len(unauthorized), "requests", at_most(0)),
        figure("rotation: not served", len(failed), "requests", at_most(0)),
        figure("rotation: p99, beside / alone", p99_ms[1] / p99_ms[0], "x", BESIDE_TARGET),
        figure("rotation: p99 beside", p99_ms[1], "ms"),
    ]


def _flooded(asked: Sequence[Asked], made_up: Sequence[Asked]) -> list[Figure]:
    """The figures of the answers that callers got beside made-up keys."""
    failed = [one for one in asked if one.request.status != HTTPStatus.OK]
    refused = [one for one in made_up if one.request.status == HTTPStatus.UNAUTHORIZED]
    return [
        figure("rotation beside made-up keys: not served", len(failed), "requests", at_most(0)),
        figure("rotation beside made-up keys: p99", _p99_ms(asked), "ms"),
        figure("rotation beside made-up keys: made up, refused", len(refused), "requests"),
    ]


def _p99_ms(asked: Iterable[Asked]) -> float:
    """The p99 of the requests that were served, in ms."""
    served = [one.request for one in asked if one.request.status == HTTPStatus.OK]
    return quantile([1e3 * (request.ended_at - request.sent_at) for request in served], 0.99)
