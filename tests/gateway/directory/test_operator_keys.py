"""Operators' keys: made, replaced and revoked in the file, which gateways follow, and by no request."""

from __future__ import annotations

import asyncio
import errno
import io
import re
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.config.edge import OperatorKeyConfig
from gateway.config.whole import load
from gateway.directory import accounts
from gateway.directory.accounts import AccountsReader
from gateway.directory.file_directory import FileDirectory
from gateway.directory.registry import Registry
from gateway.identity.keys import hash_key
from gateway.operators.gate import COOKIE, SESSION
from shared.process.setting_values import ConfigError
from shared.wire.errors import ChangeUnknown, Conflict, NotFound
from tests.fakes import VirtualClock
from tests.gateway.conftest import KEY, PATIENCE_S, settings, until
from tests.gateway.directory.directory_world import OPERATOR, OPERATORS, World, directory_world
from tests.gateway.directory.test_directory_file import folders_fail

VICTIM = "another operator's"
BY = "os:test"


class Desk:
    """A gateway that follows its file by itself, and who edits that."""

    def __init__(self, world: World, clock: VirtualClock) -> None:
        self.world, self.clock = world, clock

    @property
    def keys(self) -> Registry:
        reader = AccountsReader(load(self.world.path, {}), self.world.path)
        return Registry(FileDirectory(self.world.path, reader, {}), reader, self.clock)

    async def followed(self) -> None:
        """Let the gateway look at its file, as it does every second, until it has read what is there. A look
        that has begun already may come too early."""
        reader, there = self.world.gateways[0].accounts, load(self.world.path, {}).admin.keys
        async with asyncio.timeout(PATIENCE_S):
            while reader.config.admin.keys != there:
                self.clock.advance(accounts.POLL_S)
                await asyncio.sleep(0.1)

    async def status(self, key: str) -> int:
        """What the admin listener answers to this key."""
        answer = await self.world.ask("GET", "operators", headers={"authorization": f"Bearer {key}"})
        return answer.status

    async def statuses(self, *keys: str) -> list[int]:
        return [await self.status(key) for key in keys]


@pytest.fixture
async def desk(tmp_path: Path, log: io.StringIO) -> AsyncIterator[Desk]:
    async with directory_world(tmp_path, log, None) as world:
        clock = VirtualClock()
        await world.open(clock=clock)
        yield Desk(world, clock)


async def test_a_key_is_made_replaced_and_revoked_while_the_gateway_runs(desk: Desk) -> None:
    made = await desk.keys.create_operator_key({"labels": ["the night shift"]}, BY)
    assert re.fullmatch(r"sk_admin_[a-z0-9]{12}_[A-Za-z0-9]{32}", made.key)
    await desk.followed()
    assert await desk.statuses(made.key, OPERATOR, VICTIM) == [200, 200, 200]
    assert await desk.world.status(made.key) == 403, "it opens no model"
    new = await desk.keys.rotate_operator_key(made.id, {"overlap_s": 60}, BY)
    assert new.id == made.id
    await desk.followed()
    assert await desk.statuses(made.key, new.key) == [200, 200]
    desk.clock.advance(60)
    assert await desk.statuses(made.key, new.key) == [401, 200], "by the clock, without a change of the file"
    await desk.keys.revoke_operator_key(made.id, BY)
    await desk.followed()
    assert await desk.statuses(made.key, new.key, OPERATOR, VICTIM) == [401, 401, 200, 200]
    await desk.keys.delete_key(made.id, BY, None, OperatorKeyConfig)
    await desk.followed()
    assert await desk.statuses(new.key, OPERATOR, VICTIM) == [401, 200, 200]
    assert [key["id"] for key in tomllib.loads(desk.world.path.read_text())["admin"]["keys"]] == [
        "ops",
        "ops-2",
    ]


