"""The disk tier, from the core's side and from its threads': what comes back, what is dropped, and that a
disk that hangs, is full or is gone harms nobody."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from engine.contract.messages import DiskCounts
from engine.contract.records import Lack
from engine.core.estimate.cost import StepCost
from engine.core.pages.disk import WRITES_MAX, DiskThreads
from engine.core.pages.page_files import HEADER_LEN, PageFiles, open_directory
from engine.core.pages.tiers import DiskLink
from engine.core.scheduler import FETCH_POLL_S, Scheduler
from tests.core_laws import check
from tests.engine.core.harness import COPIES_ARE_CHEAP, Harness, greedy, knowing
from tests.engine.core.test_host_tier import HISTORY, evict, identity, tiered, told
from tests.engine.core.test_steps import recorded
from tests.fake_disk import FakeDisk

PAGE_BYTES = 64


class Steady(random.Random):
    """Every file is done at once."""

    def random(self) -> float:
        return 0.5


def on_disk(**settings: object) -> tuple[Harness, FakeDisk]:
    h = tiered(**{"host_pages": 16, **settings})
    disk = FakeDisk(Steady(), lambda: h.runner)
    scheduler = Scheduler(h.scheduler._config, h.runner.info, disk=disk)
    h.scheduler = knowing(scheduler, COPIES_ARE_CHEAP)
    return h, disk


def forget_in_host_memory(h: Harness) -> None:
    host, link = h.scheduler._allocator.host_tier.host, h.scheduler._allocator.disk
    while link._writing:
        link.take_done()
    host.forget(list(host._kept))


def waited(h: Harness) -> None:
    """Run, and let the clock go on while sequences wait for the disk."""
    while (idle_s := h.scheduler.idle_s(h.now)) <= FETCH_POLL_S:
        h.now += idle_s
        h.step()


def evicted(h: Harness) -> None:
    """Have the history on disk, and nowhere else."""
    told(h, 1)
    evict(h, 2)
    forget_in_host_memory(h)


# -- the core's side ------------------------------------------------------------------------------


def test_a_prefix_that_only_the_disk_has_comes_back() -> None:
    h, disk = on_disk()
    evicted(h)
    assert len(disk.files) >= 4
    h.add(3, HISTORY, greedy(2))
    assert not h.scheduler.has_work, "it waits for the disk"
    assert h.scheduler.stats().waiting == 1
    waited(h)
    started = h.started[3]
    assert (started.cached_len, started.host_len, started.disk_len) == (16, 0, 16)
    assert started.queue_s > 0
    stats = h.scheduler.stats()
    assert (stats.prefix_hit_tokens, stats.prefix_disk_tokens, stats.disk.read) == (16, 16, 4)
    h.assert_all_as_solo()


def test_two_that_want_the_same_pages_wait_for_one_reading() -> None:
    h, _ = on_disk()
    evicted(h)
    h.add(3, HISTORY, greedy(2))
    h.add(4, HISTORY, greedy(3))
    waited(h)
    assert h.scheduler.stats().disk.read == 4
    assert (h.started[3].cached_len, h.started[4].cached_len) == (16, 16)
    h.assert_all_as_solo()


def test_a_disk_that_hangs_harms_nobody() -> None:
    """Others' steps go on meanwhile, the newcomer waits no longer than computing takes, and whoever comes
    next does not wait at all."""
    h, disk = on_disk()
    evicted(h)
    disk.hangs = True
    h.add(3, [45] * 4, greedy(8))
    h.add(4, HISTORY, greedy(2))
    h.step()
    assert h.tokens[3], "another's step goes on"
    waited(h)
    assert h.started[4].cached_len == 0
    h.add(5, [7, *HISTORY], greedy(1))
    h.add(6, [*HISTORY[:16], 9], greedy(1))
    waited(h)
    h.assert_tokens_as_solo()
    disk.hangs = False
    h.scheduler._allocator.disk.take_done()
    assert h.scheduler.stats().host_pages_used == 0


def test_one_that_waits_for_the_disk_is_not_said_to_lack_a_turn() -> None:
    h, disk = on_disk()
    evicted(h)
    disk.hangs = True
    h.add(3, [45] * 4, greedy(8))
    h.add(4, HISTORY, greedy(2))
    assert recorded(h).lack is Lack.NOTHING
    h.pause(4)
    assert recorded(h).lack is Lack.NOTHING


def test_one_that_waits_for_the_disk_can_be_paused_and_aborted() -> None:
    h, disk = on_disk()
    evicted(h)
    disk.hangs = True
    h.add(3, HISTORY, greedy(2))
    h.pause(3)
    assert h.scheduler.idle_s(h.now) <= FETCH_POLL_S
    h.resume(3)
    h.abort(3)
    assert not h.scheduler.has_work
    check(h.scheduler)


def test_nothing_is_read_that_is_cheaper_to_compute() -> None:
    h, disk = on_disk()
    evicted(h)
    link = h.scheduler._allocator.disk
    chain = list(disk.files)
    link._read_s = 10.0
    assert link.fetch(chain[:1], 0, 4, StepCost()) == 0
    assert link._read_s < 10.0, "it is tried again later"


def test_newcomers_without_pages_on_disk_do_not_make_a_slow_disk_look_fast() -> None:
    h, _ = on_disk()
    link = h.scheduler._allocator.disk
    link._read_s = 10.0
    assert link.fetch([], 0, 4, StepCost()) == 0
    assert link.fetch([identity(1)], 0, 4, StepCost()) == 0
    assert link._read_s == 10.0


def test_what_a_numeric_failure_touched_is_forgotten_on_disk_even_while_it_is_written() -> None:
    h, disk = on_disk()
    disk.hangs = True
    told(h, 1)
    evict(h, 2)
    link = h.scheduler._allocator.disk
    assert disk.jobs
    lost = disk.jobs[0][0]
    link.forget([lost])
    disk.hangs = False
    link.take_done()
    assert lost not in disk.files
    assert not link._forgotten


def test_a_damaged_page_is_a_miss_and_the_prefix_is_computed() -> None:
    h, disk = on_disk()
    evicted(h)
    disk._damage = 1.0
    link = h.scheduler._allocator.disk
    link._read_s = known_s = 1e-9
    h.add(3, HISTORY, greedy(2))
    waited(h)
    assert h.started[3].cached_len == 0
    assert link._read_s == known_s, "a quick miss says nothing about the time that reading takes"
    h.assert_all_as_solo()


def test_without_room_in_host_memory_nothing_is_read() -> None:
    h, disk = on_disk()
    evicted(h)
    link, host = h.scheduler._allocator.disk, h.scheduler._allocator.host_tier.host
    while host.lend_empty() is not None:
        pass
    assert link.fetch(list(disk.files)[:2], 0, 4, StepCost(page_s=0.0)) == 0


def test_without_a_disk_the_counts_are_zero() -> None:
    h = tiered()
    link = DiskLink(h.scheduler._allocator.host_tier.host)
    assert link.counts() == DiskCounts()
    assert link.fetch([identity(1)], 0, 4, StepCost()) == 0


# -- the threads' side ----------------------------------------------------------------------------


class Opened:
    """Disk threads that the test runs itself, a job at a time."""

    def __init__(self, path: Path, pages: int = 8) -> None:
        self.pages = [bytearray(bytes([number]) * PAGE_BYTES) for number in range(pages)]
        self.files = PageFiles(open_directory(path), b"m" * 32, PAGE_BYTES, 8 * (HEADER_LEN + PAGE_BYTES))
        self.disk = DiskThreads(self.files, lambda page: memoryview(self.pages[page]))


def test_a_page_goes_out_and_comes_back(tmp_path: Path) -> None:
    one = Opened(tmp_path)
    assert one.disk.write(identity(1), 3)
    one.disk.write_next()
    assert one.disk.has(identity(1))
    assert one.disk.read(identity(1), 5)
    one.disk.read_next()
    assert one.pages[5] == one.pages[3]
    written, read = one.disk.take_done()
    assert (written.page, written.is_read, written.is_good) == (3, False, True)
    assert (read.page, read.is_read, read.is_good) == (5, True, True)
    one.disk.read(identity(2), 5)
    one.disk.read_next()
    assert not one.disk.take_done()[0].is_good
    assert one.disk.counts() == DiskCounts(1, 1, 0, 1, 1)
    one.disk.forget([identity(1), identity(2)])
    assert not one.disk.has(identity(1))
    one.disk.write_next()
    assert not list(tmp_path.iterdir())


def test_a_page_that_was_written_again_is_not_removed(tmp_path: Path) -> None:
    one = Opened(tmp_path)
    one.files.write(identity(1), memoryview(one.pages[1]))
    one.disk.forget([identity(1)])
    one.files.write(identity(1), memoryview(one.pages[1]))
    one.disk.write_next()
    assert len(list(tmp_path.iterdir())) == 1


def test_more_than_the_queue_takes_is_dropped_and_counted(tmp_path: Path) -> None:
    one = Opened(tmp_path)
    taken = [one.disk.write(identity(number), 0) for number in range(WRITES_MAX + 3)]
    assert taken.count(False) == one.disk.counts().dropped == 3


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError(13, "denied")])
def test_a_full_or_forbidden_disk_turns_the_tier_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    one = Opened(tmp_path)
    one.files.write(identity(1), memoryview(one.pages[1]))
    one.disk.write(identity(2), 2)
    one.disk.read(identity(1), 3)

    def fails(*_: object) -> int:
        raise error

    monkeypatch.setattr(os, "write", fails)
    one.disk.write_next()
    one.disk.read_next()
    assert [done.is_good for done in one.disk.take_done()] == [False, False], "every page is given back"
    assert not one.disk.has(identity(1))
    assert not one.disk.write(identity(3), 3)
    assert not one.disk.read(identity(1), 3)


def test_the_threads_find_what_is_there_and_serve(tmp_path: Path) -> None:
    before = Opened(tmp_path)
    before.files.write(identity(1), memoryview(before.pages[1]))
    before.files.close()
    one = Opened(tmp_path)
    one.disk.start()
    assert one.disk.write(identity(2), 2)
    assert one.disk.read(identity(1), 5)
    done = [*one.disk.take_done()]
    pause = threading.Event()
    for _ in range(3000):
        if len(done) == 2:
            break
        pause.wait(0.01)
        done += one.disk.take_done()
    assert all(each.is_good for each in done)
    assert one.pages[5] == one.pages[1]
    assert one.disk.has(identity(2))


def test_a_disk_whose_queues_are_full_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    h, disk = on_disk()
    link, host = h.scheduler._allocator.disk, h.scheduler._allocator.host_tier.host
    disk.files[identity(9)] = h.runner.host_page(0)
    monkeypatch.setattr("tests.fake_disk.QUEUE_MAX", 0)
    assert link.fetch([identity(9)], 0, 4, StepCost(page_s=0.0)) == 0
    page = host.keep(identity(1))
    assert page is not None
    host.plan_made(1, [page])
    link.landed(1, [page])
    assert (disk.jobs, host.free + host.kept) == ([], host.total)
    link._due.append((identity(2), page))
    link.take_done()
    assert not link._due, "it is kept no more, so it is not written"
    monkeypatch.setattr("engine.core.pages.tiers.DUE_MAX", 0)
    host.plan_made(2, [page])
    link.landed(2, [page])
    assert link.counts().dropped == 1
