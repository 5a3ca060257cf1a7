"""Billing lines: the file, its rotation, and the spool of a webhook."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Final

import msgspec
import pytest

from gateway.admission.quota import ReservationId
from gateway.admission.usage import Payer, Totals, UsageRows, Used
from gateway.billing import lines, spool
from gateway.billing.lines import Billing, BillingLine
from gateway.billing.spool import Spool
from gateway.config.accounting import MIB, AccountingConfig
from shared.process.setting_values import ConfigError
from shared.wire.ids import KeyId, RequestId, TenantId
from tests.fakes import VirtualClock
from tests.gateway.conftest import House, Open, until
from tests.gateway.fake_engine import Script, unary

PAYER: Final = Payer(TenantId("acme"), KeyId("k1"), "tiny")
pytestmark = pytest.mark.hop("http2")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lines.jsonl"


def read(path: Path) -> list[BillingLine]:
    return [msgspec.json.decode(line, type=BillingLine) for line in path.read_bytes().splitlines()]


def waiting_bytes(path: Path) -> int:
    return path.stat().st_size


def note(billing: Billing, number: int) -> None:
    used = Used(prompt=number)
    billing.note(ReservationId(f"r{number}"), RequestId("x"), PAYER, used, 1_700_000_000.0)


# -- the file -------------------------------------------------------------------------------------


async def test_each_admitted_request_has_one_line_that_agrees_with_its_settlement(
    open_house: Open, file: Path
) -> None:
    house: House = await open_house(accounting={"file": str(file)})
    house.engine.script = unary()
    for _ in range(3):
        async with house.chat(max_tokens=5) as answer:
            assert answer.status == 200
    async with house.chat(temperature=9) as answer:
        assert answer.status == 400
    house.engine.script = Script([b"{}"], 200, "application/json")
    async with house.chat() as answer:
        assert answer.status == 200
    completed = await house.lines(5)
    await until(lambda: len(read(file)) == 4)
    found = read(file)
    assert len({line.id for line in found}) == 4
    settled = [line["settled_tokens"] for line in completed if line["status"] == 200]
    charged = [line.prompt_tokens + line.completion_tokens + line.estimated_tokens for line in found]
    assert charged == settled
    assert {(line.tenant, line.key_id, line.model) for line in found} == {("acme", "k1", "tiny")}
    assert (found[0].estimated_tokens, found[3].estimated_tokens > 0) == (0, True)


async def test_a_stop_writes_every_line(file: Path) -> None:
    billing = Billing(AccountingConfig(file=str(file)))
    writing = asyncio.create_task(billing.write())
    for number in range(500):
        note(billing, number)
        if number % 50 == 0:
            await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait([writing])
    await billing.aclose()
    assert [line.prompt_tokens for line in read(file)] == list(range(500))


def test_a_restart_counts_its_lines_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(1, 10):
        day = datetime(2026, 11, n, tzinfo=UTC)
        payer = PAYER.tenant, PAYER.key, PAYER.model
        one = BillingLine(ReservationId(f"r{n}"), day, day.date(), None, *payer, 7, 2, 3, 1)
        with file.open("ab") as out:
            written = msgspec.json.encode(one) + b"\n"
            out.write(written + b"somebody else's\n")
    days = [(date(2026, 11, n) - date(1970, 1, 1)).days for n in range(1, 10)]
    for len_max, counted in (1 << 20, days), (len(written) + 50, days[-1:]):
        monkeypatch.setattr(lines, "RECOUNTED_LEN_MAX", len_max)
        rows = UsageRows(62)
        billing = Billing(AccountingConfig(file=str(file)))
        billing.recount(rows)
        assert billing.is_recounted
        assert billing.spool is not None
        billing.spool.close()
        found = list(rows.of(PAYER.tenant, 0, 10**6))
        assert [row.day for row in found] == counted
        assert {row.totals.numbers for row in found} == {(1, 7, 2, 3, 1, 1)}
    billing = Billing(AccountingConfig())
    billing.recount(rows)
    assert not billing.is_recounted


class Rotated:
    """A file that is moved aside when it is full, and what a gateway counts that starts with it."""

    def __init__(self, file: Path) -> None:
        self.noted = 0
        self.file_max = 10 * len(self._line(0))
        self.config = AccountingConfig(file=str(file), file_max=MIB)
        object.__setattr__(self.config, "file_max", self.file_max)  # less than anybody may set

    def _line(self, number: int) -> bytes:
        moment, payer = datetime(2026, 11, 1 + number % 3, tzinfo=UTC), (PAYER.tenant, PAYER.key, PAYER.model)
        one = BillingLine(ReservationId(f"r{number:06}"), moment, moment.date(), None, *payer, 7, 2, 3, 1)
        return msgspec.json.encode(one) + b"\n"

    def write(self, count: int) -> None:
        billing = Billing(self.config)
        assert billing.spool is not None
        try:
            for _ in range(count):
                billing.spool.append([self._line(self.noted)])
                self.noted += 1
        finally:
            billing.spool.close()

    def counted(self) -> int:
        """The requests that are counted at a start; every other number agrees with that."""
        rows, billing = UsageRows(62), Billing(self.config)
        assert billing.spool is not None
        billing.recount(rows)
        billing.spool.close()
        assert billing.is_recounted
        totals = Totals()
        for row in rows.of(PAYER.tenant, 0, 10**6):
            totals.add(row.totals)
        n = totals.requests
        assert totals.numbers == (n, 7 * n, 2 * n, 3 * n, n, n)
        return n


def test_a_file_with_a_bound_is_rotated_and_each_line_counts_once(file: Path) -> None:
    rotated = Rotated(file)
    for count in (3, 8, 1, 30, 9, 10, 11):
        rotated.write(count)
        assert rotated.counted() == rotated.noted
        old = file.with_name("lines.jsonl.old")
        sizes = [path.stat().st_size for path in (file, old) if path.exists()]
        assert max(sizes) <= rotated.file_max
    assert rotated.noted == 72
    assert len(read(file)) + len(read(old)) <= 20
    assert {path.name for path in file.parent.iterdir()} == {file.name, old.name, "lines.jsonl.sums"}


@pytest.mark.parametrize("dies", ["before the sums", "after the sums", "before the new file"])
def test_a_process_that_ends_while_it_rotates_loses_and_doubles_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    rotated = Rotated(file)
    rotated.write(20)

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if dies == "before the sums":
            patched.setattr(Path, "rename", end)
        elif dies == "after the sums":
            patched.setattr(os, "rename", end)
        else:
            patched.setattr(Spool, "_follow", _only_after(1, end, Spool._follow))
        with pytest.raises(KeyboardInterrupt):
            rotated.write(1)
    assert rotated.counted() == 20
    rotated.write(35)
    assert rotated.counted() == 55


def _only_after(
    calls: int, instead: Callable[..., None], otherwise: Callable[..., None]
) -> Callable[..., None]:
    seen = []

    def call(*given: object) -> None:
        seen.append(given)
        (instead if len(seen) > calls else otherwise)(*given)

    return call


def test_sums_that_cannot_be_read_are_left_alone(file: Path) -> None:
    rotated = Rotated(file)
    rotated.write(30)
    sums = file.with_name("lines.jsonl.sums")
    sums.write_bytes(b"{")
    rotated.write(25)
    assert sums.read_bytes() == b"{"
    billing = Billing(rotated.config)
    billing.recount(UsageRows(62))
    assert not billing.is_recounted
    assert len(read(file)) >= 25, "no line is lost"


def test_a_file_that_was_renamed_is_left_alone_and_a_new_one_is_begun(file: Path) -> None:
    writer = Spool(file)
    writer.append([b"1\n"])
    file.rename(file.with_suffix(".1"))
    writer.append([b"2\n"])
    assert (file.with_suffix(".1").read_bytes(), file.read_bytes()) == (b"1\n", b"2\n")
    file.unlink()
    writer.append([b"3\n"])
    assert file.read_bytes() == b"3\n"


def test_a_line_that_a_crash_cut_off_is_taken_away(file: Path) -> None:
    file.write_bytes(b"whole\nhal")
    Spool(file).append([b"next\n"])
    assert file.read_bytes() == b"whole\nnext\n"


def test_two_processes_cannot_write_one_file(file: Path) -> None:
    first = Spool(file)
    with pytest.raises(ConfigError, match=r"accounting\.file: another process writes"):
        Spool(file)
    first.close()
    Spool(file)


async def test_a_disk_that_is_full_loses_no_line_and_holds_up_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that failed in its middle leaves whole lines."""
    clock = VirtualClock()
    billing = Billing(AccountingConfig(file=str(file)), clock)
    write = os.write

    def full(fd: int, data: bytes) -> int:
        write(fd, data[:7])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.write", full)
    writing = asyncio.create_task(billing.write())
    note(billing, 1)
    await until(lambda: clock.sleeping == 1)
    assert read(file) == []
    monkeypatch.setattr("os.write", write)
    clock.advance(lines.RETRY_S)
    await until(lambda: len(read(file)) == 1)
    writing.cancel()
    await asyncio.wait([writing])
    await billing.aclose()


