"""Calls of `quota.lua`, as a server reads them."""

from __future__ import annotations

import struct
from typing import Final

import hiredis
import pytest

from gateway.admission.redis_calls import SCRIPT, SCRIPT_SHA, Calls, call, in_full, part
from gateway.admission.usage import Used
from tests.gateway.admission.test_redis_store import admitted, rid, tenant
from tests.gateway.redis_server import redis_server, redis_store

KEYS: Final = ("leases", "reservations", "key:k%20%C3%A9", "tenant:%d")
SETTINGS: Final = bytes(range(112))
LATE_MS: Final = 1_764_000_000_000.5
MOST: Final = 2**53 - 1
"""No number is larger."""


def words_of(command: bytes) -> list[bytes]:
    """The words of a command, which is whole and the only one."""
    reader = hiredis.Reader()
    reader.feed(command)
    words: list[bytes] = reader.gets()
    assert reader.gets() is False
    return words


def first(operation: str) -> list[bytes]:
    return [b"EVALSHA", SCRIPT_SHA.encode(), b"4", *map(str.encode, KEYS), operation.encode(), SETTINGS]


def numbers(*these: float) -> bytes:
    return struct.pack(f">{len(these)}d", *these)


@pytest.mark.parametrize("name", ["", "r", "gateway-1-é", "%d\r\n$1\r\n", "x" * 300])
def test_each_call_is_one_command_with_all_its_words(name: str) -> None:
    calls, used = Calls.of(KEYS, SETTINGS), Used(prompt=7, cached=3, completion=MOST - 7)
    named, row = name.encode(), part("usage:%b:", "k/m")
    assert words_of(calls.enter(name, 0, LATE_MS, 1)) == [*first("enter"), named, numbers(0, LATE_MS, 1)]
    reserved = [*first("reserve"), named, numbers(5, 0, 6, MOST, 8), b"usage:%b:", b"k/m"]
    assert words_of(calls.reserve(name, 5, 0, 6, MOST, 8, row)) == reserved
    for is_counted, prompt in ((True, 7), (False, -1)):
        settled = [*first("settle"), named, numbers(0, 0, MOST, prompt, 3, MOST - 7)]
        assert words_of(calls.settle(name, 0, used, is_counted=is_counted)) == settled


def test_a_call_in_full_says_the_script_in_place_of_its_name() -> None:
    command = call(KEYS, "renew", SETTINGS, 9, "a", SCRIPT_SHA)
    words = [*first("renew"), b"", numbers(9, 0), b"a", SCRIPT_SHA.encode()]
    assert words_of(command) == words
    assert words_of(in_full(command)) == [b"EVAL", SCRIPT.encode(), *words[2:]]


async def test_a_settlement_is_sent_again_where_the_script_is_forgotten() -> None:
    """Nobody waits for it, and it gives its seat to the next one all the same."""
    who = tenant(concurrent=1)
    with redis_server() as own:
        async with redis_store(own) as store:
            assert await admitted(store, 1, who)
            own.admin.script_flush()
            await store.settle(rid(1), Used())
            await store.settled()
            assert not store._held
            assert await admitted(store, 2, who)
