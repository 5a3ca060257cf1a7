"""Members from the EndpointSlices of a Service, against an API server that behaves and misbehaves."""

from __future__ import annotations

import asyncio
import io
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme

from gateway.config.discovery import DiscoveryConfig, KubernetesConfig
from gateway.config.whole import REPLICAS_MAX, ModelConfig
from gateway.discovery import endpoint_slices, kubernetes
from gateway.discovery.discovery import Discovery
from gateway.discovery.endpoint_slices import EndpointSlice, Slices, TooManySlices
from gateway.discovery.kubernetes import BACKOFF_S_MAX, KubernetesSource
from gateway.discovery.source import DETAIL_LEN_MAX, FAILURES, SourceProgress
from gateway.routing.health import Outcome
from gateway.routing.members import Listed, Standing, bounded
from shared.process import logs
from tests.fakes import VirtualClock
from tests.gateway.conftest import until
from tests.gateway.discovery.fake_kubernetes import FakeKubernetes, endpoint, endpoint_slice
from tests.gateway.routing.test_members import fleet_of

R, W, E = Standing.READY, Standing.WAITING, Standing.ENDING


class Watching:
    """A source that watches a fake API server, in virtual time."""

    def __init__(self, api: FakeKubernetes, folder: Path, **service: Any) -> None:
        self.api, self.folder, self.clock = api, folder, VirtualClock()
        (folder / "token").write_text("first\n")
        (folder / "namespace").write_text("prod")
        own = KubernetesConfig("engines", api_url=api.url, **service)
        self.config = DiscoveryConfig(kubernetes=own)
        self.source = KubernetesSource(self.config, {}, self.clock, seed=1, account=str(folder))
        self.members: dict[str, Standing] | None = None
        self.reports = 0
        self.progress = SourceProgress("k", self._take, self.clock)

    def _take(self, listed: Sequence[Listed]) -> None:
        self.reports += 1
        self.members = {one.url.removeprefix("http://"): one.standing for one in listed}

    async def lists(self, **members: Standing) -> None:
        """Wait until these are the members: by the last part of the address, as `e1`."""
        wanted = {f"10.0.0.{name[1:]}:8001": standing for name, standing in members.items()}
        await self.until(lambda: self.members == wanted)

    async def until(self, condition: Any) -> None:
        """Wait for it, with time that passes as fast as anybody sleeps."""

        def holds() -> bool:
            if self.clock.sleeping:
                self.clock.advance(BACKOFF_S_MAX)
            return bool(condition())

        await until(holds)


@asynccontextmanager
async def watching(tmp_path: Path, api: FakeKubernetes, **service: Any) -> AsyncIterator[Watching]:
    world = Watching(api, tmp_path, **service)
    task = asyncio.create_task(world.source.watch(world.progress))
    try:
        yield world
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled(), task.exception()


@pytest.fixture
async def api() -> AsyncIterator[FakeKubernetes]:
    async with FakeKubernetes() as api:
        yield api


# -- listing and watching -------------------------------------------------------------------------


async def test_changes_are_followed_as_they_come(tmp_path: Path, api: FakeKubernetes) -> None:
    api.put(endpoint_slice("a", [endpoint("10.0.0.1"), endpoint("10.0.0.2", ready=False)]))
    async with watching(tmp_path, api) as world:
        await world.lists(e1=R, e2=W)
        api.put(endpoint_slice("b", [endpoint("10.0.0.3")]))
        await world.lists(e1=R, e2=W, e3=R)
        leaving = endpoint("10.0.0.1", ready=False, serving=True, terminating=True)
        api.put(endpoint_slice("a", [leaving, endpoint("10.0.0.2")]))
        await world.lists(e1=E, e2=R, e3=R)
        api.delete("b")
        await world.lists(e1=E, e2=R)
        api.put(endpoint_slice("a", None))
        await world.lists()
        assert (api.lists, len(api.watches)) == (1, 1)


