"""Members from DNS: what is taken of an answer, and what a resolver that fails or lies does to a pool."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Final, cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import msgspec
import pytest

from gateway.app import Gateway
from gateway.config.discovery import DiscoveryConfig
from gateway.config.whole import REPLICAS_MAX, ModelConfig, load
from gateway.discovery import dns as discovery_dns
from gateway.discovery.addresses import url_of, usable
from gateway.discovery.discovery import Discovery
from gateway.discovery.dns import DnsSource, Family, LookupFailed, SrvTarget, SystemResolver
from gateway.discovery.source import FAILURES, SourceProgress
from gateway.routing.members import Listed
from gateway.routing.replicas import Replicas
from shared.process.setting_values import ConfigError
from tests.fakes import VirtualClock
from tests.gateway.conftest import settings, until
from tests.gateway.fake_engine import FakeEngine, byte_bundle, unary


@dataclass
class FakeResolver:
    """Answers as it is told; what it is not told does not exist."""

    found: dict[tuple[str, str], Sequence[Any] | Exception] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)

    def _answer(self, name: str, kind: str) -> Sequence[Any]:
        self.asked.append((name, kind))
        answer = self.found.get((name, kind), ())
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def addresses(self, name: str, family: Family) -> Sequence[str]:
        await asyncio.sleep(0)
        return self._answer(name, family)

    async def targets(self, name: str) -> Sequence[SrvTarget]:
        return self._answer(name, "SRV")


class Asking:
    """A source that asks when the test says so."""

    def __init__(self, **config: Any) -> None:
        self.resolver = FakeResolver()
        self.clock = VirtualClock()
        self.taken: list[set[str]] = []
        self.progress = SourceProgress("m", self._take, self.clock)
        self.source = DnsSource(DiscoveryConfig(**config), self.resolver, self.clock, seed=1)

    def _take(self, listed: Sequence[Listed]) -> None:
        self.taken.append({one.url for one in listed})

    async def ask(self) -> set[str] | None:
        """What one round of questions lists; None when it lists nothing."""
        before = len(self.taken)
        await self.source.ask(self.progress)
        return self.taken[-1] if len(self.taken) > before else None


NAME = "engines.prod"
DOWN = LookupFailed("SERVFAIL")


async def test_every_address_of_a_name_is_a_member() -> None:
    asking = Asking(dns=f"{NAME}:8001")
    asking.resolver.found = {(NAME, "A"): ["10.0.0.1", "10.0.0.2", "10.0.0.1"], (NAME, "AAAA"): ["fd00::1"]}
    assert await asking.ask() == {"http://10.0.0.1:8001", "http://10.0.0.2:8001", "http://[fd00::1]:8001"}


async def test_a_resolver_that_fails_or_knows_nobody_empties_no_pool() -> None:
    asking = Asking(dns=f"{NAME}:8001")
    asking.resolver.found = {(NAME, "A"): ["10.0.0.1"]}
    await asking.ask()
    before = FAILURES.value("m")
    asking.resolver.found = {}
    assert await asking.ask() is None
    asking.resolver.found = {(NAME, "A"): DOWN, (NAME, "AAAA"): DOWN}
    assert await asking.ask() is None
    assert FAILURES.value("m") == before + 2
    assert asking.taken == [{"http://10.0.0.1:8001"}]


async def test_one_family_that_fails_keeps_its_own_addresses() -> None:
    asking = Asking(dns=f"{NAME}:8001")
    asking.resolver.found = {(NAME, "A"): ["10.0.0.1"], (NAME, "AAAA"): ["fd00::1"]}
    await asking.ask()
    asking.resolver.found = {(NAME, "A"): ["10.0.0.2"], (NAME, "AAAA"): DOWN}
    assert await asking.ask() == {"http://10.0.0.2:8001", "http://[fd00::1]:8001"}


async def test_srv_names_targets_and_ports_of_the_lowest_priority() -> None:
    asking = Asking(srv="_http._tcp.engines")
    asking.resolver.found = {
        ("_http._tcp.engines", "SRV"): [
            *(SrvTarget(1, "a.engines.", 8001), SrvTarget(1, "b.engines.", 8002)),
            *(SrvTarget(2, "spare.", 1), SrvTarget(1, ".", 8001), SrvTarget(1, "portless.", 0)),
        ],
        ("a.engines.", "A"): ["10.0.0.1"],
        ("b.engines.", "AAAA"): ["fd00::2"],
    }
    assert await asking.ask() == {"http://10.0.0.1:8001", "http://[fd00::2]:8002"}
    assert ("spare.", "A") not in asking.resolver.asked
    asking.resolver.found["b.engines.", "AAAA"] = DOWN
    assert await asking.ask() == {"http://10.0.0.1:8001", "http://[fd00::2]:8002"}
    asking.resolver.found["_http._tcp.engines", "SRV"] = DOWN
    assert await asking.ask() == {"http://10.0.0.1:8001", "http://[fd00::2]:8002"}


async def test_with_https_srv_targets_keep_the_names_that_their_certificates_have() -> None:
    asking = Asking(srv="_http._tcp.engines", scheme="https")
    asking.resolver.found = {("_http._tcp.engines", "SRV"): [SrvTarget(0, "a.engines.", 8001)]}
    assert await asking.ask() == {"https://a.engines:8001"}


async def test_a_hostile_answer_is_cut_and_cleaned() -> None:
    """10,000 targets are 256 questions, 16 at a time; addresses that nobody serves at are left out."""
    asking = Asking(srv="_http._tcp.engines")
    names = [f"t{i}." for i in range(10_000)]
    asking.resolver.found = {("_http._tcp.engines", "SRV"): [SrvTarget(0, name, 1) for name in names]}
    asking.resolver.found |= {(name, "A"): ["169.254.169.254", "127.0.0.1", "10.0.0.1"] for name in names}
    assert await asking.ask() == {"http://10.0.0.1:1"}
    assert len(asking.resolver.asked) == 1 + 2 * REPLICAS_MAX
    assert len(asking.source._known) == len(asking.resolver.asked)


NOT_FOR_EVERYBODY: Final = [
    *("169.254.169.254", "0.0.0.0", "0.1.2.3", "224.0.0.1", "255.255.255.255", "240.0.0.1"),
    *("100.100.100.200", "168.63.129.16", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "::", "ff02::1"),
    *("::ffff:169.254.169.254", "::ffff:127.0.0.1", "2002:7f00:1::", "127.0.0.1", "::1", "engine", ""),
    *("10.0.0.1/8", "010.0.0.1", "1", "169.254.170.2", "169.254.170.23", "192.0.0.192", "192.88.99.1"),
    *("fd00:ec2::23", "fd00:ec2::253", "fd20:ce::254", "fd00:c1::a9fe:a9fe", "fd00:42::42", "198.18.0.1"),
    *("2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:20::1", "fec0::1", "feff::1", "100::1", "4000::1"),
    *("64:ff9b::a9fe:a9fe", "64:ff9b:1::a9fe:a9fe", "64:ff9b::a00:1", "::127.0.0.1", "::10.0.0.1"),
    *("2002:a9fe:a9fe::1", "2002:a00:1::1", "::ffff:10.0.0.1", "::ffff:0:127.0.0.1", "8000::1", "e000::1"),
    *("e000::1", "127.255.0.1", "233.1.1.1", "fe00::1", "f000::1", "c000::1"),
]


def test_an_address_that_is_not_for_everybody_is_no_member() -> None:
    assert [one for one in NOT_FOR_EVERYBODY if usable(one, loopback=False) is not None] == []


@pytest.mark.parametrize(
    "address",
    [
        *("10.0.0.5", "192.168.1.4", "172.17.0.1", "100.64.0.1", "198.19.0.1", "8.8.8.8", "192.0.1.1"),
        *("fd12::1", "fc00::1", "fd00::1", "fd20:ce:1::254", "2001:db8::1", "2600::1", "3fff::1"),
    ],
)
def test_an_address_of_a_pod_or_of_the_internet_is_one(address: str) -> None:
    assert usable(address, loopback=False) == usable(address, loopback=True) == ip_address(address)


def test_this_machine_is_a_member_where_that_is_wanted() -> None:
    assert str(usable("127.0.0.1", loopback=True)) == "127.0.0.1"
    assert url_of("http", str(usable("::1", loopback=True)), 80) == "http://[::1]:80"
    for other in ("169.254.1.1", "::ffff:127.0.0.1", "::127.0.0.1", "0.0.0.0", "::"):
        assert usable(other, loopback=True) is None


async def test_it_is_asked_again_after_about_the_interval(log: io.StringIO) -> None:
    asking = Asking(dns=f"{NAME}:8001", interval_s=10)
    asking.resolver.found = {(NAME, "A"): DOWN}
    task = asyncio.create_task(asking.source.watch(asking.progress))
    await until(lambda: asking.clock.sleeping == 1)
    assert not asking.progress.first.is_set()
    asking.clock.advance(8.9)
    await asyncio.sleep(0)
    assert len(asking.resolver.asked) == 2
    asking.resolver.found = {(NAME, "A"): ["10.0.0.1"]}
    asking.clock.advance(2.2)
    await until(asking.progress.first.is_set)
    task.cancel()
    await asyncio.wait([task])
    await until(lambda: '"discovery.up"' in log.getvalue())
    events = [msgspec.json.decode(line) for line in log.getvalue().splitlines()]
    assert [line["event"] for line in events if line["event"].startswith("discovery.")] == [
        "discovery.down",
        "discovery.up",
    ]
    assert "SERVFAIL" in log.getvalue()


# -- on the wire ----------------------------------------------------------------------------------


class DnsServer(asyncio.DatagramProtocol):
    """A DNS server that answers from a table, over UDP, and over TCP where an answer is too long."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.rcode: int | None = None
        self.is_silent = False
        self.garbage: bytes | None = None
        self.over_tcp = 0
        self.address = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: Any) -> None:
        if self.is_silent:
            return
        wire = self.garbage if self.garbage is not None else self._answer(data).to_wire(max_size=65535)
        if len(wire) > 512 and self.garbage is None:
            short = dns.message.make_response(dns.message.from_wire(data))
            short.flags |= dns.flags.TC
            wire = short.to_wire()
        self.transport.sendto(wire, addr)

    async def serve_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.over_tcp += 1
        length = int.from_bytes(await reader.readexactly(2))
        wire = self._answer(await reader.readexactly(length)).to_wire(max_size=65535)
        writer.write(len(wire).to_bytes(2) + wire)
        await writer.drain()
        writer.close()

    def _answer(self, data: bytes) -> Any:
        query = dns.message.from_wire(data)
        answer = dns.message.make_response(query)
        question = query.question[0]
        name, kind = question.name.to_text(), dns.rdatatype.to_text(question.rdtype)
        if self.rcode is not None:
            answer.set_rcode(self.rcode)
        elif texts := self.records.get((name, kind)):
            answer.answer.append(dns.rrset.from_text_list(name, 5, "IN", kind, texts))
        elif not any(known == name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        return answer


@asynccontextmanager
async def dns_server() -> AsyncIterator[DnsServer]:
    loop, server = asyncio.get_running_loop(), DnsServer()
    async with AsyncExitStack() as stack:
        for _ in range(20):  # one port for both: another process may have it for one of them
            tcp = await asyncio.start_server(server.serve_tcp, "127.0.0.1", 0)
            stack.callback(tcp.close)
            address = tcp.sockets[0].getsockname()
            with contextlib.suppress(OSError):
                transport, _ = await loop.create_datagram_endpoint(lambda: server, local_addr=address)
                stack.callback(transport.close)
                break
        server.address = f"127.0.0.1:{address[1]}"
        yield server


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No question fails because this machine is slow."""
    monkeypatch.setattr(discovery_dns, "LOOKUP_S", 60.0)
    monkeypatch.setattr(discovery_dns, "TRY_S", 60.0)


@pytest.mark.usefixtures("patient")
async def test_answers_are_read_from_the_wire() -> None:
    async with dns_server() as server:
        resolver = SystemResolver(server.address)
        server.records["engines.test.", "A"] = ["10.0.0.1", "10.0.0.2"]
        server.records["_h._tcp.test.", "SRV"] = ["0 5 8001 a.test.", "1 5 8002 b.test."]
        assert sorted(await resolver.addresses("engines.test.", "A")) == ["10.0.0.1", "10.0.0.2"]
        assert not await resolver.addresses("engines.test.", "AAAA"), "no such records"
        assert not await resolver.addresses("nobody.test.", "A"), "no such name"
        assert sorted(await resolver.targets("_h._tcp.test.")) == [
            SrvTarget(0, "a.test.", 8001),
            SrvTarget(1, "b.test.", 8002),
        ]
        server.records["many.test.", "A"] = [f"10.0.{i // 256}.{i % 256}" for i in range(300)]
        assert len(await resolver.addresses("many.test.", "A")) == 300
        assert server.over_tcp >= 1


async def test_what_is_no_answer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_dns, "LOOKUP_S", 0.3)
    monkeypatch.setattr(discovery_dns, "TRY_S", 0.1)
    async with dns_server() as server:
        resolver = SystemResolver(server.address)
        server.rcode = dns.rcode.SERVFAIL
        with pytest.raises(LookupFailed):
            await resolver.addresses("engines.test.", "A")
        server.rcode, server.garbage = None, b"\x00" * 40
        with pytest.raises(LookupFailed):
            await resolver.addresses("engines.test.", "A")
        server.is_silent = True
        with pytest.raises(LookupFailed):
            await resolver.addresses("engines.test.", "A")
    with pytest.raises(LookupFailed):
        await resolver.addresses("x" * 70 + ".test.", "A")


@pytest.mark.usefixtures("patient")
async def test_a_gateway_finds_its_engines_by_srv_and_keeps_them_when_dns_is_gone() -> None:
    """Two fake engines on this machine; one is taken out of DNS, then DNS knows of nobody."""
    clock = VirtualClock()
    first, second = FakeEngine(bundle=byte_bundle()), FakeEngine(bundle=byte_bundle())
    async with dns_server() as server, first, second:
        ports = [engine.url.rpartition(":")[2] for engine in (first, second)]
        server.records["_h._tcp.test.", "SRV"] = [f"0 0 {port} engine.test." for port in ports]
        server.records["engine.test.", "A"] = ["127.0.0.1"]
        found = {"srv": "_h._tcp.test.", "nameserver": server.address, "loopback": True}
        config = load(settings(model={"replicas": [], "discovery": found}), {})
        first.script = second.script = unary()
        replicas = Replicas(config.models, clock)
        discovery = Discovery(config.models, replicas, {}, clock)
        works = [*discovery.works().values(), replicas.keep]
        tasks = [asyncio.ensure_future(work()) for work in works]
        await discovery.first()
        await until(lambda: len(replicas.urls("tiny")) == 2)
        assert {url.rpartition(":")[2] for url in replicas.urls("tiny")} == set(ports)
        del server.records["_h._tcp.test.", "SRV"][1]
        clock.advance(12)
        await until(lambda: len(replicas.urls("tiny")) == 1)
        failures = FAILURES.value("tiny")
        server.records.clear()
        await until(lambda: clock.sleeping > 0)
        clock.advance(12)
        await until(lambda: FAILURES.value("tiny") > failures)
        assert replicas.urls("tiny") == [f"http://127.0.0.1:{ports[0]}"]
        assert discovery.ages()["tiny",] >= 12
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_gateway_whose_dns_is_silent_starts_and_says_503(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.discovery.discovery.FIRST_S", 0.05)
    async with dns_server() as server:
        server.is_silent = True
        found = {"dns": "engines.test.:1", "nameserver": server.address}
        async with Gateway(load(settings(model={"replicas": [], "discovery": found}), {})) as gateway:
            assert gateway.lifecycle.is_ready
            assert gateway.replicas.urls("tiny") == []


# -- the configuration ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("discovery", "problem"),
    [
        ({}, "needs exactly one of dns, srv and kubernetes"),
        ({"dns": "a:1", "srv": "_h._tcp.a"}, "needs exactly one of dns, srv and kubernetes"),
        ({"dns": "engines"}, "dns 'engines' is no name and port"),
        ({"dns": "engines:0"}, "dns 'engines:0' is no name and port"),
        ({"dns": "http://engines:1"}, "is no name and port"),
        ({"srv": "two words"}, "srv 'two words' is no DNS name"),
        ({"dns": "a:1", "nameserver": "10.0.0.1"}, "nameserver '10.0.0.1' is no address and port"),
        ({"dns": "a:1", "interval_s": 0.1}, "discovery.interval_s"),
        ({"kubernetes": {"service": "Engines"}}, "discovery.kubernetes.service"),
        ({"kubernetes": {"service": "e", "api_url": "ftp://x"}}, "api_url 'ftp://x' is no base URL"),
        ({"kubernetes": {"service": "e", "api_url": "http://api"}}, "api_url must be https"),
    ],
)
def test_a_mistake_in_the_configuration_is_named(discovery: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(settings(model={"replicas": [], "discovery": discovery}), {})
    assert problem in str(caught.value)
    assert "models[0].discovery" in str(caught.value)


@pytest.mark.parametrize("model", [{"replicas": []}, {"discovery": {"dns": "a:1"}}])
def test_replicas_are_listed_or_found(model: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"models\.tiny: needs exactly one of replicas and discovery"):
        load(settings("http://a:1", model=model), {})


def test_outside_of_kubernetes_the_api_server_must_be_named() -> None:
    config = {"name": "m", "discovery": {"kubernetes": {"service": "e"}}}
    models = [msgspec.convert(config, ModelConfig)]
    with pytest.raises(ConfigError, match=r"models\.m\.discovery\.kubernetes: api_url is needed"):
        Discovery(models, Replicas(models), {})
