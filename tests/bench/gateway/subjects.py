"""The servers that `python -m tests.bench gateway` measures: our gateway and two other proxies, before one
paced engine.

Each is a process of its own, and they run side by side, so that what a busy machine adds is added to all.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import msgspec

from gateway.config.quotas import QuotaLimits
from gateway.config.whole import GatewayConfig
from gateway.directory.development import development_config, development_key
from shared.apis.models import ModelList
from shared.process.setting_values import to_toml
from tests.bench.client import ApiServer
from tests.bench.cpu import cpu_s, resident_bytes
from tests.bench.gateway.paced_engine import MODEL, STATS, Stats
from tests.bench.services import demo_model, free_port, get, service

EVENTS_MAX: Final = 100_000
"""The events of a stream that is measured while it runs: enough for minutes at any pace."""
TOKENIZER_S: Final = 60.0
"""The longest time in which a gateway has the engine's tokenizer, in seconds."""
LIMITS: Final = QuotaLimits(10_000_000, 1_000_000_000, 100_000)
"""Quotas that are never reached, so that their cost is measured and not their refusals."""
_NGINX: Final = """
daemon off;
master_process off;
pid {dir}/pid;
error_log {dir}/error.log;
worker_rlimit_nofile 16384;
events {{ worker_connections 8192; }}
http {{
  access_log {dir}/access.log;
  client_body_temp_path {dir}/body;
  proxy_temp_path {dir}/proxy;
  fastcgi_temp_path {dir}/fastcgi;
  uwsgi_temp_path {dir}/uwsgi;
  scgi_temp_path {dir}/scgi;
  upstream engine {{ server {engine}; keepalive 64; }}
  server {{
    listen 127.0.0.1:{port} backlog=2048;
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""


@dataclass(frozen=True, slots=True)
class ServerUnderTest:
    """A server under test. `pid` is None for one that runs elsewhere, whose CPU time is unknown."""

    endpoint: ApiServer
    model: str = MODEL
    pid: int | None = None

    def cpu_s(self) -> float:
        return 0.0 if self.pid is None else cpu_s(self.pid)

    def resident_mb(self) -> float:
        return 0.0 if self.pid is None else resident_bytes(self.pid) / 1e6

    def chat(
        self, max_tokens: int = EVENTS_MAX, *, stream: bool = True, event_len: int | None = None
    ) -> bytes:
        """A chat request. `event_len` is the bytes of each event, for the paced engine."""
        question = "Tell me, in a few words, what a penstock is and what it feeds."
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "stream": stream,
            "temperature": 0,
        }
        paced = {} if event_len is None else {"event_len": event_len}
        return self.endpoint.request("/chat/completions", msgspec.json.encode({**body, **paced}))


@dataclass(frozen=True, slots=True)
class Engine:
    url: str

    @property
    def subject(self) -> ServerUnderTest:
        return ServerUnderTest(ApiServer(f"{self.url}/v1"))

    async def stats(self) -> Stats:
        return msgspec.json.decode(await get(f"{self.url}{STATS}"), type=Stats)


@contextlib.asynccontextmanager
async def paced_engine(
    interval_ms: float, checkout: Path | None = None, *, is_foreign: bool = False
) -> AsyncIterator[Engine]:
    """A paced engine. `checkout` is the source of another version; None for this one. `is_foreign`: it is of
    another make."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    module = "tests.bench.gateway.paced_engine"
    if checkout is not None and not (checkout / module.replace(".", "/")).with_suffix(".py").exists():
        module = "gateway.bench.paced_engine"  # the module's place in versions until December 2026
    argv = [sys.executable, "-m", module, "--port", str(port)]
    argv += ["--interval-ms", str(interval_ms), "--tokenizer", demo_model()]
    argv += ["--foreign"] if is_foreign else []
    async with service(argv, f"{url}/readyz", checkout):
        yield Engine(url)


@contextlib.asynccontextmanager
async def gateway(
    engine: Engine, checkout: Path | None = None, under: Sequence[str] = ()
) -> AsyncIterator[ServerUnderTest]:
    """Our gateway with everything on: key, schema, exact count, quotas, metrics, log line.

    `checkout` is the source of another version; None for this one. `under` is a command that runs the
    gateway, such as valgrind.
    """
    port, key = free_port(), development_key()
    config = development_config(port=port, key=key, model=MODEL, engine_url=engine.url, limits=LIMITS)
    server = ApiServer(f"http://127.0.0.1:{port}/v1", key)
    async with gateway_of(config, server, f"http://127.0.0.1:{port}/readyz", checkout, under) as subject:
        await _counts_exactly(server)
        yield subject


async def _counts_exactly(server: ApiServer) -> None:
    """Wait until the gateway has the engine's tokenizer: it has loaded it when it tells the model's context.
    Until then it estimates, which costs something else."""
    headers = {"authorization": f"Bearer {server.key}"}
    async with httpx.AsyncClient(headers=headers, trust_env=False) as client, asyncio.timeout(TOKENIZER_S):
        while True:
            listed = msgspec.json.decode((await client.get(f"{server.url}/models")).content, type=ModelList)
            if listed.data[0].max_model_len is not None:
                return
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def gateway_of(
    config: GatewayConfig,
    server: ApiServer,
    ready_url: str,
    checkout: Path | None = None,
    under: Sequence[str] = (),
) -> AsyncIterator[ServerUnderTest]:
    """A gateway with this configuration, as callers of `server` know it."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "gateway.toml"
        path.write_text(to_toml(config))
        argv = [*under, sys.executable, "-m", "gateway", "--config", str(path)]
        async with service(argv, ready_url, checkout) as process:
            yield ServerUnderTest(server, pid=process.pid)


@contextlib.asynccontextmanager
async def plain_relay(engine: Engine) -> AsyncIterator[ServerUnderTest]:
    """A relay of HTTP/1.1 on aiohttp, with nothing else around it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-m", "tests.bench.gateway.bare", "relay", "--port", str(port)]
    argv += ["--url", f"{engine.url}/v1/chat/completions"]
    async with service(argv, url) as process:
        yield ServerUnderTest(ApiServer(f"{url}/v1"), pid=process.pid)


@contextlib.asynccontextmanager
async def nginx(engine: Engine) -> AsyncIterator[ServerUnderTest | None]:
    """Debian's nginx, with one worker and `proxy_buffering off`. None where it is not installed."""
    binary = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    if binary is None:
        yield None
        return
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "nginx.conf"
        path.write_text(_NGINX.format(dir=directory, port=port, engine=engine.url.removeprefix("http://")))
        argv = [binary, "-e", f"{directory}/error.log", "-c", str(path)]
        async with service(argv, f"http://127.0.0.1:{port}/readyz") as process:
            yield ServerUnderTest(ApiServer(f"http://127.0.0.1:{port}/v1"), pid=process.pid)