async def test_a_watch_that_ends_goes_on_where_it_was(tmp_path: Path, api: FakeKubernetes) -> None:
    """Also from a bookmark: nothing is listed again, and what happened between two watches is told."""
    api.put(endpoint_slice("a", [endpoint("10.0.0.1")]))
    async with watching(tmp_path, api) as world:
        await world.until(lambda: api.watching)
        api.bookmark()
        bookmarked = str(api.version)
        await world.until(lambda: world.source._version == bookmarked)
        api.end_watches()
        await world.until(lambda: not api.watching)
        api.put(endpoint_slice("a", [endpoint("10.0.0.1"), endpoint("10.0.0.2")]))
        await world.lists(e1=R, e2=R)
        assert (api.lists, api.watches[1]) == (1, bookmarked)


@pytest.mark.parametrize("gone_by_status", [True, False])
async def test_after_410_all_is_listed_again(
    tmp_path: Path, api: FakeKubernetes, *, gone_by_status: bool
) -> None:
    api.gone_by_status = gone_by_status
    api.put(endpoint_slice("a", [endpoint("10.0.0.1")]))
    api.put(endpoint_slice("b", [endpoint("10.0.0.2")]))
    async with watching(tmp_path, api) as world:
        await world.lists(e1=R, e2=R)
        await world.until(lambda: api.watching)
        api.end_watches()
        await world.until(lambda: not api.watching)
        del api.slices["b"]  # nobody is told
        api.forget()
        await world.lists(e1=R)
        assert api.lists == 2
        api.put(endpoint_slice("c", [endpoint("10.0.0.3")]))
        await world.lists(e1=R, e3=R)


async def test_a_cut_connection_is_made_again_and_changes_nothing(
    tmp_path: Path, api: FakeKubernetes
) -> None:
    api.put(endpoint_slice("a", [endpoint("10.0.0.1")]))
    async with watching(tmp_path, api) as world:
        await world.until(lambda: api.watching)
        for count in (2, 3):
            api.cut()
            await world.until(lambda count=count: len(api.watches) == count and api.watching)
            assert world.members == {"10.0.0.1:8001": R}
        api.put(endpoint_slice("a", [endpoint("10.0.0.9")]))
        await world.lists(e9=R)
        assert api.lists == 1


async def test_an_api_server_that_is_away_empties_nothing_and_is_not_stormed(
    tmp_path: Path, api: FakeKubernetes
) -> None:
    api.put(endpoint_slice("a", [endpoint("10.0.0.1")]))
    async with watching(tmp_path, api) as world:
        await world.lists(e1=R)
        await world.until(lambda: api.watching)
        before = FAILURES.value("k")
        api.statuses = [500, 503, 429, 302]
        api.cut()
        pauses: list[float] = []

        def waited() -> bool:
            if world.clock.sleeping:
                due_s = world.clock._sleepers[0][0]
                pauses.append(due_s - world.clock.monotonic())
                world.clock.advance(pauses[-1])
            return len(api.watches) == 2

        await until(waited)
        assert world.members == {"10.0.0.1:8001": R}
        assert FAILURES.value("k") == before + 5
        assert all(0.5 <= s <= BACKOFF_S_MAX for s in pauses), pauses
        assert pauses[3] > pauses[0]


async def test_an_empty_list_is_taken_at_its_word(tmp_path: Path, api: FakeKubernetes) -> None:
    async with watching(tmp_path, api) as world:
        await world.lists()
        assert world.progress.first.is_set()


# -- credentials ----------------------------------------------------------------------------------


async def test_the_token_is_read_again_for_every_request(tmp_path: Path, api: FakeKubernetes) -> None:
    async with watching(tmp_path, api) as world:
        await world.until(lambda: api.watching)
        api.token = "second"
        api.cut()
        await until(lambda: "first" in api.headers["Authorization"] and not api.watching)
        (tmp_path / "token").write_text("second")
        await world.until(lambda: api.watching)
        assert api.headers["Authorization"] == "Bearer second"


async def test_the_authorities_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    other.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    async with FakeKubernetes(tls=context) as api, watching(tmp_path, api) as world:
        before = FAILURES.value("k")
        await world.until(lambda: FAILURES.value("k") > before)
        assert not api.headers, "a server that is not trusted is told nothing"
        (tmp_path / "new").write_bytes(authority.cert_pem.bytes())
        (tmp_path / "new").rename(tmp_path / "ca.crt")
        await world.until(lambda: api.watching)
        (tmp_path / "ca.crt").unlink()  # those that were read last are still trusted
        watches = len(api.watches)
        api.cut()
        await world.until(lambda: len(api.watches) > watches)


