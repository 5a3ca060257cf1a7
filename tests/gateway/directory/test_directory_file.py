"""The directory in the configuration file: what an edit leaves as it was, and what it refuses to touch."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import os
import stat
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.config.quotas import QuotaLimits
from gateway.config.secret import read_secret
from gateway.config.whole import KeyConfig, TenantConfig, load
from gateway.directory import file_directory
from gateway.directory.accounts import AccountsReader
from gateway.directory.entries import check_match, decode_object
from gateway.directory.file_directory import FileDirectory
from gateway.directory.registry import Registry
from gateway.directory.toml_edit import CannotEdit, replace_table
from gateway.identity.keys import hash_key
from shared.process.files import MARK
from shared.process.setting_values import ConfigError
from shared.wire.errors import Conflict, DirectoryUnavailable
from tests.gateway.conftest import until
from tests.gateway.directory.directory_world import World, directory_world

FILE = f"""\
# The gateway of the tests.
[[models]]
name = "tiny"  # the only one
replicas = [
  "http://engine",
]

[[tenants]]
id = "acme"

# The first key is the portal's.
[[keys]]
id = "one"
hash = "{hash_key("one")}"
tenant = "acme"
[keys.limits]
concurrent = 3

# The second one is nobody's.
[[keys]]  # two
id = "two"
hash = "{hash_key("two")}"
tenant = "acme"

[limits]  # behind all keys
live_max = 9
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "gateway.toml"
    path.write_text(FILE)
    return path


def registry(path: Path, env: dict[str, str] | None = None) -> Registry:
    accounts = AccountsReader(load(path, {}), path)
    return Registry(FileDirectory(path, accounts, env or {}), accounts)


# -- the text -------------------------------------------------------------------------------------


def comments(text: str) -> list[str]:
    return [line.partition("#")[2] for line in text.splitlines() if "#" in line]


def key(id_: str) -> KeyConfig:
    return KeyConfig(id_, hash_key(id_), "acme", limits=QuotaLimits(tokens_per_min=1), labels=('a "b"\n',))


@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_a_table_is_added_behind_all_others_and_nothing_else_changes(end: str) -> None:
    text = FILE.rstrip("\n") + end
    edited = replace_table(text, "keys", None, key("three"))
    assert edited.startswith(text)
    keys = tomllib.loads(edited)["keys"]
    assert [entry["id"] for entry in keys] == ["one", "two", "three"]
    assert keys[2]["limits"] == {"tokens_per_min": 1}
    assert tomllib.loads(replace_table(edited, "keys", 2, None)) == tomllib.loads(text)


@pytest.mark.parametrize(("at", "lost"), [(0, []), (1, [" two"])])
def test_a_table_is_replaced_with_its_inner_tables_and_comments_elsewhere_stay(
    at: int, lost: list[str]
) -> None:
    edited = replace_table(FILE, "keys", at, key("new"))
    assert [c for c in comments(FILE) if c not in comments(edited)] == lost
    found = tomllib.loads(edited)
    assert found["keys"][at]["id"] == "new"
    assert found["keys"][at]["limits"] == {"tokens_per_min": 1}
    assert found["keys"][1 - at] == tomllib.loads(FILE)["keys"][1 - at]
    assert found["limits"] == {"live_max": 9}
    removed = tomllib.loads(replace_table(FILE, "keys", at, None))
    assert [entry["id"] for entry in removed["keys"]] == [["two"], ["one"]][at]


@pytest.mark.parametrize("at", [None, 0, 1])
@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_new_lines_end_as_the_files_own_do(at: int | None, end: str) -> None:
    text = FILE.rstrip("\n") + end
    for record in (key("new"), None)[: 1 if at is None else 2]:
        edited = replace_table(text.replace("\n", "\r\n"), "keys", at, record)
        assert edited == replace_table(text, "keys", at, record).replace("\n", "\r\n")


@pytest.mark.parametrize(
    "text",
    [
        'keys = [{ id = "one" }]\n',
        'text = """\n[[keys]]\n"""\n[[keys]]\nid = "one"\n',
        '[[keys]]\nid = "one"\nmodels = [\n[[keys]]\n]\n',
        '["keys"]\n',
    ],
)
def test_a_file_that_is_written_in_another_way_is_refused_rather_than_damaged(text: str) -> None:
    with pytest.raises(CannotEdit):
        replace_table(text, "keys", 0, key("new"))


