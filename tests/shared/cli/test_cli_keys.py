"""`penstock keys`: on a gateway's file, on the Redis that it names, and on a running gateway."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import re
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog

from gateway.app import Gateway
from gateway.config.whole import KeyConfig, load
from gateway.directory.development import development_config
from gateway.identity.keys import KeyTable, hash_key
from shared import cli
from shared.cli import running
from shared.cli.admin import KEY_VARIABLE
from shared.cli.running import Running, write_running
from shared.process.setting_values import to_toml
from tests.gateway.conftest import KEY, settings
from tests.gateway.directory.directory_world import OPERATOR, World, directory_world
from tests.gateway.fake_engine import FakeEngine, byte_bundle
from tests.gateway.redis_server import RedisServer, redis_server

Out = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def redis() -> Any:
    with redis_server() as server:
        yield server


@pytest.fixture
def log() -> io.StringIO:
    return io.StringIO()


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    """The command sets up the log of its process, with a level that hides what other tests look for."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(params=["file", "redis", "admin"])
async def world(
    request: pytest.FixtureRequest, tmp_path: Path, log: io.StringIO, redis: RedisServer
) -> AsyncIterator[tuple[World, list[str]]]:
    """A gateway, and the options that name it."""
    url = None if request.param == "file" else redis.url
    async with directory_world(tmp_path, log, url) as world:
        await world.open()
        admin = f"http://127.0.0.1:{world.gateways[0].admin_port}/"
        yield world, ["--admin-url", admin] if request.param == "admin" else ["--config", str(world.path)]


async def keys(*words: str) -> int:
    """Run the command, beside the gateway in this process."""
    return await asyncio.to_thread(cli.main, ["keys", *words])


async def effective(world: World) -> None:
    """Let the gateway take the change over, as it does by itself every second."""
    await world.gateways[0].accounts.reload()
    await world.gateways[0]._follow()