async def test_a_missing_namespace_is_named(tmp_path: Path, api: FakeKubernetes, log: io.StringIO) -> None:
    async with watching(tmp_path, api) as world:
        (tmp_path / "namespace").unlink()
        await world.until(lambda: "namespace is not set" in log.getvalue())


@pytest.mark.parametrize(
    ("env", "url"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, "https://10.96.0.1:443"),
        ({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}, "https://[fd00::1]:6443"),
    ],
)
def test_kubernetes_tells_every_pod_where_the_api_server_is(env: dict[str, str], url: str) -> None:
    source = KubernetesSource(DiscoveryConfig(kubernetes=KubernetesConfig("engines")), env)
    assert source._api == url


# -- hostile answers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        b"no json\n",
        b'{"type": "MODIFIED"}\n',
        b'{"type": "MODIFIED", "object": {"metadata": {"name": 7}}}\n',
        b'{"type": "MODIFIED", "object": {"metadata": {"name": "a"}, "endpoints": [{"addresses": "x"}]}}\n',
        b'{"type": "ERROR", "object": {"code": 500, "message": "etcd is away"}}\n',
        b'{"type": "ERROR", "object": []}\n',
        b"[" * 100_000 + b"\n",
        b"x" * 3_000_000,
    ],
)
async def test_an_event_that_cannot_be_used_changes_nothing(
    tmp_path: Path, api: FakeKubernetes, line: bytes
) -> None:
    api.put(endpoint_slice("a", [endpoint("10.0.0.1")]))
    async with watching(tmp_path, api) as world:
        await world.until(lambda: api.watching)
        api.say(line)
        await world.until(lambda: len(api.watches) == 2 and api.watching)
        assert world.members == {"10.0.0.1:8001": R}


async def test_a_list_that_is_too_long_changes_nothing(
    tmp_path: Path, api: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "LIST_LEN_MAX", 10_000)
    api.put(endpoint_slice("a", [endpoint("10.0.0.1")] * 200))
    async with watching(tmp_path, api) as world:
        before = FAILURES.value("k")
        await world.until(lambda: FAILURES.value("k") > before + 1)
        assert world.members is None
        api.put(endpoint_slice("a", [endpoint("10.0.0.1")]))
        await world.lists(e1=R)


def test_what_a_source_says_of_its_failure_is_bounded(log: io.StringIO) -> None:
    logs.configure("gateway", stream=log)
    SourceProgress("k", lambda _: None, VirtualClock()).failed("x" * 2 * DETAIL_LEN_MAX)
    logs.close()
    assert json.loads(log.getvalue())["problem"] == "x" * DETAIL_LEN_MAX


async def test_ten_thousand_endpoints_leave_a_bounded_pool(tmp_path: Path, api: FakeKubernetes) -> None:
    """In slices of 1000, as Kubernetes makes them, with addresses that nobody may have."""
    for slot in range(10):
        addresses = [f"10.{slot}.{i // 256}.{i % 256}" for i in range(1000)]
        api.put(endpoint_slice(f"s{slot}", [endpoint(one) for one in addresses]))
    bad = [endpoint(one) for one in ("127.0.0.1", "169.254.169.254", "engine.test", "")]
    api.put(endpoint_slice("bad", [*bad, {"addresses": []}, {}]))
    async with watching(tmp_path, api) as world, fleet_of() as fleet:
        await world.until(lambda: world.members is not None)
        assert world.members is not None
        assert len(world.members) == 10_000
        await fleet.lists(*(f"http://{address}" for address in world.members))
        assert len(fleet.phases()) == REPLICAS_MAX


# -- slices, pure ---------------------------------------------------------------------------------


def members_of(*slices: dict[str, Any], port: str | None = None) -> dict[str, Standing]:
    found = Slices()
    found.replace([msgspec.convert(one, EndpointSlice) for one in slices])
    return bounded(found.members(port, "http", loopback=False))[0]