async def test_a_stolen_key_ends_with_one_change_and_has_made_no_other(desk: Desk) -> None:
    """Whoever has it tries all that the listener takes. The victim is another operator."""
    world = desk.world
    origin = f"http://127.0.0.1:{world.gateways[0].admin_port}"
    async with world.client.post(
        f"{origin}{SESSION}", json={"key": OPERATOR}, headers={"origin": origin}
    ) as answer:
        cookie = {"cookie": f"{COOKIE}={answer.cookies[COOKIE].value}"}
        assert answer.status == 200
    before = world.path.read_bytes()
    for method, path, body in (
        ("POST", "operators", {"labels": ["mine"]}),
        ("POST", "operators/ops/rotate", {"overlap_s": 0}),
        ("PATCH", "operators/ops-2", {"disabled": True}),
        ("DELETE", "operators/ops-2", None),
        ("PUT", "operators/ops", {"hash": hash_key("mine")}),
        ("PATCH", "keys/ops-2", {"disabled": True}),
        ("POST", "keys/ops/rotate", {}),
        ("POST", "keys", {"tenant": accounts.OPERATORS}),
        ("POST", "keys", {"tenant": "acme", "id": "ops"}),
    ):
        answered = await world.ask(method, path, body)
        assert answered.status in (400, 404, 405), (method, path)
    assert world.path.read_bytes() == before
    tenants = await world.key()
    assert await desk.status(tenants["key"]) == 403, "what it can make opens nothing here"
    new = await desk.keys.rotate_operator_key("ops", {"overlap_s": 0}, BY)
    await desk.followed()
    assert await desk.statuses(OPERATOR, new.key, VICTIM) == [401, 200, 200]
    async with world.client.get(f"{origin}/admin/v1/operators", headers=cookie) as shown:
        assert shown.status == 401, "nor does its session in the console"


async def test_the_list_shows_what_counts_here_and_no_hash(desk: Desk) -> None:
    made = await desk.keys.create_operator_key({"expires": "2030-01-31T00:00:00Z"}, BY)
    assert [one["id"] for one in (await desk.world.ask("GET", "operators")).body["data"]] == ["ops", "ops-2"]
    await desk.followed()
    answer = await desk.world.ask("GET", "operators")
    assert {one["id"] for one in answer.body["data"]} == {"ops", "ops-2", made.id}
    [own] = [one for one in answer.body["data"] if one["id"] == made.id]
    assert own["expires"] == "2030-01-31T00:00:00Z"
    assert "hash" not in str(answer.body)
    assert made.key not in str(answer.body)
    assert (
        await desk.world.ask("GET", "operators", headers={"authorization": f"Bearer {KEY}"})
    ).status == 403


async def test_each_change_has_an_audit_line_without_a_secret(desk: Desk, log: io.StringIO) -> None:
    made = await desk.keys.create_operator_key({}, BY)
    new = await desk.keys.rotate_operator_key(made.id, {}, BY)
    await desk.keys.revoke_operator_key(made.id, BY)
    await desk.keys.revoke_operator_key(made.id, BY)
    await desk.keys.delete_key(made.id, BY, None, OperatorKeyConfig)
    await desk.world.line("admin.change", "operator.delete")
    lines = [line for line in desk.world.logged("admin.change") if line["target"] == made.id]
    actions = [f"operator.{action}" for action in ("create", "rotate", "revoke", "delete")]
    assert [line["action"] for line in lines] == actions, "none for the second, which changed nothing"
    assert {line["operator"] for line in lines} == {BY}
    for secret in (made.key, new.key, hash_key(made.key), hash_key(new.key)):
        assert secret not in log.getvalue()
        assert secret not in repr(load(desk.world.path, {}))


async def test_what_would_end_a_secret_in_use_is_refused(desk: Desk) -> None:
    made = await desk.keys.create_operator_key({}, BY)
    await desk.keys.rotate_operator_key(made.id, {"overlap_s": 600}, BY)
    with pytest.raises(Conflict, match="works until"):
        await desk.keys.rotate_operator_key(made.id, {"overlap_s": 600}, BY)
    await desk.keys.rotate_operator_key(made.id, {"overlap_s": 0}, BY)
    await desk.keys.revoke_operator_key(made.id, BY)
    with pytest.raises(Conflict, match="is revoked"):
        await desk.keys.rotate_operator_key(made.id, {}, BY)
    with pytest.raises(NotFound, match="no operator's key 'k1'"):
        await desk.keys.rotate_operator_key("k1", {}, BY)
    with pytest.raises(ConfigError) as caught:
        await desk.keys.create_operator_key({"tenant": "acme", "expires": "2001-01-31T00:00:00Z"}, BY)
    assert len(caught.value.problems) == 2


