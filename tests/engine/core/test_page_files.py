"""Page files: what is damaged, foreign or gone is a miss, and nothing else is touched."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.core.pages.block_manager import PageIdentity
from engine.core.pages.page_files import (
    HEADER_LEN,
    DirectoryInUse,
    DirectoryNotPrivate,
    PageFiles,
    open_directory,
)

PAGE_BYTES = 64
MODEL, OTHER_MODEL = b"m" * 32, b"n" * 32


def identity(number: int) -> PageIdentity:
    return PageIdentity(number.to_bytes(32, "big"))


def page(number: int) -> memoryview:
    return memoryview(bytes([number]) * PAGE_BYTES)


def opened(path: Path, files: int = 8, model: bytes = MODEL) -> PageFiles:
    return PageFiles(open_directory(path), model, PAGE_BYTES, files * (HEADER_LEN + PAGE_BYTES))


def read(files: PageFiles, number: int) -> bytes | None:
    buffer = bytearray(PAGE_BYTES)
    return bytes(buffer) if files.read_into(identity(number), memoryview(buffer)) else None


def name(path: Path, number: int, model: bytes = MODEL) -> Path:
    return path / f"{hashlib.sha256(model + identity(number)).hexdigest()}.kv"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv" / "pages"


@pytest.fixture
def files(path: Path) -> Iterator[PageFiles]:
    files = opened(path)
    yield files
    files.close()


def test_a_page_is_read_as_it_was_written(files: PageFiles, path: Path) -> None:
    assert not files.has(identity(1))
    assert read(files, 1) is None
    assert files.write(identity(1), page(1))
    assert files.write(identity(1), page(1)), "once more is nothing"
    assert read(files, 1) == bytes(page(1))
    assert [each.name for each in path.iterdir()] == [name(path, 1).name]
    assert name(path, 1).stat().st_mode & 0o777 == 0o600
    assert path.stat().st_mode & 0o777 == 0o700


def test_a_restart_finds_what_was_written_and_removes_what_was_begun(path: Path) -> None:
    files = opened(path)
    files.write(identity(1), page(1))
    files.close()
    (path / f"{identity(2).hex()}.tmp").write_bytes(b"begun")
    (path / "notes.txt").write_text("of somebody")
    (path / "notes.kv").write_text("of somebody")
    again = opened(path)
    again.write(identity(3), page(3))  # while it looks
    again.scan()
    assert [again.has(identity(n)) for n in (1, 2, 3)] == [True, False, True]
    assert read(again, 1) == bytes(page(1))
    assert sorted(each.name for each in path.iterdir()) == sorted(
        [name(path, 1).name, name(path, 3).name, "notes.txt", "notes.kv"]
    )
    again.close()


def test_a_second_engine_is_refused_even_when_everything_was_deleted(files: PageFiles, path: Path) -> None:
    files.write(identity(1), page(1))
    for each in path.iterdir():
        each.unlink()
    with pytest.raises(DirectoryInUse, match="in use by another engine"):
        opened(path)
    assert read(files, 1) is None
    assert not files.has(identity(1))
    assert files.write(identity(1), page(1)), "it goes on"


@pytest.mark.parametrize(
    ("mode", "holds"),
    [(0o755, None), (0o1777, None), (0o770, "notes.txt"), (0o707, f"{identity(1).hex()}.kv")],
)
def test_a_directory_that_is_open_to_others_is_refused_and_stays_as_it_is(
    path: Path, mode: int, holds: str | None
) -> None:
    path.mkdir(parents=True)
    if holds is not None:
        (path / holds).write_text("of somebody")
    path.chmod(mode)
    with pytest.raises(DirectoryNotPrivate, match=f"{path} is open to others .mode {mode:04o}"):
        opened(path)
    assert path.stat().st_mode & 0o7777 == mode


def test_another_users_directory_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(DirectoryNotPrivate, match=f"{path} belongs to another user"):
        opened(path)


def test_a_directory_that_kubernetes_opened_to_its_group_is_closed_again(path: Path) -> None:
    files = opened(path)
    files.write(identity(1), page(1))
    files.close()
    path.chmod(0o2770)
    again = opened(path)
    assert path.stat().st_mode & 0o777 == 0o700
    again.close()


def test_the_files_that_were_used_longest_ago_make_room(path: Path) -> None:
    files = opened(path, files=2)
    files.write(identity(1), page(1))
    files.write(identity(2), page(2))
    assert read(files, 1) is not None
    files.write(identity(3), page(3))
    assert [files.has(identity(n)) for n in (1, 2, 3)] == [True, False, True]
    assert len(files) == len(list(path.iterdir())) == 2
    files.close()
    os.utime(name(path, 1), ns=(5, 5))
    smaller = opened(path, files=1)
    smaller.scan()
    assert not smaller.has(identity(1))
    assert read(smaller, 3) == bytes(page(3))
    smaller.close()
    none = opened(path, files=0)
    assert not none.write(identity(1), page(1))
    none.close()


def test_pages_of_the_same_tokens_by_two_models_lie_side_by_side(path: Path) -> None:
    """An engine that merely differs takes nothing from one that comes back."""
    files = opened(path)
    files.write(identity(1), page(1))
    files.close()
    other = opened(path, model=OTHER_MODEL)
    other.scan()
    assert not other.has(identity(1))
    assert read(other, 1) is None
    assert other.write(identity(1), page(2))
    assert (len(other), other.others) == (1, 1)
    other.close()
    again = opened(path)
    again.scan()
    assert (len(again), again.others) == (1, 1)
    assert read(again, 1) == bytes(page(1))
    again.close()


def test_files_of_other_models_make_room_first_and_the_oldest_of_them_first(path: Path) -> None:
    files = opened(path)
    for number in (1, 2, 3):
        files.write(identity(number), page(number))
        os.utime(name(path, number), ns=(10 - number, 10 - number))
    files.close()
    longer = 2 * PAGE_BYTES
    room = 3 * (HEADER_LEN + PAGE_BYTES) + HEADER_LEN + longer
    other = PageFiles(open_directory(path), OTHER_MODEL, longer, room)
    other.scan()
    left = []
    for number in (4, 5, 6, 7):
        assert other.write(identity(number), memoryview(bytes(longer)))
        assert sum(each.stat().st_size for each in path.iterdir()) <= room
        left.append([n for n in (1, 2, 3) if name(path, n).exists()])
    assert left == [[1, 2, 3], [1], [], []]
    assert (len(other), other.others) == (3, 0)
    assert not other.has(identity(4)), "then its own make room"
    other.close()


def test_what_no_model_could_read_is_removed_whatever_its_fingerprint(path: Path) -> None:
    files = opened(path)
    for number in (1, 2, 3, 4):
        files.write(identity(number), page(number))
    files.close()
    os.truncate(name(path, 1), HEADER_LEN + PAGE_BYTES - 1)
    of_another_version(path, 2)
    name(path, 3).rename(name(path, 5))
    other = opened(path, model=OTHER_MODEL)
    other.scan()
    assert list(path.iterdir()) == [name(path, 4)]
    other.close()


def truncate(path: Path) -> None:
    os.truncate(name(path, 1), HEADER_LEN + PAGE_BYTES - 1)


def lengthen(path: Path) -> None:
    os.truncate(name(path, 1), HEADER_LEN + PAGE_BYTES + 1)


def swap(path: Path) -> None:
    name(path, 1).write_bytes(name(path, 2).read_bytes())


def of_another_version(path: Path, number: int = 1) -> None:
    data = bytearray(name(path, number).read_bytes())
    data[8] += 1
    name(path, number).write_bytes(data)


def replaced_by_a_link(path: Path) -> None:
    name(path, 1).rename(path / "elsewhere")
    name(path, 1).symlink_to(path / "elsewhere")


@pytest.mark.parametrize("damage", [truncate, lengthen, swap, of_another_version])
@pytest.mark.parametrize("is_running", [True, False])
def test_a_file_that_is_not_as_it_was_is_a_miss_and_removed(
    path: Path, damage: Callable[[Path], None], is_running: bool
) -> None:
    files = opened(path)
    files.write(identity(1), page(1))
    files.write(identity(2), page(2))
    if not is_running:
        files.close()
    damage(path)
    if not is_running:
        files = opened(path)
        files.scan()
    assert read(files, 1) is None
    assert not files.has(identity(1))
    assert not name(path, 1).exists()
    assert read(files, 2) == bytes(page(2))
    files.close()


def test_a_link_is_never_followed(files: PageFiles, path: Path) -> None:
    files.write(identity(1), page(1))
    replaced_by_a_link(path)
    assert read(files, 1) is None
    assert not files.has(identity(1))


@given(at=st.integers(0, HEADER_LEN + PAGE_BYTES - 1), bit=st.integers(0, 7))
@example(at=HEADER_LEN, bit=0)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bit_can_be_flipped(files: PageFiles, path: Path, at: int, bit: int) -> None:
    files.write(identity(1), page(1))
    data = bytearray(name(path, 1).read_bytes())
    data[at] ^= 1 << bit
    name(path, 1).write_bytes(data)
    assert read(files, 1) is None
    assert not name(path, 1).exists()


def test_a_full_disk_leaves_nothing_behind(
    files: PageFiles, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        files.write(identity(1), page(1))
    assert not list(path.iterdir())
    assert not files.has(identity(1))


def test_a_file_that_shrinks_while_it_is_read_is_a_miss(
    files: PageFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(identity(1), page(1))
    monkeypatch.setattr(os, "readv", lambda file, buffers: 0)
    assert read(files, 1) is None


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        opened(tmp_path / "file" / "kv")


def test_a_file_that_may_not_be_read_is_an_error(
    files: PageFiles, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    files.write(identity(1), page(1))
    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(PermissionError):
        read(files, 1)
    assert files._header(name(path, 1).name) is None
