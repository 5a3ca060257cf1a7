"""Which cached pages are evicted: against a model that looks at all of them, and what tenants notice."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.core.pages.cached_pages import STALE_MAX, CachedPages

TENANTS = "abcdefg"
PAGES = 400
SLACK = 4
"""The highest rent over that of the tenant that loses a page, at most (rule 3)."""


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cached = CachedPages()
        self.now = 0
        self.out = list(range(PAGES))
        self.of: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """The pages of each tenant in the order of release, with their times."""

    def rent(self, tenant: str) -> int:
        return len(self.of[tenant]) * (self.now - self.of[tenant][0][1] + 1)

    @precondition(lambda self: self.out)
    @rule(tenant=st.sampled_from(TENANTS), count=st.integers(1, 60), later=st.integers(0, 100))
    def release(self, tenant: str, count: int, later: int) -> None:
        self.now += later
        pages, self.out = self.out[:count], self.out[count:]
        self.cached.add(pages, tenant, self.now)
        self.of[tenant] += [(page, self.now) for page in pages]

    @precondition(lambda self: len(self.out) < PAGES)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        tenant = data.draw(st.sampled_from([name for name, own in self.of.items() if own]))
        own = self.of[tenant]
        taken = data.draw(st.lists(st.sampled_from(own), unique=True, max_size=20))
        strange = self.out[:3]
        self.cached.discard([page for page, _ in taken] + strange)
        self.of[tenant] = [one for one in own if one not in taken]
        self.out += [page for page, _ in taken]

    @precondition(lambda self: len(self.out) < PAGES)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, min(50, PAGES - len(self.out))))
        popped = self.cached.pop(count, self.now)
        assert len(popped) == count
        for page in popped:
            tenant = next(name for name, own in self.of.items() if own and own[0][0] == page)
            highest = max(self.rent(name) for name, own in self.of.items() if own)
            assert self.rent(tenant) * SLACK >= highest
            self.of[tenant].pop(0)
        self.out += popped

    @invariant()
    def holds_the_same(self) -> None:
        assert sorted(self.cached) == sorted(page for own in self.of.values() for page, _ in own)
        assert len(self.cached) == PAGES - len(self.out)

    @invariant()
    def keeps_few_stale_entries(self) -> None:
        assert all(
            len(heap) <= 2 * len(self.cached._of) + STALE_MAX + len(TENANTS)
            for heap in self.cached._magnitudes
        )


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_of_one_tenant_what_was_released_first_is_evicted_first() -> None:
    cached = CachedPages()
    cached.add([3, 1, 2], "a", 0)
    cached.add([0, 9], "a", 7)
    cached.discard([1])
    cached.add([1], "a", 9)
    assert cached.pop(6 - 1, 100) == [3, 2, 0, 9, 1][:5]


def flood(cached: CachedPages, pages: int, now: int) -> list[int]:
    """A prompt of another tenant that never comes again. Returns the pages that it takes."""
    taken = cached.pop(pages, now)
    cached.add(taken, "flood", now)
    return taken


def test_a_flood_pays_with_its_own_pages() -> None:
    """The victim comes again every few prompts, and finds all that it had."""
    cached, own, now = CachedPages(), set(range(22)), 0
    cached.add(sorted(own), "victim", now)
    cached.add(range(22, 2000), "flood", now)
    for number in range(5000):
        taken = flood(cached, 124, now)
        now += 124
        assert not own & set(taken), f"after {number} prompts"
        if number % 50 == 49:
            cached.discard(own)
            cached.add(sorted(own), "victim", now)


@pytest.mark.slow
def test_who_stays_away_loses_its_pages_the_sooner_the_more_it_has() -> None:
    """The last page too, in the end."""
    halved: dict[int, int] = {}
    gone: dict[int, int] = {}
    for count in (10, 100, 500):
        cached, own, now = CachedPages(), set(range(count)), 0
        cached.add(sorted(own), "away", now)
        cached.add(range(count, 1000), "flood", now)
        while own:
            own -= set(flood(cached, 50, now))
            now += 50
            if len(own) <= count // 2:
                halved.setdefault(count, now)
        gone[count] = now
    assert halved[10] > halved[100] > halved[500]
    assert max(gone.values()) < SLACK * 1000 * 1000


def test_a_tenant_is_chosen_without_looking_at_all_of_them() -> None:
    """The victim is the core's loop: 10,000 tenants have ten pages each."""
    cached, looked_at = CachedPages(), []
    for tenant in range(10_000):
        cached.add(range(10 * tenant, 10 * tenant + 10), f"t{tenant}", tenant)

    class Watched(dict[str, tuple[int, int]]):
        def get(self, tenant: str, default: object = None) -> object:  # type: ignore[override]
            looked_at.append(tenant)
            return super().get(tenant, default)

    cached._ranked = Watched(cached._ranked)  # type: ignore[misc]
    evicted = cached.pop(1000, 10_000)
    assert len(set(evicted)) == 1000
    assert len(looked_at) < 5 * 1000
