"""`penstock up --redis`, as operators have it: keys and counts are in Redis, for all gateways that ask it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.redis_server import RedisServer, redis_server
from tests.services import PATIENCE_S, Service, admin_url, gateway_url, service, until
from tests.test_end_to_end import MODEL, PENSTOCK, Up, ask, start

pytestmark = pytest.mark.slow

TOKENS = 4


@pytest.fixture
def own() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def up(tmp_path: Path, own: RedisServer) -> Iterator[Up]:
    running = start(tmp_path, "--redis", own.url)
    yield running
    running.process.send_signal(signal.SIGINT)
    running.end()
    assert running.process.returncode == 0


@pytest.fixture
def second(up: Up) -> Iterator[Service]:
    """Another gateway with the settings that `penstock up` has made, but for its ports."""
    ports = {"PENSTOCK_GATEWAY_LISTEN__PORT": "0", "PENSTOCK_GATEWAY_ADMIN__PORT": "0"}
    with service(["gateway", "--config", str(up.run_dir / "gateway.toml")], **ports) as started:
        yield started


def penstock(up: Up, *words: str) -> str:
    """What a command says beside `penstock up`, which it finds by itself."""
    done = subprocess.run(
        [str(PENSTOCK), *words], capture_output=True, text=True, timeout=PATIENCE_S, env=up.environment()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def status(url: str, key: str, unlike: int = 0) -> int:
    """Of a chat's answer, once it is no more `unlike`: a gateway learns of a change within 5 s."""
    body = {"model": MODEL, "messages": ask("What is a penstock?"), "max_tokens": TOKENS}
    headers = {"authorization": f"Bearer {key}"}
    last = unlike

    def is_other() -> bool:
        nonlocal last
        last = httpx.post(
            f"{url}/chat/completions", json=body, headers=headers, timeout=PATIENCE_S
        ).status_code
        return last != unlike

    until(is_other)
    return last


def test_keys_and_counts_are_shared_by_all_gateways_on_one_redis(
    up: Up, second: Service, own: RedisServer
) -> None:
    urls = up.url, f"{gateway_url(second)}/v1"
    once_a_minute = ("--limit", "requests_per_min=1")
    made = json.loads(penstock(up, "keys", "create", "--tenant", "development", *once_a_minute, "--json"))
    assert [status(url, made["key"], unlike=401) for url in urls] == [200, 429]
    assert made["id"] in penstock(up, "keys", "list")
    [row] = [row for row in usage(up, second) if row["key"] == made["id"]]
    assert (row["requests"], row["completion_tokens"]) == (1, TOKENS)
    penstock(up, "keys", "revoke", made["id"])
    assert [status(url, made["key"], unlike=429) for url in urls] == [401, 401]
    keys = [str(name) for name in own.admin.scan_iter()]
    assert any(name.endswith(f":key:{made['id']}") for name in keys)
    assert not any(name.endswith(":leases") for name in keys), "all is settled"
    assert made["id"] not in (up.run_dir / "gateway.toml").read_text()


def usage(up: Up, gateway: Service) -> list[Any]:
    """What a gateway says that callers used."""
    key = re.search(r"Admin key\s+(\S+)", up.printed)
    assert key is not None
    headers = {"authorization": f"Bearer {key[1]}"}
    answer = httpx.get(f"{admin_url(gateway)}/admin/v1/usage?by=key", headers=headers, timeout=PATIENCE_S)
    rows: list[Any] = answer.json()["rows"]
    return rows