ADMIN = f"""\
[[models]]
name = "tiny"
replicas = ["http://engine"]

# The first operator.
[[admin.keys]]
id = "ops"
hash = "{hash_key("ops")}"

[admin] # behind its keys
port = 9090
"""


def desk_of(path: Path, env: dict[str, str] | None = None) -> Registry:
    reader = AccountsReader(load(path, env or {}), path)
    return Registry(FileDirectory(path, reader, env or {}), reader)


async def test_all_else_in_the_file_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(ADMIN)
    made = await desk_of(path).create_operator_key({}, BY)
    assert path.read_text().startswith(ADMIN)
    await desk_of(path).delete_key(made.id, BY, None, OperatorKeyConfig)
    assert path.read_text().strip() == ADMIN.strip()
    await desk_of(path).delete_key("ops", BY, None, OperatorKeyConfig)
    assert path.read_text().strip() == re.sub(r"\[\[admin.keys\]\]\n.*\n.*\n", "", ADMIN).strip()
    assert load(path, {}).admin.keys == ()
    path.write_text(path.read_text().partition("# The first")[0])
    first = await desk_of(path).create_operator_key({}, BY)
    await desk_of(path).delete_key(first.id, BY, None, OperatorKeyConfig)
    assert load(path, {}).admin.keys == ()


@pytest.mark.parametrize(
    ("head", "env"),
    [
        ('[admin]\nport = 9090\nkeys = [{{ id = "ops", hash = "{hash}" }}]\n', {}),
        ('admin = {{ port = 9090, keys = [{{ id = "ops", hash = "{hash}" }}] }}\n', {}),
        ("[admin]\nport = 9090\n", {"PENSTOCK_GATEWAY_ADMIN__KEYS": '[{ id = "ops", hash = "HASH" }]'}),
    ],
    ids=["list", "table", "variable"],
)
async def test_a_file_that_cannot_be_edited_is_left_alone(
    tmp_path: Path, head: str, env: dict[str, str]
) -> None:
    path = tmp_path / "gateway.toml"
    models = '[[models]]\nname = "tiny"\nreplicas = ["http://engine"]\n'
    path.write_text(head.format(hash=hash_key("ops")) + models)
    env = {name: text.replace("HASH", hash_key("ops")) for name, text in env.items()}
    before = path.read_bytes()
    told = "wins over the file" if env else r"not written as \[\[admin.keys\]\] tables"
    for change in (
        desk_of(path, env).create_operator_key({}, BY),
        desk_of(path, env).rotate_operator_key("ops", {}, BY),
    ):
        with pytest.raises(Conflict, match=told):
            await change
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        ({"id": "ops", "hash": hash_key("x")}, "admin.keys: 'ops' is given 2 times"),
        ({"id": "twin", "hash": hash_key(OPERATOR)}, "'ops' and 'twin' have the same secret"),
        (
            {"id": "twin", "hash": hash_key("x"), "previous_hash": hash_key(OPERATOR)}
            | {"previous_expires": "2030-01-31T00:00:00Z"},
            "'ops' and 'twin' have the same secret",
        ),
        (
            {"id": "twin", "hash": hash_key("x"), "expires": "2030-01-31T00:00:00"},
            "must be a moment with its zone",
        ),
        ({"id": "twin", "hash": hash_key("x"), "previous_hash": hash_key("y")}, "belong together"),
    ],
)
def test_entries_that_would_outlive_anothers_revocation_are_refused(
    second: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        load(settings("http://a", admin={"port": 0, "keys": [OPERATORS[0], second]}), {})
    assert hash_key(OPERATOR) not in str(caught.value)


async def test_a_change_that_the_disk_may_forget_is_told_as_unknown(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders_fail(monkeypatch, OSError(errno.EIO, "Input/output error"))
    with pytest.raises(ChangeUnknown, match="Read it again"):
        await desk.keys.revoke_operator_key("ops-2", BY)
    await until(lambda: bool(desk.world.logged("admin.change")))
    [line] = desk.world.logged("admin.change")
    assert (line["action"], line["target"], line["outcome"]) == ("operator.revoke", "ops-2", "unknown")
    await desk.followed()
    assert await desk.statuses(VICTIM, OPERATOR) == [401, 200]
