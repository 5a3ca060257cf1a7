"""`python -m tests.bench quota`, with few requests."""

from __future__ import annotations

import argparse

from tests.bench.gateway import quota
from tests.gateway.redis_server import RedisServer

ROWS = ("memory", "Redis", "Redis, redis-py's pool", "bare calls", "no limits, noted")


def options(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    quota.add_arguments(parser)
    return parser.parse_args(argv)


async def test_each_store_is_measured_beside_the_others(redis: RedisServer) -> None:
    few = options("--requests", "8", "--turns", "1", "--callers", "1", "4", "--redis", redis.url)
    figures = {figure.name: figure for figure in await quota.run(few)}
    for callers in (1, 4):
        for row in ROWS:
            for what in ("CPU", "calls", "call, p50", "call, p99"):
                value = figures[f"{callers} callers: {row}: {what}"].value
                assert value is not None
                assert value > 0
        assert figures[f"{callers} callers: Redis / redis-py's pool"].target is not None
        assert figures[f"{callers} callers: no limits, noted / Redis"].unit == "x"
        assert figures[f"{callers} callers: Redis: CPU"].target is not None
        for row in ("bare calls", "memory"):
            assert f"{callers} callers: Redis beyond {row}" in figures
    assert redis.admin.keys("bench-*reservations") == [], "all is settled"


async def test_a_server_is_started_where_none_is_named() -> None:
    figures = await quota.run(options("--requests", "1", "--turns", "1", "--callers", "1"))
    assert len(figures) == 4 * len(ROWS) + 4
