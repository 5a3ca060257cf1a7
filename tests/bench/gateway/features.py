"""The row `features` of `python -m tests.bench gateway`: what quotas in Redis, tokens (JWT) and TLS cost.

Each is on in a gateway of its own, beside one with keys, quotas in memory and plain text, and one in which
all three are on. They are measured in turns, and a ratio is the median of the turns' ratios. A token is
signed with ES256 and used again, as callers do until it expires. TLS has no target: encryption is the
machine's.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from gateway.config.edge import AdminConfig, IssuerConfig
from gateway.config.holders import GrantConfig
from gateway.config.quotas import QuotasConfig
from gateway.config.redis import RedisConfig
from gateway.directory.development import ID, development_config, development_key
from tests.bench.client import ApiServer
from tests.bench.figures import Figure, Target, at_most, figure, quantile
from tests.bench.gateway.issuing import ALGORITHM, AUDIENCE, Certificate, SigningKey, jwk_set
from tests.bench.gateway.paced_engine import MODEL
from tests.bench.gateway.redis_servers import redis_machine
from tests.bench.gateway.streams import Load, measured
from tests.bench.gateway.subjects import LIMITS, Engine, ServerUnderTest, gateway_of, paced_engine
from tests.bench.gateway.unary import Unary
from tests.bench.services import free_port

UNARY_TARGET: Final = at_most(1.3)
EVENT_TARGET: Final = at_most(1.05)
UNARY_TURNS: Final = 9
EVENT_TURNS: Final = 5
ISSUER: Final = "https://issuer.test/"
REDIS_S: Final = 5.0
"""The time limit of Redis' calls, in seconds: a busy machine is no outage."""


@dataclass(frozen=True, slots=True)
class _Features:
    """The features of one gateway."""

    name: str
    redis: bool = False
    tokens: bool = False
    tls: bool = False

    def target(self, target: Target) -> Target | None:
        return None if self.tls else target


_PLAIN: Final = _Features("memory, keys, plain text")
_ALL: Final = (
    _PLAIN,
    _Features("Redis", redis=True),
    _Features("tokens", tokens=True),
    _Features("TLS", tls=True),
    _Features("Redis, tokens, TLS", redis=True, tokens=True, tls=True),
)


async def features(load: Load, seconds: float) -> list[Figure]:
    """CPU time per request and per event with each feature, and its ratio to that with none."""
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        secrets = _Secrets(directory)
        redis = (await stack.enter_async_context(redis_machine())).url
        engine = await stack.enter_async_context(paced_engine(load.interval_ms))
        subjects = {
            one: await stack.enter_async_context(_gateway(engine, one, secrets, redis)) for one in _ALL
        }
        requests_us, events_us = await in_turns(subjects, load, seconds)
    figures: list[Figure] = []
    for what, cost_us, unit, target in (
        ("unary", requests_us, "us/request", UNARY_TARGET),
        (load.name, events_us, "us/event", EVENT_TARGET),
    ):
        for one in _ALL:
            figures.append(figure(f"{what}: {one.name}: CPU", quantile(cost_us[one], 0.5), unit))
            if one is not _PLAIN:
                ratios = [a / b for a, b in zip(cost_us[one], cost_us[_PLAIN], strict=True)]
                name = f"{what}: {one.name} / {_PLAIN.name}"
                figures.append(figure(name, quantile(ratios, 0.5), "x", one.target(target)))
    return figures


K = TypeVar("K")
Costs = dict[K, list[float]]


async def in_turns(
    subjects: Mapping[K, ServerUnderTest], load: Load, seconds: float
) -> tuple[Costs[K], Costs[K]]:
    """The CPU time per request and per event of each subject in each turn, in microseconds."""
    names = list(subjects)
    requests_us: Costs[K] = {one: [] for one in names}
    events_us: Costs[K] = {one: [] for one in names}
    unary = {one: Unary(subject) for one, subject in subjects.items()}
    for closed_loop in unary.values():
        await closed_loop.round(counted=False)
    for turn in range(UNARY_TURNS):
        for one in names if turn % 2 else reversed(names):
            requests_us[one].append(await unary[one].round())
    for turn in range(EVENT_TURNS):
        for one in names if turn % 2 else reversed(names):
            window = await measured(subjects[one], load.streams, seconds)
            events_us[one].append(window.cpu_us_per_event)
    return requests_us, events_us


@contextlib.asynccontextmanager
async def _gateway(
    engine: Engine, features: _Features, secrets: _Secrets, redis: str
) -> AsyncIterator[ServerUnderTest]:
    port, admin_port, key = free_port(), free_port(), development_key()
    config = development_config(
        port=port,
        key=key,
        model=MODEL,
        engine_url=engine.url,
        limits=LIMITS,
        tls=(secrets.tls.cert, secrets.tls.key) if features.tls else None,
    )
    config = replace(config, admin=AdminConfig(port=admin_port))
    if features.redis:
        shared = RedisConfig(redis, timeout_s=REDIS_S)
        config = replace(config, redis=shared, quotas=QuotasConfig("redis"))
    if features.tokens:
        issuer = IssuerConfig("bench", ISSUER, (AUDIENCE,), (ALGORITHM,), jwks_file=secrets.jwks)
        config = replace(config, issuers=(issuer,), grants=(GrantConfig("bench", tenant=ID),))
    scheme = "https" if features.tls else "http"
    caller = secrets.token if features.tokens else key
    server = ApiServer(f"{scheme}://127.0.0.1:{port}/v1", caller, secrets.tls.cert if features.tls else None)
    async with gateway_of(config, server, f"http://127.0.0.1:{admin_port}/readyz") as subject:
        yield subject


class _Secrets:
    """A key pair as a JWK set and a token of it, and a certificate of this machine with its key."""

    def __init__(self, directory: Path) -> None:
        key, jwks = SigningKey.made("1"), directory / "jwks.json"
        jwks.write_bytes(jwk_set(key))
        self.jwks, self.token = str(jwks), key.token(ISSUER, "bench")
        self.tls = Certificate.made(directory)