def test_an_entry_can_be_added_to_a_list_that_is_written_in_one_line_only_if_it_stays_valid() -> None:
    with pytest.raises(CannotEdit):
        replace_table('keys = [{ id = "one" }]\n', "keys", None, key("new"))


def test_a_tenant_with_times_of_its_own_is_written_whole() -> None:
    tenant = TenantConfig("new", models=("tiny",), on_revoke="end", quota_fail="local")
    edited = replace_table(FILE, "tenants", 0, tenant)
    assert tomllib.loads(edited)["tenants"] == [
        {"id": "new", "models": ["tiny"], "quota_fail": "local", "on_revoke": "end"}
    ]


# -- the file -------------------------------------------------------------------------------------


def text_of(path: Path) -> str:
    return path.read_bytes().decode()


def write(path: Path, text: str | bytes) -> None:
    path.write_bytes(text.encode() if isinstance(text, str) else text)


def linked(file: Path) -> Path:
    file.chmod(0o640)
    link = file.with_name("link.toml")
    link.symlink_to(file)
    return link


async def test_the_file_keeps_its_mode_its_owner_and_its_name_behind_a_link(
    file: Path, tmp_path: Path
) -> None:
    link = linked(file)
    await registry(link).create_key({"tenant": "acme"}, "test")
    assert stat.S_ISLNK(os.lstat(link).st_mode)
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o640
    assert len(load(file, {}).keys) == 3
    assert sorted(os.listdir(tmp_path)) == ["gateway.toml", "link.toml"], "no draft is left"


async def test_the_file_keeps_the_ends_of_its_lines(file: Path) -> None:
    write(file, FILE.replace("\n", "\r\n"))
    mine = registry(file)
    await mine.patch_key("two", {"labels": ["a"]}, "test", None)
    await mine.create_key({"tenant": "acme"}, "test")
    edited = text_of(file)
    assert edited.startswith(FILE.partition("# The second")[0].replace("\n", "\r\n"))
    assert edited.count("\r\n") == edited.count("\n") == edited.count("\r")


async def test_a_byte_order_mark_is_ignored(file: Path) -> None:
    """PowerShell and some editors write one before a file, and before a body."""
    mark = b"\xef\xbb\xbf"
    write(file, MARK + FILE.partition("[[tenants]]")[0] + '[[tenants]]\nid = "acme"\n')
    assert decode_object(mark + b'{"tenant":"acme"}') == {"tenant": "acme"}
    mine = registry(file)
    await mine.create_key({"tenant": "acme"}, "test")
    assert [key.tenant for key in load(file, {}).keys] == ["acme"]
    file.with_name("secret").write_bytes(mark + b"secret\r\n")
    assert read_secret(f"file:{file.with_name('secret')}", {}) == "secret"


async def test_a_change_that_contradicts_the_rest_of_the_file_is_refused(file: Path) -> None:
    with pytest.raises(Conflict, match="still has keys"):
        await registry(file).delete_tenant("acme", "test", None)
    broken = FILE.replace("live_max = 9", "live_max = 0")
    mine = registry(file)
    write(file, broken)
    with pytest.raises(ConfigError, match="live_max"):
        await mine.create_key({"tenant": "acme"}, "test")
    assert text_of(file) == broken
    write(file, FILE.replace('"tiny"', '"another"'))
    with pytest.raises(ConfigError, match="tiny"):
        await mine.put_tenant("new", {"models": ["tiny"]}, "test", None)


async def test_a_variable_that_wins_over_the_file_is_named(file: Path) -> None:
    with pytest.raises(Conflict, match="PENSTOCK_GATEWAY_KEYS is set"):
        await registry(file, {"PENSTOCK_GATEWAY_KEYS": "[]"}).create_key({"tenant": "acme"}, "test")
    assert text_of(file) == FILE


async def test_a_write_that_fails_leaves_the_file_as_it_was(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DirectoryUnavailable, match="No space left"):
        await registry(file).create_key({"tenant": "acme"}, "test")
    assert text_of(file) == FILE
    assert os.listdir(tmp_path) == ["gateway.toml"]


