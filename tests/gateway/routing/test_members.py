"""Members of pools that are added, drained and removed while requests run."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import pairwise, product
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.app import Gateway
from gateway.config.whole import REPLICAS_MAX, ModelConfig, load
from gateway.identity.keys import hash_key
from gateway.request.record import UPSTREAM_ATTEMPTS, forget_replica, observe_attempt
from gateway.routing import replicas as pools
from gateway.routing.health import Outcome
from gateway.routing.lost_homes import REMEMBERED_MS, LostHome, LostReason
from gateway.routing.maglev import STEP_LEN, Table, key_of
from gateway.routing.members import (
    HANDOVER_S,
    MOVES,
    DrainCause,
    Listed,
    MemberPhase,
    Standing,
    bounded,
    phase_of,
)
from gateway.routing.policy import SLOW_START_MS, Affinity, RouteReason, nowhere
from gateway.routing.replicas import ENGINE_DRAIN_S, LINGER_S, SWEEP_S, Placement, Replica, Replicas
from shared.wire.ids import ReplicaId
from shared.wire.load_report import LoadReport
from tests.effort import drawn
from tests.fakes import VirtualClock
from tests.gateway.conftest import CHAT, KEY, until
from tests.gateway.fake_engine import FakeEngine, byte_bundle, chunk, stream, unary

A, B, C = "http://a:1", "http://b:1", "http://c:1"


class Fleet:
    """Replicas that are kept as a gateway keeps them, in virtual time."""

    def __init__(self, *urls: str, models: Iterable[str] = "m") -> None:
        self.clock = VirtualClock()
        configs = [ModelConfig(name=name, replicas=urls) for name in models]
        self.replicas = Replicas(configs, self.clock)

    async def lists(self, *listed: str | Listed, model: str = "m") -> None:
        """List members, and wait until they are taken over."""
        entries = [Listed(one) if isinstance(one, str) else one for one in listed]
        self.replicas.list_members(model, entries)
        await self.settled()

    async def settled(self) -> None:
        await until(lambda: not any(pool.is_stale for pool in self.replicas._pools.values()))

    async def pass_s(self, seconds: float) -> None:
        """Let time pass, one look after members at a time."""
        for _ in range(int(seconds / SWEEP_S) + 1):
            self.clock.advance(SWEEP_S)
            await asyncio.sleep(0)
        await self.settled()

    def take(self, session: int = 1, tried: Iterable[str] = (), model: str = "m") -> Placement | None:
        ids = {ReplicaId(id_) for id_ in tried}
        return self.replicas.place(model, Affinity(0, session, 0, 0, 10), ids)

    def lost(self, session: int = 1) -> LostHome | None:
        """What the next turn of a conversation finds of its home."""
        place = self.replicas.place("m", Affinity(0, session, 0, 50, 100))
        assert place is not None
        self.replicas.release(place, Outcome.NEUTRAL)
        return self.replicas.lost_home(place)

    def homes(self, count: int = 400) -> list[str]:
        """The members at which conversations are at home."""
        homes: list[str] = []
        for session in range(count):
            place = self.take(key_of(b"%d" % session))
            assert place is not None
            homes.append(place.replica.id)
            self.replicas.release(place, Outcome.NEUTRAL)
        return homes

    def at(self, url: str) -> Replica:
        return self.replicas._by_url[url]

    def phases(self) -> dict[str, str]:
        return {one.id: one.phase.value for one in self.replicas.members()}


@asynccontextmanager
async def fleet_of(*urls: str, models: Iterable[str] = "m") -> AsyncIterator[Fleet]:
    fleet = Fleet(*urls, models=models)
    tasks = [asyncio.create_task(fleet.replicas.keep()), asyncio.create_task(fleet.replicas.sweep())]
    await asyncio.sleep(0)
    await fleet.settled()
    try:
        yield fleet
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# -- phases ---------------------------------------------------------------------------------------


def test_a_phase_follows_from_what_is_known() -> None:
    ready, waiting, ending = Standing.READY, Standing.WAITING, Standing.ENDING
    operator = {DrainCause.OPERATOR}
    assert phase_of([ready], (), 0) is MemberPhase.READY
    assert phase_of([waiting], (), 3) is MemberPhase.JOINING
    assert phase_of([waiting, ready], (), 0) is MemberPhase.READY
    assert phase_of([ready, ending], (), 0) is MemberPhase.DRAINING
    assert phase_of([ready], operator, 0) is MemberPhase.DRAINING
    assert phase_of([], operator, 1) is MemberPhase.DRAINING
    assert phase_of([], (), 0) is MemberPhase.GONE


def test_the_table_has_every_move_that_can_follow_from_what_is_known() -> None:
    """But for the dead, who stay so: a member that comes back is another one."""
    standings = [[], [Standing.READY], [Standing.WAITING], [Standing.ENDING]]
    known = product(standings, [(), (DrainCause.ENGINE,)], (0, 1))
    phases = {phase_of(*facts) for facts in known}
    assert phases == set(MemberPhase)
    for before, after in product(phases - {MemberPhase.GONE}, phases):
        assert before is after or after in MOVES[before]
    assert not MOVES[MemberPhase.GONE]


def test_a_move_that_is_not_in_the_table_is_a_bug() -> None:
    fleet = Fleet(A)
    gone = fleet.at(A)
    fleet.replicas._forget(gone)
    with pytest.raises(AssertionError, match="gone -> ready"):
        gone.to(MemberPhase.READY)


# -- membership -----------------------------------------------------------------------------------


async def test_a_member_that_is_added_takes_its_share_and_starts_slowly() -> None:
    async with fleet_of(A, B) as fleet:
        before = fleet.homes()
        await fleet.lists(A, B, C)
        new = fleet.at(C)
        assert new.phase is MemberPhase.READY
        assert new.view.since_ms == int(fleet.clock.monotonic() * 1000)
        after = fleet.homes()
        moved = [other for one, other in zip(before, after, strict=True) if one != other]
        assert 0.25 < moved.count("c:1") / len(after) < 0.42
        assert sum(other != "c:1" for other in moved) <= 0.05 * len(after), "others stay where they are"


async def test_a_member_that_leaves_hands_on_its_own_share_alone() -> None:
    async with fleet_of(A, B, C) as fleet:
        before = fleet.homes()
        await fleet.lists(A, C)
        moves = list(zip(before, fleet.homes(), strict=True))
        assert sum(one != other for one, other in moves if one != "b:1") <= 0.05 * len(moves)
        assert {other for one, other in moves if one == "b:1"} == {"a:1", "c:1"}


async def test_a_member_that_leaves_keeps_its_requests_and_gets_no_new_ones() -> None:
    async with fleet_of(A, B) as fleet:
        place = fleet.take(tried=["a:1"])
        assert place is not None
        await fleet.lists(A)
        assert fleet.phases() == {"a:1": "ready", "b:1": "draining"}
        assert set(fleet.homes(20)) == {"a:1"}
        gone: list[Replica] = []
        fleet.replicas.on_gone = gone.append
        fleet.replicas.release(place, Outcome.WORKED)
        assert fleet.phases() == {"a:1": "ready"}
        assert gone == [place.replica]
        assert gone[0].phase is MemberPhase.GONE


async def test_one_that_comes_back_before_its_last_request_ended_is_the_same() -> None:
    async with fleet_of(A, B) as fleet:
        place = fleet.take(tried=["a:1"])
        assert place is not None
        await fleet.lists(A)
        await fleet.lists(A, B)
        assert fleet.at(B) is place.replica
        fleet.replicas.release(place, Outcome.WORKED)
        assert fleet.phases() == {"a:1": "ready", "b:1": "ready"}


async def test_one_whose_requests_never_end_is_forgotten_in_time() -> None:
    async with fleet_of(A, B) as fleet:
        place = fleet.take(tried=["a:1"])
        assert place is not None
        await fleet.lists(A)
        fleet.clock.advance(LINGER_S)
        await until(lambda: fleet.phases() == {"a:1": "ready"})
        await fleet.lists(A, B)
        assert fleet.at(B) is not place.replica
        fleet.replicas.release(place, Outcome.FAILED)
        assert fleet.phases() == {"a:1": "ready", "b:1": "ready"}


async def test_those_that_leave_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "LEAVING_MAX", 3)
    async with fleet_of(A) as fleet:
        for i in range(6):
            await fleet.lists(f"http://e{i}:1")
            assert fleet.take() is not None
        assert len(fleet.phases()) == 4, "the one that is there, and three that leave"


async def test_a_whole_pool_is_exchanged_without_a_moment_in_which_none_is_ready() -> None:
    async with fleet_of(*(f"http://old{i}:1" for i in range(40))) as fleet:
        new = [Listed(f"http://new{i}:1") for i in range(120)]
        fleet.replicas.list_members("m", new)
        seen = set()
        while fleet.replicas._pools["m"].is_stale or "old" in str(fleet.replicas.urls("m")):
            place = fleet.take()
            assert place is not None
            seen.add(place.replica.id[:3])
            await asyncio.sleep(0)
        assert seen == {"old"}
        assert set(fleet.homes(50)) <= {f"new{i}:1" for i in range(120)}
        assert fleet.at("http://new0:1").view.since_ms > 0


async def test_what_is_listed_while_a_table_is_built_counts_in_the_end() -> None:
    async with fleet_of(A) as fleet:
        fleet.replicas.list_members("m", [Listed(f"http://e{i}:1") for i in range(100)])
        for _ in range(3):
            await asyncio.sleep(0)
        fleet.replicas.list_members("m", [Listed(B), Listed(C)])
        await until(lambda: fleet.phases() == {"b:1": "ready", "c:1": "ready"})
        assert set(fleet.homes(20)) == {"b:1", "c:1"}


async def test_a_pool_that_was_empty_starts_at_full_trust() -> None:
    async with fleet_of() as fleet:
        assert fleet.take() is None
        await fleet.lists(A, B)
        assert fleet.at(A).view.since_ms == int(fleet.clock.monotonic() * 1000) - SLOW_START_MS


async def test_a_member_that_is_not_ready_or_ends_is_passed_over() -> None:
    async with fleet_of(A) as fleet:
        await fleet.lists(A, Listed(B, Standing.WAITING), Listed(C, Standing.ENDING))
        assert fleet.phases() == {"a:1": "ready", "b:1": "joining", "c:1": "draining"}
        assert set(fleet.homes(20)) == {"a:1"}
        assert fleet.replicas.urls("m") == [A, B]
        await fleet.lists(Listed(A, Standing.WAITING), B, C)
        assert set(fleet.homes(20)) == {"b:1", "c:1"}


async def test_models_share_a_member_until_the_last_of_them_lists_it_no_more() -> None:
    async with fleet_of(A, B, models="mn") as fleet:
        await fleet.lists(A, model="m")
        assert fleet.phases() == {"a:1": "ready", "b:1": "ready"}
        assert set(fleet.homes(20)) == {"a:1"}
        assert fleet.take(tried=["a:1"], model="n") is not None
        assert fleet.replicas.counts() == {("m", "ready"): 1, ("n", "ready"): 2}
        await fleet.lists(A, model="n")
        assert fleet.phases() == {"a:1": "ready", "b:1": "draining"}
        assert fleet.replicas.counts()["none", "draining"] == 1


async def test_one_url_has_one_protocol() -> None:
    models = [ModelConfig(name="m", replicas=(A,)), ModelConfig(name="n", replicas=(B,), protocol="http1")]
    replicas = Replicas(models, VirtualClock())
    replicas.list_members("n", [Listed(A), Listed(B)])
    pool = replicas._pools["n"]
    await replicas._rebuild(pool)
    assert [one.id for one in pool.replicas] == ["b:1"]
    assert set(replicas._by_url[A].standings) == {"m"}


# -- drains ---------------------------------------------------------------------------------------


async def test_an_operators_drain_lasts_until_it_is_taken_back() -> None:
    async with fleet_of(A, B) as fleet:
        place = fleet.take(tried=["a:1"])
        assert place is not None
        fleet.replicas.drain(place.replica, DrainCause.OPERATOR)
        assert set(fleet.homes(20)) == {"a:1"}, "at once, before the table is built"
        await fleet.settled()
        await fleet.lists(A, B, C)
        fleet.replicas.release(place, Outcome.WORKED)
        assert fleet.phases() == {"a:1": "ready", "b:1": "draining", "c:1": "ready"}
        fleet.replicas.undrain(place.replica, DrainCause.OPERATOR)
        await fleet.settled()
        assert set(fleet.homes()) == {"a:1", "b:1", "c:1"}


async def test_drains_that_are_handed_over_count_for_those_that_are_listed_soon() -> None:
    async with fleet_of(A, B) as fleet:
        fleet.replicas.take_drained(["b:1", "c:1"])
        await fleet.settled()
        assert set(fleet.homes(20)) == {"a:1"}
        await fleet.lists(A, B, C)
        assert fleet.phases() == {"a:1": "ready", "b:1": "draining", "c:1": "draining"}
        assert sorted(fleet.replicas.drained) == ["b:1", "c:1"]
        assert set(fleet.homes(20)) == {"a:1"}
        await fleet.lists(A, B)
        await fleet.pass_s(HANDOVER_S)
        await fleet.lists(A, B, C)
        assert fleet.phases()["c:1"] == "ready", "it is another one"
        fleet.replicas.take_drained([])
        await fleet.settled()
        assert set(fleet.homes()) == {"a:1", "b:1", "c:1"}


async def test_while_the_last_one_drains_the_pool_has_none() -> None:
    async with fleet_of(A) as fleet:
        fleet.replicas.drain(fleet.at(A), DrainCause.OPERATOR)
        assert fleet.take() is None
        assert fleet.replicas.urls("m") == []


async def test_an_engines_word_that_it_drains_counts_for_a_time() -> None:
    async with fleet_of(A, B) as fleet:
        fleet.replicas.drain(fleet.at(B), DrainCause.ENGINE)
        await fleet.pass_s(ENGINE_DRAIN_S / 2)
        fleet.replicas.drain(fleet.at(B), DrainCause.ENGINE)
        await fleet.pass_s(ENGINE_DRAIN_S / 2 + 1)
        assert fleet.at(B).phase is MemberPhase.DRAINING
        await fleet.pass_s(ENGINE_DRAIN_S)
        assert fleet.at(B).phase is MemberPhase.READY
        assert set(fleet.homes(50)) == {"a:1", "b:1"}


async def test_a_drain_moves_conversations_once() -> None:
    async with fleet_of(A, B, C) as fleet:
        fleet.replicas.drain(fleet.at(B), DrainCause.OPERATOR)
        await fleet.settled()
        during = fleet.homes()
        await fleet.lists(A, C)
        assert fleet.homes() == during


# -- bounds ---------------------------------------------------------------------------------------


def test_of_ten_thousand_members_every_gateway_takes_the_same() -> None:
    many = [Listed(f"http://10.0.{i // 256}.{i % 256}:8001") for i in range(10_000)]
    taken, left_out = bounded(many)
    assert (len(taken), left_out) == (REPLICAS_MAX, 10_000 - REPLICAS_MAX)
    assert bounded(reversed(many))[0].keys() == taken.keys()
    assert bounded([Listed(A), Listed(A + "/"), Listed(A, Standing.ENDING)]) == ({A: Standing.ENDING}, 0)


async def test_a_hostile_list_leaves_a_pool_of_the_bounded_size() -> None:
    async with fleet_of(A) as fleet:
        await fleet.lists(*(f"http://10.0.{i // 256}.{i % 256}:8001" for i in range(10_000)))
        assert len(fleet.phases()) == len(fleet.replicas._pools["m"].replicas) == REPLICAS_MAX


@pytest.mark.parametrize("size", [1, 3, 64, REPLICAS_MAX])
def test_a_table_is_built_in_small_steps(size: int) -> None:
    """The longest step of 256 members takes about 2 ms, the whole 90."""
    names = [f"engine-{i}:8001" for i in range(size)]
    table = Table(names, is_filled=False)
    steps = 1 + sum(1 for _ in table.fill())
    assert list(table._slots) == list(Table(names)._slots)
    assert min(table._slots) >= 0
    assert steps >= size * 100 // STEP_LEN


def test_a_replica_that_is_gone_leaves_no_series() -> None:
    replica = Fleet("http://churn:1", "http://stays:1")
    for url in ("http://churn:1", "http://stays:1"):
        observe_attempt(replica.at(url).id)
    forget_replica(replica.at("http://churn:1"))
    left = {labels[0] for labels in UPSTREAM_ATTEMPTS._series}
    assert "stays:1" in left
    assert "churn:1" not in left


CHANGES = st.lists(
    st.one_of(
        st.sets(st.sampled_from("abcdef"), max_size=6),
        st.tuples(st.sampled_from(["drain", "undrain", "take", "release"]), st.sampled_from("abcdef")),
    ),
    max_size=40,
)


@settings(max_examples=drawn(20, whole=300), deadline=None)
@given(changes=CHANGES)
def test_whatever_changes_pools_stay_sound(changes: list[set[str] | tuple[str, str]]) -> None:
    """Ready members alone are chosen, one is chosen if any is ready, and nobody lingers."""

    async def run() -> None:
        async with fleet_of(A, B) as fleet:
            places: list[Placement] = []
            for change in changes:
                if isinstance(change, set):
                    await fleet.lists(*(f"http://{name}:1" for name in change))
                    continue
                what, name = change
                member = fleet.replicas.find(f"{name}:1")
                if what == "release" and places:
                    fleet.replicas.release(places.pop(0), Outcome.WORKED)
                elif what == "take":
                    place = fleet.take(key_of(name.encode()))
                    assert (place is not None) is ("ready" in fleet.phases().values())
                    if place is not None:
                        assert place.replica.phase is MemberPhase.READY
                        places.append(place)
                elif member is not None and what in ("drain", "undrain"):
                    getattr(fleet.replicas, what)(member, DrainCause.OPERATOR)
                await fleet.settled()
            for place in places:
                fleet.replicas.release(place, Outcome.WORKED)
            listed = fleet.replicas._pools["m"].listed
            assert set(fleet.replicas._by_url) == set(listed)
            urls = {one.url for one in fleet.replicas.members() if one.phase is MemberPhase.READY}
            assert {one.url for one in fleet.replicas._pools["m"].replicas} == urls

    asyncio.run(run())


# -- a gateway whose file changes -----------------------------------------------------------------


def write(file: Path, *engines: FakeEngine) -> None:
    urls = ", ".join(f'"{engine.url}"' for engine in engines)
    file.write_text(
        f'[listen]\nport = 0\n[[models]]\nname = "tiny"\nreplicas = [{urls}]\n[[tenants]]\nid = "acme"\n'
        f'[[keys]]\nid = "k"\nhash = "{hash_key(KEY)}"\ntenant = "acme"\n'
    )


async def test_replicas_of_a_file_that_changed_are_taken_over_without_a_lost_request(
    tmp_path: Path, log: io.StringIO
) -> None:
    """A stream that runs at a replica which is removed goes on to its end; requests that are sent all the
    time are all answered."""
    file, finish = tmp_path / "gateway.toml", asyncio.Event()
    engines = [FakeEngine(bundle=byte_bundle()) for _ in range(3)]
    old, *new = engines
    async with old, new[0], new[1]:
        write(file, old)
        new[0].script = new[1].script = unary()
        old.script = stream(chunk("a"), finish, chunk("b"))
        async with Gateway(load(file, {}), path=file) as gateway, aiohttp.ClientSession() as client:
            url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
            headers = {"authorization": f"Bearer {KEY}"}
            async with client.post(url, json={**CHAT, "stream": True}, headers=headers) as running:
                assert running.status == 200
                statuses: list[int] = []

                async def keep_asking() -> None:
                    while len(new[0].seen) + len(new[1].seen) < 8:
                        async with client.post(url, json=CHAT, headers=headers) as answer:
                            statuses.append(answer.status)

                old.script = unary()
                asking = asyncio.create_task(keep_asking())
                await until(lambda: len(statuses) >= 2)
                write(file, *new)
                assert await gateway.reload() == []
                async with asyncio.timeout(30):
                    await asking
                assert set(statuses) == {200}
                members = {one.url: one.phase.value for one in gateway.replicas.members()}
                assert members == {old.url: "draining", **{one.url: "ready" for one in new}}
                finish.set()
                assert (await running.content.read()).endswith(b"data: [DONE]\n\n")
            await until(lambda: len(list(gateway.replicas.members())) == 2)
    assert "config.restart_needed" not in log.getvalue()


def test_requests_go_round_one_after_the_other() -> None:
    fleet = Fleet(A)
    turns = [fleet.replicas.next_turn() for _ in range(3)]
    assert all(after == before + 1 for before, after in pairwise(turns))
    place = fleet.replicas.place("m", nowhere())
    assert place is not None
    assert place.route is RouteReason.AFFINITY
    assert place.replica.routes == {RouteReason.AFFINITY: 1}


# -- homes that are lost --------------------------------------------------------------------------


@pytest.fixture
async def pair() -> AsyncIterator[Fleet]:
    fleet = Fleet(A, B)
    keeping = asyncio.create_task(fleet.replicas.keep())
    yield fleet
    keeping.cancel()


def at_home(fleet: Fleet, url: str) -> int:
    """A conversation whose home this is."""
    for session in range(100):
        place = fleet.take(session)
        assert place is not None
        fleet.replicas.release(place, Outcome.NEUTRAL)
        if place.replica.url == url:
            return session
    raise AssertionError(f"nothing is at home at {url}")


async def test_a_conversation_whose_home_drains_has_lost_it_for_a_while(pair: Fleet) -> None:
    session = at_home(pair, A)
    assert pair.lost(session) is None
    pair.replicas.drain(pair.at(A), DrainCause.OPERATOR)
    await pair.settled()
    assert pair.replicas.has_choice("m")
    assert pair.lost(session) == LostHome(pair.at(A).id, LostReason.DRAINS)
    pair.clock.advance(REMEMBERED_MS / 1000)
    assert pair.lost(session) is None
    assert not pair.replicas.has_choice("m")


async def test_a_conversation_whose_home_is_another_since_replicas_came(pair: Fleet) -> None:
    session = at_home(pair, A)
    await pair.lists(B)
    assert pair.lost(session) == LostHome(ReplicaId("a:1"), LostReason.DRAINS)
    await pair.lists(A, B)
    found = pair.lost(session)
    assert found is not None
    assert (found.replica, found.reason) == ("b:1", LostReason.MOVED)


async def test_a_home_that_was_restarted_has_nothing_of_it(pair: Fleet) -> None:
    session, home = at_home(pair, A), pair.at(A)
    pair.replicas.observe(home, LoadReport(started_s=5))
    assert pair.lost(session) is None
    pair.replicas.observe(home, LoadReport(started_s=9))
    assert pair.lost(session) == LostHome(home.id, LostReason.RESTARTED)
    pair.replicas.observe(home, LoadReport(started_s=5))  # of the old one, late
    assert pair.lost(at_home(pair, B)) is None
    pair.clock.advance(REMEMBERED_MS / 1000 + 1)
    assert pair.lost(session) is None


async def test_a_home_that_failed_lately_and_one_that_has_much_to_do(pair: Fleet) -> None:
    session, home = at_home(pair, A), pair.at(A)
    pair.replicas.observe(home, LoadReport((0, 1000, 0)))
    pair.replicas.observe(pair.at(B), LoadReport())
    assert pair.lost(session) == LostHome(home.id, LostReason.BUSY)
    for _ in range(3):
        pair.replicas.release(pair.replicas._placed(home, RouteReason.LOAD, nowhere(), 0), Outcome.LOST)
    assert pair.lost(session) == LostHome(home.id, LostReason.FAILED)