def test_the_queue_is_bounded_and_what_is_dropped_is_counted(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "QUEUE_MAX", 3)
    billing = Billing(AccountingConfig(file=str(file)))
    before = lines.LINES.value("dropped")
    for number in range(5):
        note(billing, number)
    assert len(billing._queue) == 3
    assert lines.LINES.value("dropped") - before == 2


# -- the spool of a webhook -----------------------------------------------------------------------


def taken(writer: Spool) -> bytes:
    batch = writer.next_batch()
    assert batch is not None
    writer.sent(batch)
    return batch.data


def test_what_was_taken_is_not_sent_again_by_the_next_process(file: Path) -> None:
    first = Spool(file, 10**6)
    first.append([b"1\n", b"2\n"])
    assert taken(first) == b"1\n2\n"
    first.append([b"3\n"])
    first.close()
    second = Spool(file, 10**6)
    assert second.waiting == 2
    assert taken(second) == b"3\n"
    assert second.next_batch() is None


def test_a_crash_before_the_note_of_what_was_taken_sends_it_twice_and_passes_over_nothing(file: Path) -> None:
    first = Spool(file, 10**6)
    first.append([b"1\n"])
    batch = first.next_batch()
    first.close()
    assert Spool(file, 10**6).next_batch() == batch
    file.with_name(f"{file.name}.sent").write_text("nonsense")