def folders_fail(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    """Let no folder be synced from now on."""
    sync = os.fsync

    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise error
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)


async def test_a_change_that_the_disk_may_forget_counts_and_is_told_as_unknown(
    tmp_path: Path, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with directory_world(tmp_path, log, None) as world:
        await world.open()
        folders_fail(monkeypatch, OSError(errno.EIO, "Input/output error"))
        answer = await world.ask("POST", "keys", {"tenant": "acme"})
        assert (answer.status, answer.code) == (503, "change_unknown")
        await until(lambda: bool(world.logged("admin.change")))
        [line] = world.logged("admin.change")
        assert (line["action"], line["outcome"], line["to"]["tenant"]) == ("key.create", "unknown", "acme")
        assert (await world.ask("GET", f"keys/{line['target']}")).status == 200
        assert line["target"] in [key.id for key in load(world.path, {}).keys]


async def test_a_file_system_that_syncs_no_folders_takes_changes(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders_fail(monkeypatch, OSError(errno.EINVAL, "Invalid argument"))
    await registry(file).create_key({"tenant": "acme"}, "test")
    assert len(load(file, {}).keys) == 3


async def test_a_change_waits_for_that_of_another_process_and_not_for_ever(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = os.open(file.parent, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    monkeypatch.setattr(file_directory, "LOCK_S", 0.0)
    with pytest.raises(DirectoryUnavailable, match="Another process"):
        await registry(file).create_key({"tenant": "acme"}, "test")
    monkeypatch.undo()
    waiting = asyncio.create_task(registry(file).create_key({"tenant": "acme"}, "test"))
    os.close(handle)
    await waiting
    assert len(load(file, {}).keys) == 3


async def test_changes_by_several_at_once_are_all_made(file: Path) -> None:
    both = registry(file), registry(file)
    await asyncio.gather(*(both[n % 2].create_key({"tenant": "acme"}, "test") for n in range(6)))
    assert len(load(file, {}).keys) == 8


async def test_what_an_editor_writes_meanwhile_is_not_overwritten(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand = FILE.replace("# The gateway of the tests.", "# By hand.")

    def edited(*given: Any) -> None:
        write(file, by_hand)
        check_match(*given)

    monkeypatch.setattr(file_directory, "check_match", edited)
    with pytest.raises(Conflict, match="by hand"):
        await registry(file).create_key({"tenant": "acme"}, "test")
    assert text_of(file) == by_hand


@pytest.mark.parametrize("garbage", [b"not toml [", b"\xff\xfe"])
async def test_a_file_that_is_garbage_by_now_is_left_alone(file: Path, garbage: bytes) -> None:
    mine = registry(file)
    write(file, garbage)
    with pytest.raises((Conflict, DirectoryUnavailable), match="cannot be edited"):
        await mine.create_key({"tenant": "acme"}, "test")


async def test_a_gateway_without_a_file_says_so(file: Path) -> None:
    accounts = AccountsReader(load(file, {}), None)
    with pytest.raises(Conflict, match="no file"):
        await Registry(FileDirectory(None, accounts), accounts).create_key({"tenant": "acme"}, "test")


async def test_a_change_made_by_hand_meanwhile_is_kept(tmp_path: Path, log: io.StringIO) -> None:
    async with directory_world(tmp_path, log, None) as world:
        await world.open()
        write(world.path, replace_table(text_of(world.path), "tenants", None, TenantConfig("by-hand")))
        assert (await made(world)).keys() >= {"key", "id"}
        assert [tenant.id for tenant in load(world.path, {}).tenants] == ["acme", "other", "by-hand"]
        assert (await world.ask("GET", "tenants/by-hand")).status == 200


async def made(world: World) -> dict[str, Any]:
    return await world.key(tenant="acme")


def test_replacing_a_value_by_itself_changes_no_meaning(file: Path) -> None:
    config = load(file, {})
    for at, entry in enumerate(config.keys):
        assert tomllib.loads(replace_table(FILE, "keys", at, replace(entry))) == tomllib.loads(FILE)
