"""Which cached pages are evicted: against a model that looks at all of them, and what tenants notice."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.core.pages.cached_pages import STALE_MAX, CachedPages
from tests.core_laws import check_cached
from tests.effort import drawn

TENANTS = "abcdefg"
PAGES = 400
KEEP_S = 30.0
SLACK = 4
"""The highest rent over that of the tenant that loses a page, at most (rule 3)."""


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cached = CachedPages(PAGES)
        self.now = 0
        self.now_s = 0.0
        self.out = list(range(PAGES))
        self.of: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """The pages of each tenant that are not kept, the oldest first, with their times."""
        self.kept: list[tuple[int, str, int, float]] = []
        """The kept pages in the order of release, with tenants, times and deadlines."""

    def rent(self, tenant: str) -> int:
        count = len(self.of[tenant]) + self.kept_of(tenant)
        return count * (self.now - self.of[tenant][0][1] + 1)

    def kept_of(self, tenant: str) -> int:
        return sum(of == tenant for _, of, _, _ in self.kept)

    def part(self, *tenants: str) -> int:
        return PAGES // (2 * len({*tenants, *(of for _, of, _, _ in self.kept)}))

    @precondition(lambda self: self.out)
    @rule(tenant=st.sampled_from(TENANTS), count=st.integers(1, 60), later=st.integers(0, 100))
    def release(self, tenant: str, count: int, later: int) -> None:
        self.now += later
        pages, self.out = self.out[:count], self.out[count:]
        self.cached.add(pages, tenant, self.now)
        self.of[tenant] += [(page, self.now) for page in pages]

    @precondition(lambda self: self.out)
    @rule(tenant=st.sampled_from(TENANTS), count=st.integers(1, 200), later=st.integers(0, 100))
    def keep(self, tenant: str, count: int, later: int) -> None:
        self.now += later
        pages, self.out = self.out[:count], self.out[count:]
        room = max(0, self.part(tenant) - self.kept_of(tenant))
        first = max(0, len(pages) - room)
        deadline_s = self.now_s + KEEP_S
        self.cached.keep(pages, tenant, self.now, deadline_s)
        self.of[tenant] += [(page, self.now) for page in pages[:first]]
        self.kept += [(page, tenant, self.now, deadline_s) for page in pages[first:]]

    @precondition(lambda self: len(self.out) < PAGES)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        here = sorted(self.cached.tenants)
        taken = data.draw(st.lists(st.sampled_from(here), unique=True, max_size=20))
        strange = self.out[:3]
        self.cached.discard(taken + strange)
        for own in self.of.values():
            own[:] = [one for one in own if one[0] not in taken]
        self.kept = [one for one in self.kept if one[0] not in taken]
        self.out += taken

    @rule(seconds=st.sampled_from([1.0, KEEP_S / 2, KEEP_S]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def let_go(self) -> None:
        while self.kept and (self.kept[0][3] <= self.now_s or len(self.kept) > PAGES // 2):
            page, tenant, time, _ = self.kept.pop(0)
            behind = sum(at <= time for _, at in self.of[tenant])
            self.of[tenant].insert(behind, (page, time))

    @precondition(lambda self: len(self.out) < PAGES)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, min(50, PAGES - len(self.out))))
        popped = self.cached.pop(count, self.now, self.now_s)
        assert len(popped) == count
        self.let_go()
        for page in popped:
            if not any(self.of.values()):
                assert page == self.kept.pop(0)[0]
                continue
            tenant = next(name for name, own in self.of.items() if own and own[0][0] == page)
            highest = max(self.rent(name) for name, own in self.of.items() if own)
            assert self.rent(tenant) * SLACK >= highest
            self.of[tenant].pop(0)
        self.out += popped

    @invariant()
    def holds_the_same(self) -> None:
        others = [page for own in self.of.values() for page, _ in own]
        assert sorted(self.cached.tenants) == sorted(others + [page for page, *_ in self.kept])
        assert len(self.cached.tenants) == PAGES - len(self.out)
        assert [page for page, *_ in self.kept] == list(self.cached.kept)
        check_cached(self.cached)

    @invariant()
    def keeps_few_stale_entries(self) -> None:
        assert all(
            len(heap) <= 2 * len(self.cached._of) + STALE_MAX + len(TENANTS)
            for heap in self.cached._magnitudes
        )


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=drawn(20, whole=60), stateful_step_count=60, deadline=None)


def test_of_one_tenant_what_was_released_first_is_evicted_first() -> None:
    cached = CachedPages()
    cached.add([3, 1, 2], "a", 0)
    cached.add([0, 9], "a", 7)
    cached.discard([1])
    cached.add([1], "a", 9)
    assert cached.pop(6 - 1, 100) == [3, 2, 0, 9, 1][:5]


def test_kept_pages_go_after_all_others_until_their_deadline_and_by_age_from_then_on() -> None:
    cached = CachedPages(100)
    cached.add([1], "a", 0)
    cached.keep([3, 2], "a", 1, 30.0)
    cached.add([4, 5], "a", 2)
    assert cached.pop(2, 3, 29.0) == [1, 4]
    assert (len(cached.kept), cached.kept_evicted) == (2, 0)
    assert cached.pop(1, 3, 30.0) == [3], "it is older than what was released after it"
    assert cached.pop(2, 3, 30.0) == [2, 5]
    assert (len(cached.kept), cached.kept_evicted) == (0, 0)


def test_a_kept_page_is_evicted_when_nothing_else_is_left() -> None:
    cached = CachedPages(100)
    cached.keep([1, 0], "a", 0, 30.0)
    cached.keep([3, 2], "b", 0, 30.0)
    cached.add([4], "b", 0)
    assert cached.pop(5, 1, 1.0) == [4, 1, 0, 3, 2]
    assert cached.kept_evicted == 4
    assert not cached.tenants


def test_half_of_the_cache_is_kept_in_equal_parts_and_of_a_prefix_its_head() -> None:
    cached = CachedPages(100)
    cached.keep(range(60), "a", 0, 30.0)
    assert len(cached.kept) == 50
    assert cached.pop(10, 1, 1.0) == list(range(10)), "the tail, which was released first"
    cached.keep(range(60, 90), "b", 1, 31.0)
    assert len(cached.kept) == 50 + 25
    assert cached.pop(30, 2, 2.0) == [*range(10, 35), *range(60, 65)], "the first tenant keeps 25, too"
    assert (len(cached.kept), cached.kept_evicted) == (50, 0)


def test_a_page_that_was_asked_for_again_is_kept_no_more() -> None:
    cached = CachedPages(100)
    cached.keep([1, 0], "a", 0, 30.0)
    cached.discard([0])
    assert (len(cached.kept), cached.kept_found) == (1, 1)
    cached.add([0], "a", 1)
    assert cached.pop(1, 2, 2.0) == [0]


# -- tenants --------------------------------------------------------------------------------------


def flood(cached: CachedPages, pages: int, now: int, *, keeps: bool = False) -> list[int]:
    """A prompt of another tenant that never comes again. Returns the pages that it takes. Time passes at a
    second for 100 pages."""
    taken = cached.pop(pages, now, now / 100)
    if keeps:
        cached.keep(taken, "flood", now, now / 100 + KEEP_S)
    else:
        cached.add(taken, "flood", now)
    return taken


@pytest.mark.parametrize("keeps", [False, True])
def test_a_flood_pays_with_its_own_pages(keeps: bool) -> None:
    """The victim comes again every few prompts, and finds all that it had, also where the flood keeps all
    that it can."""
    cached, own, now = CachedPages(2000), set(range(22)), 0
    cached.add(sorted(own), "victim", now)
    cached.add(range(22, 2000), "flood", now)
    for number in range(5000):
        taken = flood(cached, 124, now, keeps=keeps)
        now += 124
        assert not own & set(taken), f"after {number} prompts"
        if number % 50 == 49:
            cached.discard(own)
            cached.add(sorted(own), "victim", now)


def found(total: int, *, keeps: bool) -> int:
    """The pages that a victim finds of 600, which come again whenever a flood has taken 1000."""
    cached, own, now, hits = CachedPages(total), set[int](range(600)), 0, 0
    cached.add(sorted(own), "victim", now)
    cached.add(range(600, total), "flood", now)
    for _ in range(30):
        for _ in range(10):
            own -= set(flood(cached, 100, now, keeps=keeps))
            now += 100
        hits = len(own)
        cached.discard(own)
        own |= set(cached.pop(600 - hits, now, now / 100))
        cached.add(sorted(own), "victim", now)
    return hits


def test_a_tenant_that_keeps_all_leaves_the_others_more_than_a_cache_of_half_the_size() -> None:
    alone, beside, half = found(2000, keeps=False), found(2000, keeps=True), found(1000, keeps=False)
    assert half < beside <= alone == 600


def test_who_keeps_pays_sooner_beside_one_that_does_not() -> None:
    """Both have as many pages and release as many. The one has kept pages on top of those that are not."""
    cached = CachedPages(2000)
    cached.keep(range(500), "keeps", 0, 30.0)
    cached.add(range(500, 1000), "keeps", 0)
    cached.add(range(1000, 2000), "other", 0)
    evicted = cached.pop(700, 1, 1.0)
    assert len([page for page in evicted if page < 1000]) >= 350
    assert len(cached.kept) == 500


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
