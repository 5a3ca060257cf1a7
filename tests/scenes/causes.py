"""Causes of slow requests, made through real processes: `python -m tests.scenes.causes --blind SEED`.

A gateway, two engines on the demo model and Redis, started anew, with real sockets between them. Each cause
is made by what makes it in production: a core that is stopped, a replica that is killed, a client that does
not read. Then the id of the slow request is printed, and how to ask for it, and the product runs on.

    --cause NAME...   of `CAUSES`, by name or number; without any, they are listed
    --blind SEED      one by chance, which is not told before the end
    --check           that the first line of Why names each; of all, where none is named
    --wait S          how long the product runs on
    --logs DIR        where its logs are written, for `penstock trace --logs`
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import openai

from gateway.identity.keys import hash_key
from tests.gateway.redis_server import RedisServer, redis_server
from tests.services import MODEL_DIR, Service, admin_url, engine, engine_url, service, until
from tests.waiting import PATIENCE_S

OPERATOR: Final = "the-operators"
PAIR: Final = "pair"
"""A model with two engines, each behind a relay, with two slots and pages for `CONTEXT_LEN` tokens."""
LONE: Final = "lone"
"""The second of them alone, without a relay."""
CONTEXT_LEN: Final = 4096
KV_LEN: Final = 4096
"""Bytes of a token in the cache."""
LONG: Final = 3900
"""Tokens of an answer that lasts longer than anything here holds its request up."""
HELD_S: Final = 2.0
"""How long a cause holds its request up, in seconds: longer than all else takes on a busy machine."""
CORE_S: Final = 2.0
"""The time after which an engine gives up a core that does not answer, in seconds."""
POOR_PER_MIN: Final = 20
OPENS_THINKING: Final = "{%- if enable_thinking -%}{{ '<think>\\n' }}{%- endif -%}"


class Relay:
    """A TCP relay before an engine, which a network's troubles befall."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2])
        self.listening = 0
        """Its own port."""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._passing: set[asyncio.Task[Any]] = set()
        self._passes = asyncio.Event()
        self._passes.set()
        self._full: list[socket.socket] = []

    @property
    def id(self) -> str:
        """The replica's id at the gateway."""
        return f"127.0.0.1:{self.listening}"

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.listening)
        self.listening = self._server.sockets[0].getsockname()[1]

    async def aclose(self) -> None:
        self.hear()
        self.hand_on()
        await self._stop_listening()
        self.cut()
        await asyncio.gather(*self._passing, return_exceptions=True)

    async def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()  # connections that are there go on
            self._server = None

    def cut(self) -> None:
        """Break all connections."""
        for writer in list(self._writers):
            writer.transport.abort()

    def hold(self) -> None:
        """Pass nothing on that an engine says, until `hand_on`."""
        self._passes.clear()

    def hand_on(self) -> None:
        self._passes.set()

    async def turn_deaf(self) -> None:
        """Break all connections, and neither take nor refuse new ones, until `hear`."""
        await self._stop_listening()
        self.cut()
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        deaf.bind(("127.0.0.1", self.listening))
        deaf.listen(0)
        self._full = [deaf]
        for _ in range(3):  # they fill its backlog
            caller = socket.socket()
            caller.setblocking(False)
            caller.connect_ex(("127.0.0.1", self.listening))
            self._full.append(caller)

    def hear(self) -> None:
        for one in self._full:
            one.close()
        self._full = []

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)
        try:
            there, beyond = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, beyond}
        try:
            await asyncio.gather(self._pass(reader, beyond), self._pass(there, writer, self._passes))
        finally:
            self._writers -= {writer, beyond}

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event | None = None
    ) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while data := await reader.read(1 << 16):
                if gate is not None:
                    await gate.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