def test_an_endpoint_in_two_slices_is_ready_if_one_says_so() -> None:
    waiting, ending = endpoint("10.0.0.1", ready=False), endpoint("10.0.0.1", terminating=True)
    for slices in ([[waiting], [endpoint("10.0.0.1")]], [[endpoint("10.0.0.1")], [ending]]):
        found = members_of(*(endpoint_slice(str(i), one) for i, one in enumerate(slices)))
        assert found == {"http://10.0.0.1:8001": R}


def test_unset_conditions_mean_ready_and_terminating_wins() -> None:
    plain = {"addresses": ["10.0.0.1"]}
    unset = {"addresses": ["10.0.0.2", "10.0.0.3"], "conditions": {"ready": None}}
    both = endpoint("10.0.0.4", ready=True, terminating=True)
    found = members_of(endpoint_slice("a", [plain, unset, both]))
    assert found == {"http://10.0.0.1:8001": R, "http://10.0.0.2:8001": R, "http://10.0.0.4:8001": E}


def test_ports_are_named_or_numbered_or_the_only_one() -> None:
    ports = [
        {"name": "http", "port": 8001, "protocol": "TCP"},
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "metrics", "port": 9090},
        {"name": "open", "port": None},
    ]
    one = endpoint_slice("a", [endpoint("10.0.0.1")], ports=ports)
    assert list(members_of(one, port="http")) == ["http://10.0.0.1:8001"]
    assert list(members_of(one, port="9090")) == ["http://10.0.0.1:9090"]
    assert not members_of(one, port="dns")
    assert not members_of(one)
    assert not members_of(endpoint_slice("a", [endpoint("10.0.0.1")], ports=None))


def test_names_are_no_addresses_and_ipv6_has_brackets() -> None:
    assert not members_of(endpoint_slice("a", [endpoint("engine.test")], addressType="FQDN"))
    six = endpoint_slice("a", [endpoint("fd00::1")], addressType="IPv6")
    assert list(members_of(six)) == ["http://[fd00::1]:8001"]


def test_slices_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_slices, "SLICES_MAX", 2)
    one, two, three = (msgspec.convert(endpoint_slice(name, None), EndpointSlice) for name in ("a", "b", "c"))
    found = Slices()
    with pytest.raises(TooManySlices):
        found.replace([one, two, three])
    found.replace([one, two])
    with pytest.raises(TooManySlices):
        found.put(three)


async def test_a_pools_members_follow_a_service(
    tmp_path: Path, api: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the configuration to the pool: one that terminates drains, and is gone with its last request."""
    (tmp_path / "token").write_text("first")
    in_folder = partial(KubernetesSource, account=str(tmp_path))
    monkeypatch.setattr("gateway.discovery.discovery.KubernetesSource", in_folder)
    own = KubernetesConfig("engines", "prod", api_url=api.url)
    model = ModelConfig("m", discovery=DiscoveryConfig(kubernetes=own))
    api.put(endpoint_slice("a", [endpoint("10.0.0.1"), endpoint("10.0.0.2")]))
    async with fleet_of() as fleet:
        fleet.replicas.list_members("m", ())
        discovery = Discovery([model], fleet.replicas, {}, fleet.clock)
        (work,) = discovery.works().values()
        task = asyncio.ensure_future(work())
        await until(lambda: fleet.phases() == {"10.0.0.1:8001": "ready", "10.0.0.2:8001": "ready"})
        place = fleet.take(tried=["10.0.0.2:8001"])
        assert place is not None
        leaving = endpoint("10.0.0.1", ready=False, terminating=True)
        api.put(endpoint_slice("a", [leaving, endpoint("10.0.0.2")]))
        await until(lambda: fleet.phases()["10.0.0.1:8001"] == "draining")
        assert set(fleet.homes(20)) == {"10.0.0.2:8001"}
        api.put(endpoint_slice("a", [endpoint("10.0.0.2")]))
        await until(lambda: fleet.replicas._pools["m"].listed.keys() == {"http://10.0.0.2:8001"})
        assert fleet.phases()["10.0.0.1:8001"] == "draining"
        fleet.replicas.release(place, Outcome.WORKED)
        assert fleet.phases() == {"10.0.0.2:8001": "ready"}
        task.cancel()
        await asyncio.wait([task])
