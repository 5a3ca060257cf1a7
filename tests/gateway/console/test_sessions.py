"""The console's sessions and the bounds of its log-in."""

from __future__ import annotations

import pytest

from gateway.operators.sessions import (
    FAILURES_MAX,
    FAILURES_PER_NETWORK_MAX,
    IDLE_S,
    LIFE_S,
    NETWORKS_MAX,
    SESSIONS_MAX,
    SESSIONS_PER_KEY_MAX,
    WINDOW_S,
    Attempts,
    Sessions,
)

DIGEST = b"d" * 32


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_a_session_is_found_by_its_id_alone_and_kept_as_a_hash() -> None:
    sessions = Sessions()
    one, other = sessions.begin(DIGEST, 0.0), sessions.begin(DIGEST, 0.0)
    assert one != other
    assert len(one) >= 43  # 256 bits
    assert sessions.find(one, 1.0) == DIGEST
    assert sessions.find(one[:-1], 1.0) is None
    assert sessions.find("", 1.0) is None
    assert sessions.find("\ud800", 1.0) is None
    assert one not in repr(vars(sessions))


def test_a_session_ends_by_logout_by_idling_and_by_age() -> None:
    sessions = Sessions()
    left, idle, old = (sessions.begin(DIGEST, 0.0) for _ in range(3))
    assert sessions.end(left)
    assert not sessions.end(left)
    assert sessions.find(left, 0.0) is None
    for now_s in range(0, int(LIFE_S), int(IDLE_S)):
        assert sessions.find(old, float(now_s)) == DIGEST
    assert sessions.find(idle, LIFE_S) is None
    assert sessions.find(old, LIFE_S) == DIGEST
    assert sessions.find(old, LIFE_S + 1) is None
    assert len(sessions) == 0


def test_sessions_are_bounded_per_key_and_in_all() -> None:
    sessions = Sessions()
    mine = [sessions.begin(DIGEST, 0.0) for _ in range(SESSIONS_PER_KEY_MAX + 1)]
    assert len(sessions) == SESSIONS_PER_KEY_MAX
    assert sessions.find(mine[0], 0.0) is None
    assert sessions.find(mine[1], 0.0) == DIGEST
    others = [sessions.begin(digest(number), 1.0) for number in range(SESSIONS_MAX)]
    assert len(sessions) == SESSIONS_MAX
    assert sessions.find(mine[-1], 1.0) is None
    assert sessions.find(others[-1], 1.0) is not None
    sessions.begin(DIGEST, 2 * LIFE_S)
    assert len(sessions) == 1


def test_failed_logins_are_bounded_per_network() -> None:
    attempts = Attempts()
    for _ in range(FAILURES_PER_NETWORK_MAX):
        assert attempts.wait_s("a", 0.0) == 0.0
        attempts.failed("a", 0.0)
    assert attempts.wait_s("a", 10.0) == WINDOW_S - 10.0
    assert attempts.wait_s("b", 10.0) == 0.0
    assert attempts.wait_s("a", WINDOW_S) == 0.0
    attempts.failed("a", WINDOW_S)
    assert attempts.wait_s("a", WINDOW_S) == 0.0


def test_many_networks_that_fail_have_one_guess_each_and_lock_nobody_else_out() -> None:
    attempts = Attempts()
    for number in range(FAILURES_MAX):
        assert attempts.wait_s(str(number), 0.0) == 0.0
        attempts.failed(str(number), 0.0)
    assert attempts.wait_s("operator", 1.0) == 0.0
    assert attempts.wait_s("0", 1.0) == pytest.approx(WINDOW_S - 1.0)
    assert attempts.wait_s("0", WINDOW_S) == 0.0
    attempts.failed("late", WINDOW_S - 1.0)
    assert attempts.wait_s("late", WINDOW_S - 1.0) == WINDOW_S
    assert attempts.wait_s("late", WINDOW_S) == 0.0, "the flood is over"
    for number in range(2 * NETWORKS_MAX):
        attempts.failed(str(number), 0.0)
    assert len(attempts._by_network) == NETWORKS_MAX
    assert attempts.wait_s("operator", 1.0) == 0.0