def test_the_file_of_a_webhook_stays_small_and_no_line_is_lost_or_moved(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "COMPACT_LEN", 50)
    monkeypatch.setattr(spool, "BATCH_LEN", 30)
    writer, sent = Spool(file, 1000), b""
    expected = [f"{number:05}\n".encode() for number in range(200)]
    for at in range(0, 200, 4):
        writer.append(expected[at : at + 4])
        sent += taken(writer)
        assert file.stat().st_size <= 200
        if at % 20 == 0:
            writer.close()
            writer = Spool(file, 1000)
    assert sent == b"".join(expected)[: len(sent)]
    assert writer.waiting == 200 * 6 - len(sent)


def test_a_copy_that_the_disk_has_no_room_for_replaces_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is nearly full writes a part of what it is given, without an error, before it gives one."""
    monkeypatch.setattr(spool, "COMPACT_LEN", 50)
    monkeypatch.setattr(spool, "BATCH_LEN", 30)
    writer = Spool(file, 1000)
    expected = [f"{number:05}\n".encode() for number in range(20)]
    writer.append(expected)
    before = file.read_bytes()
    sent = taken(writer)
    write, room = os.write, 20

    def nearly_full(fd: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(fd, data[:room])
        room -= written
        return written

    monkeypatch.setattr("os.write", nearly_full)
    batch = writer.next_batch()
    assert batch is not None
    with pytest.raises(OSError, match="No space left"):
        writer.sent(batch)
    assert file.read_bytes() == before
    assert not file.with_name(f"{file.name}.new").exists()
    monkeypatch.setattr("os.write", write)
    sent += batch.data
    while writer.waiting:
        sent += taken(writer)
    assert sent == b"".join(expected)
    assert file.stat().st_size < len(before)


def renamed(path: Path) -> None:
    path.rename(f"{path}.1")


def renamed_and_created(path: Path) -> None:
    """As logrotate does it by default, with `create`."""
    renamed(path)
    path.touch()


def renamed_and_another_there(path: Path) -> None:
    renamed(path)
    path.write_bytes(b"another's\n")


@pytest.mark.parametrize("rotate", [renamed, renamed_and_created, renamed_and_another_there, Path.unlink])
@pytest.mark.parametrize("when", ["before a batch", "while it is posted", "after it was taken"])
def test_a_file_that_is_rotated_under_a_webhook_loses_no_line(
    file: Path, rotate: Callable[[Path], None], when: str
) -> None:
    writer, sent = Spool(file, 10**6), b""
    old, new = ([b"%d\n" % number for number in range(*ends)] for ends in ((0, 5), (5, 14)))
    writer.append(old)
    if when == "before a batch":
        rotate(file)
    batch = writer.next_batch()
    assert batch is not None
    sent += batch.data
    if when == "while it is posted":
        rotate(file)
    assert writer.append(new) == len(new)
    writer.sent(batch)
    if when == "after it was taken":
        rotate(file)
    sent += taken(writer)
    expected = b"".join([*old, *new])
    assert sent.replace(b"another's\n", b"") in (expected, b"".join(old) + expected)
    assert rotate is renamed_and_another_there or sent == expected, "and none comes twice"
    assert writer.waiting == 0
    writer.close()
    assert Spool(file, 10**6).next_batch() is None


def test_a_file_that_is_cut_short_under_a_webhook_goes_on_where_it_ends(file: Path) -> None:
    writer = Spool(file, 10**6)
    writer.append([b"one\n", b"two\n"])
    batch = writer.next_batch()
    assert batch is not None
    os.truncate(file, 0)
    writer.append([b"three\n"])
    writer.sent(batch)
    assert taken(writer) == file.read_bytes() == b"three\n"


def test_a_rotation_that_the_disk_has_no_room_for_is_made_later(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Spool(file, 10**6)
    writer.append([b"one\n"])
    renamed(file)
    with monkeypatch.context() as patch:
        patch.setattr(spool, "write_all", no_room)
        with pytest.raises(OSError, match="No space"):
            writer.append([b"two\n"])
    assert file.read_bytes() == b""
    writer.append([b"two\n"])
    assert taken(writer) == b"one\ntwo\n"


def no_room(_: int, __: bytes) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_many_lines_that_have_no_room_are_looked_at_once(file: Path) -> None:
    class Line(bytes):
        looks = 0

        def __len__(self) -> int:
            Line.looks += 1
            return super().__len__()

    assert Spool(file, 10).append([Line(b"ninebytes")] * 10_000) == 1
    assert Line.looks < 50_000, "some look-ups of each, whatever their number"


def test_a_full_spool_takes_whole_lines_and_says_how_many(file: Path) -> None:
    writer = Spool(file, 10)
    assert writer.append([b"1234\n", b"5678\n", b"9\n"]) == 2
    assert writer.append([b"0\n"]) == 0
    assert file.read_bytes() == b"1234\n5678\n"


@pytest.mark.parametrize("is_ended", [False, True])
def test_a_spool_of_the_smallest_size_takes_lines_for_ever(file: Path, *, is_ended: bool) -> None:
    """Also where its process was ended, or the disk full, when all lines were taken and none was cut off."""
    line, len_max = b"x" * 299 + b"\n", MIB
    writer = Spool(file, len_max)
    for _ in range(3):
        assert writer.append([line] * 4000) > 1000, "there is room again"
        assert writer.append([line] * 60) == 0, "it is full"
        with pytest.MonkeyPatch.context() as patch:
            if is_ended:
                patch.setattr(Spool, "_compact", full_disk)
            while (batch := writer.next_batch()) is not None:
                with suppress(OSError):
                    writer.sent(batch)
        if is_ended:
            writer.close()
            writer = Spool(file, len_max)
        writer.note()
        assert file.stat().st_size <= len_max / 2


def full_disk(_: Spool) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_a_full_disk_kept_from_being_cut_off_is_cut_off_without_another_line(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "COMPACT_LEN", 5)
    writer = Spool(file, 10)
    assert writer.append([b"1234\n", b"5678\n"]) == 2
    with monkeypatch.context() as patch:
        patch.setattr(Spool, "_compact", full_disk)
        batch = writer.next_batch()
        assert batch is not None
        with pytest.raises(OSError, match="No space left"):
            writer.sent(batch)
    writer.note()
    assert writer.append([b"9012\n", b"3456\n"]) == 2