async def test_a_key_is_created_listed_rotated_and_revoked(
    world: tuple[World, list[str]], capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, where = world
    monkeypatch.setenv(KEY_VARIABLE, OPERATOR)
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")  # it is to see no operator's key
    options = ["--model", "tiny", "--label", "of a test", "--limit", "requests_per_min=60", "--env", "test"]
    for limit in ("requests_per_min=6", "concurrent=2"):
        options += ["--model-limit", f"tiny:{limit}"]
    assert await keys("create", *where, "--tenant", "acme", *options) == 0
    made, told = capsys.readouterr()
    text = made.strip()
    assert re.fullmatch(r"sk_test_[a-z0-9]{12}_[A-Za-z0-9]{32}", text)
    assert "is shown this once" in told
    id_ = text.split("_")[2]
    await effective(house)
    assert await house.status(text) == 200
    assert await keys("list", *where, "--tenant", "acme") == 0
    listed = capsys.readouterr().out
    assert re.search(
        rf"^{id_} +acme +active .*never +requests_per_min=60, .*tiny +\* +of a test$", listed, re.MULTILINE
    )
    assert text not in listed
    assert await keys("list", *where, "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    by_id = {line["id"]: line for line in lines}
    assert by_id.keys() == {"k1", "k2", id_}
    assert by_id[id_]["limits"]["requests_per_min"] == 60
    [entry] = by_id[id_]["model_limits"]
    limits = entry["limits"]
    assert (entry["model"], limits["requests_per_min"], limits["concurrent"]) == ("tiny", 6, 2)
    assert await keys("rotate", *where, id_, "--overlap-s", "60", "--json") == 0
    rotated = json.loads(capsys.readouterr().out)
    await effective(house)
    assert [await house.status(key) for key in (text, rotated["key"])] == [200, 200]
    assert await keys("revoke", *where, id_) == 0
    assert " revoked " in capsys.readouterr().out
    await effective(house)
    assert [await house.status(key) for key in (text, rotated["key"], KEY)] == [401, 401, 200]
    assert await keys("revoke", *where, id_, "--delete") == 0
    capsys.readouterr()
    assert await keys("revoke", *where, id_) == 1
    assert f"There is no key '{id_}'" in capsys.readouterr().err


async def test_a_mistake_is_told_whole_and_changes_nothing(
    world: tuple[World, list[str]], capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, where = world
    monkeypatch.setenv(KEY_VARIABLE, OPERATOR)
    before = house.path.read_bytes()
    assert await keys("create", *where, "--tenant", "acme", "--model", "ghost", "--limit", "tokens=1") == 1
    told = capsys.readouterr().err
    assert "models: there is no model 'ghost'" in told
    assert "limits.tokens: there is no such setting" in told
    assert house.path.read_bytes() == before


@pytest.mark.parametrize(
    ("option", "limit"), [("--limit", "concurrent"), ("--model-limit", "tiny:concurrent")]
)
async def test_a_limit_is_given_once(
    tmp_path: Path, log: io.StringIO, capsys: Out, option: str, limit: str
) -> None:
    async with directory_world(tmp_path, log, None) as house:
        before = house.path.read_bytes()
        twice = [word for number in (1, 2) for word in (option, f"{limit}={number}")]
        assert await keys("create", "--config", str(house.path), "--tenant", "acme", *twice) == 1
        assert house.path.read_bytes() == before
    assert f"{option} {limit} is given 2 times" in capsys.readouterr().err


async def test_an_expiry_that_utc_cannot_say_is_listed(tmp_path: Path, log: io.StringIO, capsys: Out) -> None:
    """A file, or Redis, may have one from before."""
    async with directory_world(tmp_path, log, None) as house:
        key = {"id": "k1", "hash": hash_key(KEY), "tenant": "acme", "expires": "9999-12-31T23:59:59-01:00"}
        house.write(keys=[key])
        assert await keys("list", "--config", str(house.path)) == 0
    assert "9999-12-31 23:59 -0100" in capsys.readouterr().out


async def test_a_change_of_the_file_leaves_an_audit_line_with_the_users_name(
    tmp_path: Path, log: io.StringIO, capsys: Out
) -> None:
    async with directory_world(tmp_path, log, None) as world:
        assert await keys("create", "--config", str(world.path), "--tenant", "acme") == 0
        [line] = [json.loads(line) for line in capsys.readouterr().err.splitlines() if "admin.change" in line]
        assert (line["action"], line["service"]) == ("key.create", "keys")
        assert line["operator"].startswith("os:")


def test_a_change_at_a_terminal_shows_no_line_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(to_toml(load(settings("http://engine:1"), {})))
    command = [
        sys.executable,
        "-P",
        "-m",
        "shared.cli",
        "keys",
        "create",
        "--config",
        str(path),
        "--tenant",
        "acme",
    ]
    terminal, theirs = pty.openpty()
    try:
        subprocess.run(command, stdout=theirs, stderr=theirs, check=True)
        shown = os.read(terminal, 65_536).decode()
    finally:
        os.close(terminal)
        os.close(theirs)
    assert "sk_live_" in shown
    assert "admin.change" not in shown


def test_a_user_without_a_name_has_its_number_in_the_audit_line(
    tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers may run as any number. What the environment says of a name is anybody's to set."""
    monkeypatch.setattr(os, "getuid", lambda: 2_000_000_011)
    monkeypatch.setenv("LOGNAME", "another")
    path = tmp_path / "gateway.toml"
    path.write_text(to_toml(load(settings("http://engine:1"), {})))
    assert cli.main(["keys", "create", "--config", str(path), "--tenant", "acme"]) == 0
    [line] = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    assert line["operator"] == "os:2000000011"


async def test_an_operators_key_is_made_listed_rotated_and_revoked_in_the_file_alone(
    world: tuple[World, list[str]], capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever callers' keys are kept."""
    house, where = world
    monkeypatch.setenv(KEY_VARIABLE, OPERATOR)
    file = ["--operator", "--config", str(house.path)]

    async def statuses(*texts: str) -> list[int]:
        await effective(house)
        bearers = [{"authorization": f"Bearer {text}"} for text in texts]
        return [(await house.ask("GET", "keys", headers=bearer)).status for bearer in bearers]

    assert await keys("create", *file, "--label", "of a test") == 0
    made, told = capsys.readouterr()
    text = made.strip()
    assert re.fullmatch(r"sk_admin_[a-z0-9]{12}_[A-Za-z0-9]{32}", text)
    assert "of operators. It is shown this once" in told
    id_ = text.split("_")[2]
    assert await statuses(text, OPERATOR) == [200, 200]
    assert await keys("list", "--operator", *where) == 0
    listed = capsys.readouterr().out
    assert re.search(rf"^{id_} +active .*never +of a test$", listed, re.MULTILINE)
    assert re.search(r"^ops +active +never$", listed, re.MULTILINE)
    assert text not in listed
    assert await keys("rotate", *file, id_, "--overlap-s", "60", "--json") == 0
    new = json.loads(capsys.readouterr().out)["key"]
    assert await statuses(text, new) == [200, 200]
    assert await keys("revoke", *file, id_) == 0
    assert re.search(rf"^{id_} +revoked", capsys.readouterr().out, re.MULTILINE)
    assert await statuses(text, new, OPERATOR) == [401, 401, 200]
    assert await keys("revoke", *file, id_, "--delete") == 0
    assert await keys("revoke", *file, id_) == 1
    assert f"There is no operator's key '{id_}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [("create",), ("rotate", "ops"), ("revoke", "ops"), ("revoke", "ops", "--delete")]
)
def test_operators_keys_are_changed_through_no_listener(
    words: tuple[str, ...], capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, OPERATOR)
    assert cli.main(["keys", *words, "--operator", "--admin-url", "http://127.0.0.1:1"]) == 1
    assert "in the gateway's file alone" in capsys.readouterr().err


async def test_what_penstock_up_keeps_in_redis_is_changed_by_its_file(
    tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch, redis: RedisServer
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    redis.admin.flushall()
    async with FakeEngine(bundle=byte_bundle()) as engine:
        config = development_config(port=0, key="dev", model="tiny", engine_url=engine.url, redis=redis.url)
        file = tmp_path / "gateway.toml"
        running.write_private(file, to_toml(config).encode())
        write_running(Running("http://127.0.0.1:1/v1", "k", "m", os.getpid(), config=str(file)))
        assert await keys("create", "--tenant", "development") == 0
        made = capsys.readouterr().out.strip()
        async with Gateway(load(file, {}), path=file) as gateway, aiohttp.ClientSession() as client:
            for key, status in (("dev", 200), (made, 200), ("other", 401)):
                url, bearer = f"http://127.0.0.1:{gateway.port}/v1/models", {"authorization": f"Bearer {key}"}
                async with client.get(url, headers=bearer) as answer:
                    assert answer.status == status
    assert made.split("_")[2] not in text_of(file)


def text_of(file: Path) -> str:
    return file.read_text()


def test_without_options_the_keys_are_those_of_the_penstock_up_that_runs(
    tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["keys", "list"]) == 1
    assert "name the gateway by --config or --admin-url" in capsys.readouterr().err
    file = tmp_path / "gateway.toml"
    file.write_text(
        '[[models]]\nname = "m"\nreplicas = ["http://a"]\n[[tenants]]\nid = "development"\n'
        f'[[keys]]\nid = "mine"\nhash = "sha256:{"0" * 64}"\ntenant = "development"\n'
    )
    write_running(Running("http://127.0.0.1:1/v1", "k", "m", os.getpid(), config=str(file)))
    assert cli.main(["keys", "list"]) == 0
    assert "mine" in capsys.readouterr().out
    assert running.read_running() is not None
    assert cli.main(["keys", "create", "--tenant", "development"]) == 0
    assert len(load(file, {}).keys) == 2


def test_a_minted_key_is_kept_nowhere_and_is_the_one_of_its_hash(capsys: Out) -> None:
    assert cli.main(["keys", "mint", "--env", "prod"]) == 0
    text, entry = capsys.readouterr()
    told = tomllib.loads(entry)
    assert re.fullmatch(rf"sk_prod_{told['id']}_[A-Za-z0-9]{{32}}\n", text)
    table = KeyTable([KeyConfig(told["id"], told["hash"], "acme")])
    assert table.authenticate(f"Bearer {text.strip()}", 0.0).key == told["id"]
    assert cli.main(["keys", "mint", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["key"].startswith("sk_live_")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["create"], "the following arguments are required: --tenant"),
        (["create", "--tenant", "a", "--limit", "x"], "must be like requests_per_min=60"),
        (["create", "--tenant", "a", "--model-limit", "concurrent=1"], "must be like qwen3-8b:requests_per"),
        (["create", "--tenant", "a", "--model-limit", "m:x"], "must be like requests_per_min=60"),
        (["list", "--config", "a", "--admin-url", "http://a"], "not allowed with"),
        (["list", "--admin-url", "ftp://a"], "must be a URL like"),
        (["rotate", "a/b"], "must be 1 to 64 of"),
        (["mint", "--env", "A"], "must be 1 to 16 of a-z 0-9"),
        (["create", "--operator", "--tenant", "a"], "--operator: not allowed with argument --tenant"),
        (["create", "--operator", "--model-limit", "m:concurrent=1"], "with argument --model-limit"),
        ([], "the following arguments are required: ACTION"),
    ],
)
def test_a_wrong_command_line_is_told_so(words: list[str], problem: str, capsys: Out) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["keys", *words])
    assert caught.value.code == 2
    assert problem in capsys.readouterr().err


def test_a_gateway_that_cannot_be_asked_is_named(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    url = ["--admin-url", "http://127.0.0.1:1"]
    assert cli.main(["keys", "list", *url]) == 1
    assert KEY_VARIABLE in capsys.readouterr().err
    monkeypatch.setenv(KEY_VARIABLE, "x")
    assert cli.main(["keys", "list", *url]) == 1
    assert "http://127.0.0.1:1/admin/v1/keys cannot be asked" in capsys.readouterr().err
    assert cli.main(["keys", "list", "--config", "/nowhere/gateway.toml"]) == 1
    assert "/nowhere/gateway.toml: No such file" in capsys.readouterr().err