class House:
    """The processes, and what may be done to them."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self.directory = directory
        self._stack = stack
        self.engines: dict[str, Service] = {}
        """By their names: `left` and `right`."""
        self.relays: dict[str, Relay] = {}
        self.gateway: Service
        self.redis: RedisServer
        self.url = self.admin_url = ""
        self.client: aiohttp.ClientSession
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        self.redis = self._stack.enter_context(redis_server())
        self.client = await self._stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout())
        )
        model = thinking_model(self.directory)
        for name in ("left", "right"):
            self._start_engine(name, model)
        for name in ("left", "right"):
            url = await asyncio.to_thread(engine_url, self.engines[name])
            relay = self.relays[name] = Relay(url)
            await relay.listen()
            self._stack.push_async_callback(relay.aclose)
        lone = await asyncio.to_thread(engine_url, self.engines["right"])
        file = self.directory / "gateway.toml"
        urls = [f"http://{relay.id}" for relay in self.relays.values()]
        file.write_text(config(lone, urls, self.redis.url))
        self.gateway = self._stack.enter_context(service(["gateway", "--config", str(file)]))
        listening = await asyncio.to_thread(self.gateway.line, "gateway.listening")
        self.url = f"http://127.0.0.1:{listening['port']}"
        self.admin_url = await asyncio.to_thread(admin_url, self.gateway)
        await asyncio.to_thread(until, lambda: len(self.gateway.logged("tokenizer.loaded")) == 2)

    def _start_engine(self, name: str, model: Path, port: int = 0) -> None:
        folder = self.directory / name
        folder.mkdir(exist_ok=True)
        options = (
            *("--served-model-name", PAIR, "--port", str(port), "--max-num-seqs", "2"),
            *("--kv-cache-memory", str(CONTEXT_LEN * KV_LEN), "--swap-memory", "0"),
            *("--page-size", "16", "--dtype", "float32"),
            *("--core-timeout-s", str(CORE_S)),
        )
        self.engines[name] = self._stack.enter_context(engine(folder, *options, model=str(model)))

    async def restart(self, name: str) -> None:
        """Kill an engine, and start another at its port."""
        old = self.engines[name]
        port = int((await asyncio.to_thread(engine_url, old)).rpartition(":")[2])
        old.signal(signal.SIGKILL)
        await asyncio.to_thread(old.wait)
        self._start_engine(name, self.directory / "model", port)
        await asyncio.to_thread(self.engines[name].line, "engine.ready")

    def core(self, name: str, number: int) -> None:
        """Send a signal to an engine's core."""
        os.kill(self.engines[name].logged("core.started")[-1]["pid"], number)

    def logs(self, directory: Path) -> list[Path]:
        """Write the logs so far. Returns their files."""
        files = []
        for name, one in (("gateway", self.gateway), *self.engines.items()):
            files.append(directory / f"{name}.log")
            files[-1].write_text(one.text)
        return files

    async def until_well(self, name: str) -> None:
        """Wait until the gateway sends requests to a replica."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                told = await self.operator("GET", f"/replicas/{self.relays[name].id}")
                if (told["phase"], told["health"]) == ("ready", "well"):
                    return
                await asyncio.sleep(0.05)

    # -- requests -------------------------------------------------------------------------------------

    async def ask(self, model: str = LONE, *, tenant: str = "acme", **fields: Any) -> str:
        """Ask, and read the whole answer. Returns the request's id."""
        async with self.asking(model, tenant=tenant, **fields) as answer:
            await answer.read()
            return answer.headers["x-request-id"]

    @asynccontextmanager
    async def asking(
        self, model: str = LONE, *, tenant: str = "acme", session: str | None = None, **fields: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer whose headers are there."""
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        body = {"model": model, "max_tokens": 2, "stream": True, "ignore_eos": True, **fields}
        if path == "/v1/completions":
            body = {"prompt": words(4), **body}
        headers = {"authorization": f"Bearer {tenant}", "x-request-id": f"req-{uuid.uuid4().hex[:16]}"}
        if session is not None:
            headers["x-session-id"] = session
        async with self.client.post(self.url + path, json=body, headers=headers) as answer:
            yield answer

    @asynccontextmanager
    async def busy(self, count: int, **fields: Any) -> AsyncIterator[None]:
        """So many long answers of others, which have begun; their clients leave at the end."""
        async with AsyncExitStack() as stack:
            reading = []
            for _ in range(count):
                asked = {"tenant": "other", "max_tokens": LONG, **fields}
                answer = await stack.enter_async_context(self.asking(**asked))
                assert answer.status == 200, await answer.text()
                await answer.content.readany()
                reading.append(asyncio.create_task(answer.read()))
            yield
            for task in reading:
                task.cancel()

    async def session_at(self, name: str, prompt_len: int = 4) -> tuple[str, list[dict[str, str]]]:
        """A session whose home is this replica, where its first turn was, and the messages of the next."""
        for number in range(64):
            session, first = f"{uuid.uuid4().hex}-{number}", [user(words(prompt_len))]
            one = await self.record(await self.ask(PAIR, session=session, messages=first))
            if one["summary"]["replica"] == self.relays[name].id:
                return session, [*first, {"role": "assistant", "content": "It flows."}, user("Go on.")]
        raise AssertionError(f"no session is at home at {name}")

    # -- what operators see ---------------------------------------------------------------------------

    async def operator(self, method: str, path: str) -> Any:
        headers = {"authorization": f"Bearer {OPERATOR}"}
        async with self.client.request(method, f"{self.admin_url}/admin/v1{path}", headers=headers) as answer:
            return await answer.json()

    async def record(self, request_id: str) -> Any:
        """The record of a request that has ended."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = (await self.operator("GET", f"/requests/{request_id}")).get("data", [])
                if found and "line" in found[0]:
                    return found[0]
                await asyncio.sleep(0.02)


def words(count: int) -> str:
    """A prompt that no other begins with, of about so many tokens."""
    return " ".join([uuid.uuid4().hex[:6], *("water flows" for _ in range(count // 3))])


def thinking_model(directory: Path) -> Path:
    """The demo model with a longer context, and a template that may open the answer's thinking."""
    model = directory / "model"
    model.mkdir()
    for file in MODEL_DIR.iterdir():
        (model / file.name).symlink_to(file)
    for name, change in (("config.json", _longer), ("tokenizer_config.json", _thinks)):
        told = json.loads((MODEL_DIR / name).read_text())
        change(told)
        (model / name).unlink()
        (model / name).write_text(json.dumps(told))
    return model


def _longer(told: dict[str, Any]) -> None:
    told["max_position_embeddings"] = CONTEXT_LEN


def _thinks(told: dict[str, Any]) -> None:
    told["model_max_length"] = CONTEXT_LEN
    end = "{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
    assert told["chat_template"].endswith(end)
    opened = end.replace("{%- endif -%}", OPENS_THINKING + "{%- endif -%}")
    told["chat_template"] = told["chat_template"].removesuffix(end) + opened


def config(lone: str, pair: Sequence[str], redis: str) -> str:
    """The gateway's file."""
    tenants = {
        "acme": "{ requests_per_min = 100000, concurrent = 100 }",
        "other": "{}",
        "third": "{}",
        "poor": f"{{ requests_per_min = {POOR_PER_MIN} }}",
    }
    told = "".join(
        f'[[tenants]]\nid = "{name}"\nservice_tier = "priority"\nlimits = {limits}\n'
        f'[[keys]]\nid = "{name}"\nhash = "{hash_key(name)}"\ntenant = "{name}"\n'
        for name, limits in tenants.items()
    )
    return f"""
[listen]
port = 0
[admin]
port = 0
keys = [{{ id = "ops", hash = "{hash_key(OPERATOR)}" }}]
[timeouts]
connect_s = {HELD_S}
[redis]
url = "{redis}"
timeout_s = 5.0
[quotas]
store = "redis"
[[models]]
name = "{LONE}"
upstream_model = "{PAIR}"
replicas = ["{lone}"]
[[models]]
name = "{PAIR}"
replicas = {json.dumps(list(pair))}
{told}"""


# -- the causes -----------------------------------------------------------------------------------------


async def a_queue(house: House) -> str:
    async with house.busy(1), house.busy(1, tenant="third"):
        asked = asyncio.create_task(house.ask())
        await asyncio.sleep(HELD_S)
    return await asked


async def a_client_that_does_not_read(house: House) -> str:
    """Its answer is as long as no buffer between holds."""
    asked = {"model": LONE, "prompt": words(4), "max_tokens": 500, "stream": True}
    body = json.dumps({**asked, "ignore_eos": True, "logprobs": 5})
    request_id, port = f"req-{uuid.uuid4().hex[:16]}", int(house.url.rpartition(":")[2])
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", port))
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer acme\r\n"
            "connection: close\r\n"
            f"x-request-id: {request_id}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        await loop.sock_sendall(client, head.encode() + body.encode())
        await loop.sock_recv(client, 1024)
        await asyncio.sleep(2 * HELD_S)
        while await loop.sock_recv(client, 1 << 16):
            pass
    return request_id


async def a_core_that_hangs_for_good(house: House) -> str:
    """Another replica is asked."""
    for _ in range(5):  # a home that is busy, as on a machine that is, is not asked at all
        session, turn = await house.session_at("left")
        house.core("left", signal.SIGSTOP)
        try:
            request_id = await house.ask(PAIR, session=session, messages=turn)
        finally:
            house.core("left", signal.SIGCONT)
        if (await house.record(request_id))["line"]["attempts"] > 1:
            break
    return request_id


async def a_replica_that_does_not_accept(house: House) -> str:
    session, turn = await house.session_at("left")
    await house.relays["left"].turn_deaf()
    try:
        return await house.ask(PAIR, session=session, messages=turn)
    finally:
        house.relays["left"].hear()
        await house.relays["left"].listen()


async def a_core_that_hangs_for_a_while(house: House) -> str:
    house.core("right", signal.SIGSTOP)
    asked = asyncio.create_task(house.ask())
    await asyncio.sleep(CORE_S * 0.8)
    house.core("right", signal.SIGCONT)
    return await asked


async def a_quota_and_an_sdk(house: House) -> str:
    """OpenAI's own SDK waits as the refusal says, and tries again."""
    options: dict[str, Any] = {"api_key": "poor", "base_url": f"{house.url}/v1", "max_retries": 4}
    async with openai.AsyncOpenAI(**options) as client:
        for _ in range(2 * POOR_PER_MIN):
            answer = await client.completions.with_raw_response.create(model=LONE, prompt="a", max_tokens=1)
            if answer.retries_taken:
                return str(answer.headers["x-request-id"])
    raise AssertionError("nothing was refused")


async def a_replica_that_answers_late(house: House) -> str:
    session, turn = await house.session_at("left")
    house.relays["left"].hold()
    asked = asyncio.create_task(house.ask(PAIR, session=session, messages=turn))
    await asyncio.sleep(HELD_S)
    house.relays["left"].hand_on()
    return await asked


async def a_replica_that_breaks_off(house: House) -> str:
    session, turn = await house.session_at("left")
    house.relays["left"].hold()
    asked = asyncio.create_task(house.ask(PAIR, session=session, messages=turn))
    await asyncio.sleep(HELD_S)
    house.relays["left"].cut()
    house.relays["left"].hand_on()
    return await asked


async def a_long_text(house: House) -> str:
    """It is longer than the context, which counting it tells."""
    return await house.ask(PAIR, prompt=uuid.uuid4().hex + "\n\n" * 24_000)


async def a_grammar(house: House) -> str:
    few = {f"p{i}": {"type": "string", "maxLength": 30} for i in range(40)}
    wide = {f"q{i}": {"type": "object", "properties": few} for i in range(40)}
    schema = {"type": "object", "properties": {uuid.uuid4().hex: {"type": "null"}, **wide}}
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return await house.ask(PAIR, messages=[user("Go on.")], response_format=asked, ignore_eos=False)


async def thinking(house: House) -> str:
    thinks = {"enable_thinking": True}
    return await house.ask(PAIR, messages=[user("Go on.")], max_tokens=500, chat_template_kwargs=thinks)


async def a_home_that_drains(house: House) -> str:
    """A conversation's next turn, whose history another replica has."""
    session, turn = await house.session_at("left", prompt_len=3000)
    await house.operator("POST", f"/replicas/{house.relays['left'].id}/drain")
    try:
        return await house.ask(PAIR, session=session, messages=turn)
    finally:
        await house.operator("POST", f"/replicas/{house.relays['left'].id}/undrain")


async def a_home_that_was_restarted(house: House) -> str:
    session, turn = await house.session_at("left", prompt_len=3000)
    await house.restart("left")
    await house.until_well("left")
    return await house.ask(PAIR, session=session, messages=turn)


async def a_store_that_is_slow(house: House) -> str:
    house.redis.stop_still()
    asked = asyncio.create_task(house.ask())
    await asyncio.sleep(HELD_S)
    house.redis.go_on()
    return await asked


async def a_preemption(house: House) -> str:
    async with house.busy(1, service_tier="priority"):
        begun = asyncio.Event()

        async def low() -> str:
            async with house.asking(service_tier="flex", max_tokens=50) as answer:
                await answer.content.readany()
                begun.set()
                await answer.read()
                return answer.headers["x-request-id"]

        asked = asyncio.create_task(low())
        await begun.wait()
        async with house.busy(1, service_tier="priority"):
            await asyncio.sleep(HELD_S)
        return await asked


async def a_long_prompt(house: House) -> str:
    return await house.ask(PAIR, prompt=words(3000))


async def a_full_cache(house: House) -> str:
    async with house.busy(1, prompt=words(2700), max_tokens=1300):
        asked = asyncio.create_task(house.ask(prompt=words(1500)))
        await asyncio.sleep(2 * HELD_S)
    return await asked


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@dataclass(frozen=True, slots=True)
class Cause:
    make: Callable[[House], Awaitable[str]]
    says: str
    """The first line of Why, as a pattern."""


TIME: Final = r"(\d+ min )?\d+(\.\d+)?( ms| s)"
ENGINE: Final = r"127\.0\.0\.1:\d+"
CAUSES: Final = {
    "queue": Cause(
        a_queue, rf"queued {TIME}: no slot \(2 sequences run\).*; that engine had tenant other's req-"
    ),
    "reader": Cause(a_client_that_does_not_read, rf"{TIME}: the client did not read its answer"),
    "hung": Cause(a_core_that_hangs_for_good, rf"{TIME}: {ENGINE} hung before it began this"),
    "deaf": Cause(a_replica_that_does_not_accept, rf"{TIME}: {ENGINE} did not accept a connection"),
    "handover": Cause(
        a_core_that_hangs_for_a_while,
        rf"{TIME}: between the engine's API process and its core; the core process did not answer",
    ),
    "quota": Cause(
        a_quota_and_an_sdk,
        rf"{TIME} before it: (most likely )?its first try, req\S*, was refused by the tenant's quota of req",
    ),
    "late": Cause(
        a_replica_that_answers_late, rf"{TIME}: between the gateway and {ENGINE}, which began its answer"
    ),
    "broken": Cause(a_replica_that_breaks_off, rf"{TIME}: {ENGINE} broke off"),
    "tokenizing": Cause(a_long_text, rf"tokenizing took {TIME}"),
    "grammar": Cause(
        a_grammar,
        rf"(making and trying its grammar took {TIME}|queued {TIME}: its grammar was being compiled)",
    ),
    "thinking": Cause(thinking, rf"{TIME}: thinking, \d+ of its \d+ tokens"),
    "drained": Cause(
        a_home_that_drains,
        rf"prefill of {TIME}.*; .* tokens of it were at {ENGINE}, which takes no more requests",
    ),
    "restarted": Cause(
        a_home_that_was_restarted,
        rf"prefill of {TIME}.*; .* tokens of it were at {ENGINE}, which was restarted",
    ),
    "store": Cause(a_store_that_is_slow, rf"{TIME}: taking a seat: the store of quotas \(Redis"),
    "preempted": Cause(a_preemption, rf"preempted for {TIME}: a request of a higher class took its place"),
    "prefill": Cause(a_long_prompt, rf"prefill of {TIME}: 3,\d+ prompt tokens of its own in"),
    "pages": Cause(a_full_cache, rf"queued {TIME}: no pages \(1 sequence holds \d+ %\)"),
}
"""The causes, by their names."""


@asynccontextmanager
async def opened() -> AsyncIterator[House]:
    """The product, started."""
    with tempfile.TemporaryDirectory(prefix="causes-") as directory:
        async with AsyncExitStack() as stack:
            house = House(Path(directory), stack)
            await house.start()
            yield house


async def checked(house: House, name: str) -> str | None:
    """Make a cause. Returns what is wrong with what is said of it; None where it is named first."""
    cause = CAUSES[name]
    request_id = await cause.make(house)
    causes = (await house.record(request_id)).get("causes")
    if causes and re.match(cause.says, causes[0]):
        return None
    return f"{name}, {request_id}:\n  " + "\n  ".join(causes or ["nothing"])


async def run(options: argparse.Namespace) -> int:
    names = list(CAUSES)
    if options.blind is not None:
        names = [random.Random(options.blind).choice(names)]
    elif options.cause:
        names = [one if one in CAUSES else names[int(one) - 1] for one in options.cause]
    elif options.cause is not None or not options.check:
        print("\n".join(f"{number:2} {name}" for number, name in enumerate(names, 1)))
        return 0
    async with opened() as house:
        if options.check:
            problems = []
            for name in names:
                began_s = time.monotonic()
                problem = await checked(house, name)
                print(
                    f"{name:12} {time.monotonic() - began_s:5.1f} s  {'ok' if problem is None else problem}"
                )
                problems += [] if problem is None else [problem]
            return 1 if problems else 0
        request_id = await CAUSES[names[0]].make(house)
        await house.record(request_id)
        folder = Path(options.logs or tempfile.mkdtemp(prefix="causes-logs-"))
        folder.mkdir(parents=True, exist_ok=True)
        files = " ".join(map(str, house.logs(folder)))
        print(
            f"request   {request_id}\nconsole   {house.admin_url}/console   key {OPERATOR}\n"
            f"command   PENSTOCK_ADMIN_KEY={OPERATOR} penstock trace {request_id} "
            f"--admin-url {house.admin_url}\n"
            f"logs      penstock trace {request_id} --logs {files}\n"
            f"It runs for {options.wait:g} s.",
            flush=True,
        )
        await asyncio.sleep(options.wait)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scenes.causes")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--cause", metavar="NAME", nargs="*", help="names or numbers; without any, they are listed"
    )
    which.add_argument("--blind", metavar="SEED", type=int, help="one by chance, which is not told")
    parser.add_argument("--check", action="store_true", help="that Why names it first; without a cause, all")
    parser.add_argument("--wait", metavar="S", type=float, default=600.0)
    parser.add_argument("--logs", metavar="DIR")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
