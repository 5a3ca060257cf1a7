"""The records that matter stay, whoever brings however many others."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Struct

from gateway.request import recorder as recording
from gateway.request.recorder import PACES_MAX, SLOW_IN, Recorder
from gateway.request.ring import Ring
from shared.telemetry.stages import Stamps
from shared.wire.completed_line import GatewayLine
from shared.wire.end_reason import EndReason
from tests.gateway.operators.test_requests_api import BEGUN, line

STAMPS = Stamps(("edge", "relay"), (7.0, 7.002, 7.012))
DENIED = {"status": 401, "end_reason": EndReason.REFUSED}
LIMITED = {"status": 429, "end_reason": EndReason.REFUSED}
FAILED = {"status": 502, "end_reason": EndReason.UPSTREAM_FAILED}


def kept(recorder: Recorder) -> list[str]:
    return [one.request_id for one in recorder.newest_first()]


def of_tenants() -> Iterator[GatewayLine]:
    """Requests of two tenants, of every kind."""
    for number in range(40):
        for tenant in ("acme", "other"):
            for name, ends in (("ok", {}), ("limited", LIMITED), ("failed", FAILED)):
                yield line(f"{tenant}-{name}-{number}", tenant=tenant, **ends)


def test_a_flood_of_strangers_leaves_every_tenants_records_as_they_were() -> None:
    recorder = Recorder(2048)
    for one in of_tenants():
        recorder.add(one, STAMPS)
    before, since = kept(recorder), recorder.since
    assert len(before) == 240
    stranger, logged = line("stranger", **DENIED), b"x" * 600
    for _ in range(100_000):
        recorder.add(stranger, STAMPS, logged)
    theirs = list(of_tenants())
    assert [one.request_id for one in reversed(theirs)] == before
    assert all(recorder.find(one.request_id, 1) for one in theirs[:: len(theirs) // 9])
    assert len(recorder) - len(before) <= 2048
    now = recorder.since
    assert (now.answered, now.troubled, now.refused) == (since.answered, since.troubled, since.refused)
    assert now.strangers != since.strangers


def test_a_tenants_refusals_leave_what_was_answered_and_the_other_tenants_refusals() -> None:
    recorder = Recorder(60)
    for one in of_tenants():
        recorder.add(one, STAMPS)
    before = [name for name in kept(recorder) if not name.startswith("acme-limited")]
    flood = line("flood", tenant="acme", **LIMITED)
    for _ in range(1000):
        recorder.add(flood, STAMPS)
    assert [name for name in kept(recorder) if not name.startswith(("acme-limited", "flood"))] == before
    assert kept(recorder).count("flood") == 30


def test_at_fifty_requests_a_second_fifteen_minutes_of_failed_and_slow_ones_are_kept() -> None:
    recorder, minutes, wanted = Recorder(2048), 25, list[str]()
    whole = b"x" * 2000  # a stream's line and its other parts take four thousand bytes and more
    for number in range(50 * 60 * minutes):
        at = BEGUN + timedelta(seconds=number / 50)
        ends = FAILED if number % 100 == 7 else {}
        is_slow = number % 500 == 33
        took_ms = 9e3 if is_slow else 90.0 + number % 9
        one = line(f"r{number}", ts=at, tenant=f"t{number % 7}", total_ms=took_ms, **ends)
        recorder.add(one, STAMPS, whole)
        if (ends or is_slow) and number >= 50 * 60 * (minutes - 15):
            wanted.append(one.request_id)
    there = {entry.request_id for ring in recorder._rings for entry in ring}
    assert there.issuperset(wanted)
    assert BEGUN < recorder.since.troubled <= BEGUN + timedelta(minutes=minutes - 15)
    assert recorder.since.answered > BEGUN + timedelta(minutes=minutes - 3)


def test_about_one_request_in_fifty_is_slow_by_its_total_or_its_first_byte() -> None:
    for name in ("total_ms", "first_ms"):
        pace, slow = recording._Pace(), 0
        for number in range(100 * SLOW_IN):
            times = {"total_ms": 0.0, "first_ms": 0.0, name: 100.0 + (number * 37) % 101}
            slow += pace.is_slow(**times)
        assert 60 <= slow <= 170
        assert pace.is_slow(**{"total_ms": 0.0, "first_ms": 0.0, name: 1000.0})


def test_the_pace_is_known_of_a_bounded_number_of_tenants() -> None:
    recorder = Recorder(9)
    for number in range(PACES_MAX + 5):
        recorder.add(line(tenant=f"t{number}"), STAMPS, b"x")
        assert len(recorder._paces) <= PACES_MAX


class One(Struct):
    number: int
    party: str
    bytes_len: int


@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 50)), max_size=80),
    st.integers(1, 12),
    st.integers(1, 200),
)
@example([("a", 1), *[("b", 1)] * 4], 4, 200)
def test_a_party_below_the_mean_loses_nothing_to_others(
    given_: list[tuple[str, int]], records_max: int, bytes_max: int
) -> None:
    ring = Ring[One](records_max, bytes_max)
    for number, (party, bytes_len) in enumerate(given_, 1):
        parts = {one: [entry.number for entry in ring if entry.party == one] for one in "abcdefgh"}
        ring.add(One(number, party, bytes_len), party)
        entries = list(ring)
        assert (len(entries), sum(one.bytes_len for one in entries)) == (ring.records, ring.bytes_len)
        assert ring.records <= records_max
        assert ring.bytes_len <= bytes_max
        parts[party].append(number)
        there = [one for one in "abcdefgh" if parts[one]]
        for other in there:
            left = [entry.number for entry in ring if entry.party == other]
            assert parts[other][len(parts[other]) - len(left) :] == left, "the oldest go first"
        if ring.bytes_len + 50 < bytes_max:  # the number alone was the bound
            mean = sum(map(len, parts.values())) / len(there)
            small = [one for one in there if len(parts[one]) < mean and one != party]
            assert all(len(parts[one]) == sum(e.party == one for e in ring) for one in small)
