"""The laws of what the core keeps for itself: nothing of it is lost or in two places. `check` takes O(pages +
sequences)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from engine.contract.messages import Want
from engine.core.pages.block_manager import BlockManager
from engine.core.pages.cached_pages import CachedPages
from engine.core.pages.host_pool import HostPool
from engine.core.pages.state_pool import StatePool
from engine.core.queue.tenants import TenantCounters, TenantHoldings
from engine.core.scheduler import STEPS_AHEAD_MAX, Scheduler
from engine.core.sequence import Status
from engine.core.step.allocator import Allocator


def check(scheduler: Scheduler) -> None:
    """Assert that no page, slot or sequence is lost or in two places."""
    waiting, sequences = scheduler._waiting, scheduler._sequences
    _check_allocator(scheduler._allocator)
    check_tenants(scheduler._tenants, (sequence.tenant for sequence in sequences.values()))
    _check_flights(scheduler)
    living = [*waiting, *scheduler._allocator.running.values()]
    assert {sequence.handle: sequence for sequence in living} == sequences
    assert len(living) == len(sequences), "a sequence is in two places"
    assert {s.handle for s in living if s.awaits is not None} == scheduler._fetching.keys()
    assert scheduler.masks.sequences.items() <= sequences.items()
    assert all(s.handle in scheduler.masks.sequences or s.mask == b"" for s in living)
    assert waiting.due == [s for s in waiting if s.hold is None]
    assert scheduler._paused == {s.handle: s for s in living if s.is_paused}
    pauses = [scheduler._deadline(sequence) for sequence in scheduler._paused.values()]
    assert pauses == sorted(pauses), "the first that was paused is not the first to end"


def _check_flights(scheduler: Scheduler) -> None:
    """Assert that the steps in flight are what their sequences count, and that no other has a row."""
    in_flight = scheduler._in_flight
    assert len(in_flight) <= STEPS_AHEAD_MAX + 1
    assert list(in_flight) == sorted(in_flight)
    flying: dict[int, tuple[int, int, int]] = {}
    for step, flight in in_flight.items():
        plan = flight.plan
        for sequence, length, want in zip(flight.rows, plan.lengths, plan.wants, strict=True):
            if sequence.status is Status.FINISHED:
                continue
            before = flying.get(sequence.handle, (0, 0, 0))
            coming = length if want is Want.VERIFY else want
            flying[sequence.handle] = (before[0] + length, before[1] + coming, step)
    for handle, sequence in scheduler._sequences.items():
        length, coming, step = flying.pop(handle, (0, 0, 0))
        assert (sequence.in_flight_len, sequence.coming) == (length, coming)
        assert not step or sequence.last_step == step, "a fence in the wrong place"
    assert not flying, "a row without a sequence"


def _check_allocator(allocator: Allocator) -> None:
    """Assert that every slot and page is in one place, and that each sequence holds what its status says."""
    running, runner = allocator.running, allocator._runner
    living = [*allocator._waiting, *running.values()]
    flights = allocator._in_flight.values()
    held = [table for flight in flights for table, _ in flight.tables]
    check_pages(allocator.pages, [*(sequence.pages for sequence in living if sequence.pages), *held])
    check_host(allocator.host_tier.host)
    if allocator.states is not None:
        coming = [state.place for flight in flights for state in flight.states]
        check_states(allocator.states.pool, allocator.pages, coming)
    slots = [*allocator._slots_free, *(slot for flight in flights for slot in flight.slots), *running]
    assert sorted(slots) == list(range(runner.slots)), "a slot is lost, or owned twice"
    for status, queue in allocator._waiting.queues.items():
        for sequence in queue.values():
            assert sequence.status is status
            assert sequence.slot is None
            assert bool(sequence.pages) == (status in (Status.STALLED, Status.YIELDED))
            assert sequence.in_flight_len == sequence.coming == 0
    for slot, sequence in running.items():
        assert sequence.slot == slot
        assert sequence.status is Status.RUNNING
    for sequence in living:
        assert sequence.pending_len > 0 or sequence.is_only_read, "it has nothing more to do"
        assert sequence.planned_len <= len(sequence.pages) * runner.page_size
        assert sequence.preemptions - sequence.yields <= allocator._config.preemptions_max
    check_holdings(allocator.holdings, ((each.tenant, len(each.pages)) for each in running.values()))


def check_pages(manager: BlockManager, tables: Iterable[Sequence[int]]) -> None:
    """Assert that no page is lost or counted wrongly; `tables` has those of all living sequences."""
    refs = [0] * manager.total
    for table in tables:
        assert len(set(table)) == len(table), "a page twice in one table"
        for page in table:
            refs[page] += 1
    assert manager._refs == refs, f"references {manager._refs}, and in so many tables {refs}"
    held = [page for page, count in enumerate(refs) if count]
    check_cached(manager.cached_pages)
    cached = [*manager.cached_pages.tenants, *manager._cached_heads]
    states = sorted([*manager._free, *cached, *held])
    assert states == list(range(manager.total)), "a page is lost, free twice, or in two states"
    identified = {identity: page for page, identity in enumerate(manager._identity) if identity is not None}
    identified |= {head: page for page, heads in manager._heads.items() for head in heads}
    assert identified == manager._by_identity
    assert all(manager._heads.values())
    pages = set(identified.values())
    assert pages.issuperset(cached), "a page is cached, and nothing can find it"
    assert not any(manager._identity[page] for page in manager._cached_heads)
    assert pages.isdisjoint(manager._free), "a page is free, and can be found"


def check_cached(cached: CachedPages) -> None:
    """Assert that each page is in one place, and that tenants' counts are those of their pages."""
    of_queues = {
        page: tenant
        for tenant, own in cached._of.items()
        for queue in (own.released, own.let_go)
        for page in queue
    }
    of_kept = {page: cached.tenants[page] for page in cached.kept}
    assert of_queues.keys().isdisjoint(of_kept)
    assert of_queues | of_kept == cached.tenants
    assert cached._kept_of == Counter(of_kept.values())
    assert cached._of.keys() == set(cached.tenants.values())


def check_host(pool: HostPool) -> None:
    """Assert that each page of host memory is in one set."""
    assert {page: identity for identity, page in pool._kept.items()} == pool._identity
    assert sorted(pool._droppable.tenants) == sorted(pool._identity.keys() - pool._lent)
    lent = [page for page in pool._lent if page not in pool._identity and page not in pool._leaving]
    everything = [*pool._free, *pool._leaving, *pool._kept.values(), *lent]
    assert sorted(everything) == list(range(pool.total)), "a host page is lost, or in two places"


def check_states(pool: StatePool, pages: BlockManager, coming: Iterable[int]) -> None:
    """Assert that each place is in one set, and that no state is kept whose page is gone; `coming` has those
    of steps in flight."""
    kept = {place: identity for identity, place in pool._kept.items()}
    assert kept == pool._identity
    check_cached(pool._droppable)
    assert set(pool._droppable.tenants) == kept.keys() - pool._read
    assert all(pool._tenant[place] == tenant for place, tenant in pool._droppable.tenants.items())
    everything = [*pool._free, *kept, *(pool._read - kept.keys()), *coming]
    assert sorted(everything) == list(range(pool.total)), "a place is lost, or in two sets"
    assert all(pages.find(identity) is not None for identity in kept.values()), "a state without its page"


def check_tenants(tenants: TenantCounters, here: Iterable[str]) -> None:
    """Assert that the counts are those of the sequences that have not ended; `here` has their tenants."""
    assert tenants._here == Counter(here)
    assert tenants.admitted_at.keys() <= tenants._here.keys()


def check_holdings(holdings: TenantHoldings, held: Iterable[tuple[str, int]]) -> None:
    """Assert that the counts are those of the running sequences; `held` has their tenants and pages."""
    slots, pages = Counter[str](), Counter[str]()
    for tenant, count in held:
        slots[tenant] += 1
        pages[tenant] += count
    assert (holdings._slots, holdings._pages) == (slots, pages)
