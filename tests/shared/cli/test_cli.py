from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
import trustme

from engine.config import ENV_PREFIX as ENGINE_PREFIX
from gateway.__main__ import _named
from gateway.config.whole import ENV_PREFIX as GATEWAY_PREFIX
from gateway.config.whole import GatewayConfig, ModelConfig
from gateway.config.whole import load as load_gateway_config
from gateway.directory import local
from gateway.directory.development import development_config, development_key
from gateway.identity.keys import KeyTable, key_problem
from shared import cli
from shared.cli import admin, running, service, up
from shared.cli.running import DataDir, Running
from shared.process import probe
from shared.process.arguments import closest
from shared.process.environment import OTHERS, SERVICE_PREFIXES
from shared.process.setting_values import to_toml
from shared.process.settings import walk


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv(running.KEY_VARIABLE, raising=False)
    return tmp_path


EVERYWHERE = ("--host", "0.0.0.0")


def exits(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = cli.main(argv)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    printed = capsys.readouterr()
    return code, printed.out, printed.err


# -- the command line -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["engine", "serve", "--model", "m"], ["gateway", "--config", "g.toml"]])
def test_a_service_does_not_start_without_its_assertions(argv: list[str]) -> None:
    environment = {**os.environ, "PYTHONOPTIMIZE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *argv],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "PYTHONOPTIMIZE" in done.stderr


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "usage: penstock"),
        (("upp",), "invalid choice: 'upp' (choose from"),
        (("up", "--prot", "1"), "there is no option --prot; did you mean --port?"),
        (("up", "--max-model-length", "1"), "did you mean --max-model-len?"),
        (("up", "stray"), "stray belongs to no option"),
        (("up", "--port", "70000"), "must be a port from 0 to 65535, got '70000'"),
        (("up", "--port", "x"), "must be a port from 0 to 65535, got 'x'"),
        (("up", "--api-key", " key"), "printable ASCII characters, no space at its ends"),
        (("up", "--api-key", ""), "printable ASCII characters, no space at its ends"),
        (("up", "--replicas", "0"), "must be a whole number from 1 to 16, got '0'"),
        (("up", "--alias", ""), "must be a name of 1 to 256 printable characters"),
        (("up", "--dtype", "float8"), "--dtype: must be one of auto, float32, bfloat16, got 'float8'"),
        (("up", "--config", "engine.toml"), "there is no option --config"),
        (("up", "--max-num-seqs", "0"), "got '0'"),
        (("chat", "--modle", "x"), "did you mean --model?"),
        (("chat", "--url", "localhost:8000"), "must be a URL like http://host:8000/v1"),
        (("chat", "--url", "http://[::1/v1"), "must be a URL like http://host:8000/v1"),
        (("chat", "--key", "caf\u00e9"), "argument --key: must be printable ASCII\n"),
        (("chat", "-m", "caf\udce9"), "argument -m/--message: must be text in the terminal's encoding"),
        (("chat", "--model", "caf\udce9"), "argument --model: must be text in the terminal's encoding"),
        (("up", "--model", ""), "argument --model: must not be empty"),
        (("up", "--host", ""), "argument --host: must not be empty"),
        (("up", "--tls-cert", "c.pem"), "--tls-cert and --tls-key belong together"),
        (("up", *EVERYWHERE), "is reached from other machines: give --tls-cert and --tls-key, or"),
        (("up", *EVERYWHERE, "--tls-cert", "c", "--tls-key", "k", "--plaintext"), "not allowed with"),
        (("up", "--redis", "localhost"), "argument --redis: must be like redis://host:6379/0"),
        (("up", "--redis", "redis://:secret@a"), "argument --redis: user and password are no part of it"),
        (("up", "--tls-client-ca", "ca.pem"), "there is no option --tls-client-ca"),
        (("up", "--max-num-seqs", "9", "--max-step-tokens", "8"), "(8) must be at least --max-num-seqs (9)"),
        (("--versoin",), "did you mean --version?"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_right_one(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], says: str
) -> None:
    code, out, err = exits(capsys, *argv)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("PENSTOCK_ENGINE_MAX_NUM_SEQ", "4", "did you mean PENSTOCK_ENGINE_MAX_NUM_SEQS?"),
        ("PENSTOCK_ENGINE_TLS_CERT", "c.pem", "is for a service that stands alone"),
        ("PENSTOCK_ENGINE_PORT", "8001", "is for a service that stands alone"),
        ("PENSTOCK_GATEWAY_LISTEN__PORT", "80", "is for a service that stands alone"),
        ("PENSTOCK_GATEWAY_LIMITS__LIVE_MAXI", "8", "did you mean PENSTOCK_GATEWAY_LIMITS__LIVE_MAX?"),
        ("PENSTOCK_GATEWAY_TIMEOUTS__DRAIN_S", "x", "must be a number of seconds above 0 and at most 86400"),
        ("PENSTOCK_API_KEY", " key", "no space at its ends\n"),
    ],
)
def test_a_variable_that_up_does_not_allow_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    monkeypatch.setenv(variable, value)
    code, out, err = exits(capsys, "up", "--port", "0")
    assert (code, out) == (2, "")
    assert says in err


def test_a_variable_that_nothing_reads_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_UP_PORT", "9000")
    monkeypatch.setenv("PENSTOCK_MY_SECRET", "x")
    monkeypatch.setenv("PENSTOCK_GATEWAY_REDIS__PASSWORD_ENV", "PENSTOCK_MY_SECRET")
    _, _, err = exits(capsys, "up", "--data-dir", "/dev/null")
    assert "penstock up: PENSTOCK_UP_PORT: nothing reads it" in err
    assert "PENSTOCK_MY_SECRET" not in err


@pytest.mark.parametrize("path", ["/dev/null", "/proc/none/logs"])
def test_a_log_directory_that_cannot_be_made_is_named(capsys: pytest.CaptureFixture[str], path: str) -> None:
    code, _, err = exits(capsys, "up", "--port", "0", "--data-dir", path)
    assert code == 1
    assert f"penstock up: --data-dir {path}: cannot make this directory: " in err


def test_up_knows_the_prefixes_of_both_services() -> None:
    assert set(up._NOT_FROM_ENVIRONMENT) == set(SERVICE_PREFIXES) == {ENGINE_PREFIX, GATEWAY_PREFIX}


def test_what_commands_read_is_known() -> None:
    assert {running.KEY_VARIABLE, admin.KEY_VARIABLE, admin.URL_VARIABLE, probe.VARIABLE} == OTHERS


def test_the_variables_that_settings_name_are_read() -> None:
    rules = [setting.kind.rule for setting in walk(GatewayConfig)]
    settings = [rule for rule in rules if rule is not None and "env:NAME" in rule.says]
    config = GatewayConfig(models=(ModelConfig("m", ("http://a",)),))
    assert len(settings) == len(list(_named(config)))


def every_option(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from every_option(inner)
        else:
            yield action


@pytest.mark.parametrize("command", ["up", "chat", "bench"])
def test_every_option_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    _, commands = cli.build_parser(command)
    for action in every_option(commands.choices[command]):
        assert action.help, action.option_strings
    code, out, _ = exits(capsys, command, "--help")
    assert (code, out.startswith(f"usage: penstock {command}")) == (0, True)


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = exits(capsys, "--help")
    assert code == 0
    for command, summary in {**cli.COMMANDS, **service.SERVICES}.items():
        assert command in out
        assert summary in out


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = exits(capsys, "--version")
    assert code == 0
    assert out.startswith("penstock ")


def test_the_command_line_needs_no_service_and_no_tensors() -> None:
    heavy = "{'torch', 'aiohttp', 'gateway', 'engine', 'tests.bench.engine.served'}"
    script = "import sys; from shared import cli; cli.build_parser('up'); "
    script += f"print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("name", "flag"), [("engine", "--max-model-len"), ("gateway", "--config")])
def test_services_answer_for_themselves(name: str, flag: str) -> None:
    argv = [sys.executable, "-m", "shared.cli", name, "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert flag in done.stdout


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    absent = ("torch", "zmq")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in absent else found(name))
    code, _, err = exits(capsys, "engine")
    assert code == 1
    assert "(torch, zmq): pip install 'penstock-llm[engine]'" in err
    assert exits(capsys, "up")[0] == 1


def test_closest_finds_the_most_similar_name() -> None:
    assert closest("--prot", ["--port", "--host"]) == "--port"
    assert closest("--zzzzz", ["--port", "--host"]) is None


# -- the gateway's file and the key ---------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    ["secret", "\"\\'$`;{}~!", development_key(), "sk_dev_abcdefghijkl_" + "A" * 32],
    ids=["short", "odd", "minted", "long"],  # the same in every process that collects the tests
)
def test_the_gateway_takes_the_file_and_any_key(key: str) -> None:
    text = to_toml(
        development_config(
            host="::1",
            port=81,
            key=key,
            model='m"\\水',
            aliases=["*", "gpt-4o", "*", 'm"\\水'],
            engine_url="http://127.0.0.1:9",
        )
    )
    assert key not in text or key == "secret"
    config = load_gateway_config(tomllib.loads(text), {})
    assert (config.listen.host, config.listen.port) == ("::1", 81)
    (model,) = config.models
    assert (model.name, model.aliases, model.replicas) == ('m"\\水', ("*", "gpt-4o"), ("http://127.0.0.1:9",))
    assert KeyTable(config.keys).authenticate(f"Bearer {key}", 0.0).tenant == config.tenants[0].id


def test_a_minted_key_fits_its_header() -> None:
    keys = {development_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key_problem(key) is None for key in keys)


def test_the_running_file_is_private_and_taken_back_by_its_owner() -> None:
    ours = Running(url="http://127.0.0.1:1/v1", key="k", model="m", pid=os.getpid())
    assert running.read_running() is None
    running.write_running(ours)
    assert running.read_running() == ours
    file = running.running_file(ours)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    running.clear_running(msgspec.structs.replace(ours, pid=1))
    assert running.read_running() == ours
    running.clear_running(ours)
    assert running.read_running() is None
    file.write_text("{")
    assert running.read_running() is None


def test_the_one_that_was_started_last_is_meant_and_each_by_its_url() -> None:
    first, second = (
        Running(
            f"http://127.0.0.1:{port}/v1", "k", "m", os.getpid(), admin_url=f"http://127.0.0.1:{port + 1}"
        )
        for port in (18380, 18382)
    )
    for age, one in enumerate((second, first)):
        running.write_running(one)
        os.utime(running.running_file(one), (age, age))
    assert running.read_running() == first
    assert running.read_running("http://127.0.0.1:18382") == second
    assert running.read_running("http://127.0.0.1:18383") == second
    running.clear_running(first)
    assert running.read_running() == second
    running.write_running(msgspec.structs.replace(first, pid=2**22 + 1))  # more than there can be
    assert running.read_running() == second
    assert running.read_running("http://127.0.0.1:1") is None


def plan_of(*argv: str) -> up.StartPlan:
    parser, _ = cli.build_parser("up")
    options, options_more = parser.parse_known_args(["up", *argv])
    options.more = options_more
    data = running.data_dir(options.data_dir, options.port)
    with contextlib.ExitStack() as held:
        plan = up.make_plan(options, data, held)
    os.close(data.lock)  # as the end of its process does
    return plan


def port_pair() -> int:
    """A free port, and so is the next."""
    while True:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as one:
            port: int = one.getsockname()[1]
            with socket.create_server(("127.0.0.1", port + 1)):
                return port


def test_the_next_start_has_what_the_last_one_had(monkeypatch: pytest.MonkeyPatch) -> None:
    port = str(port_pair())
    first = plan_of("--port", port)
    config = first.data.path / "gateway.toml"
    assert first.data.is_kept
    assert first.running.admin_url == f"http://127.0.0.1:{int(port) + 1}"
    made = json.loads(local.call(config, "create", "", {"tenant": "development"}, {}, "callers")[0])
    operator = json.loads(local.call(config, "create", "", {}, {}, "operators")[0])
    again = plan_of("--port", port, "--alias", "other")
    assert again.running == first.running
    there = load_gateway_config(config, {})
    assert {key.id for key in there.keys} == {"development", made["id"]}
    assert {key.id for key in there.admin.keys} == {"development", operator["id"]}
    assert KeyTable(there.keys).authenticate(f"Bearer {made['key']}", 0.0).tenant == there.tenants[0].id
    monkeypatch.setenv("PENSTOCK_ADMIN_KEY", "mine")
    told = plan_of("--port", port, "--api-key", made["key"])
    assert (told.running.key, told.running.admin_key) == (made["key"], "mine")
    assert len(load_gateway_config(config, {}).keys) == 1, "no two keys have one secret"
    monkeypatch.delenv("PENSTOCK_ADMIN_KEY")
    assert plan_of("--port", port).running == first.running


def test_a_file_that_cannot_be_read_is_put_aside() -> None:
    port = str(port_pair())
    config = plan_of("--port", port).data.path / "gateway.toml"
    config.write_text("[")
    plan = plan_of("--port", port)
    assert config.with_suffix(".old.toml").read_text() == "["
    assert len(plan.remarks) == 1
    assert load_gateway_config(config, {}).keys


def test_any_free_port_is_for_one_time() -> None:
    first, second = plan_of("--port", "0"), plan_of("--port", "0")
    assert not first.data.is_kept
    assert first.data.path != second.data.path
    assert first.running.key != second.running.key


def test_the_console_goes_elsewhere_where_its_port_is_taken() -> None:
    port = port_pair()
    with socket.create_server(("127.0.0.1", port + 1)):
        plan = plan_of("--port", str(port))
        assert plan.running.admin_url not in (None, f"http://127.0.0.1:{port + 1}")
        assert len(plan.remarks) == 1
        with pytest.raises(OSError, match=str(port + 1)):
            plan_of("--port", str(port), "--admin-port", str(port + 1))


def test_a_data_directory_is_one_ups_at_a_time(tmp_path: Path) -> None:
    held = running.data_dir(tmp_path / "one", 0)
    with pytest.raises(OSError, match="another penstock up uses it"):
        running.data_dir(tmp_path / "one", 0)
    os.close(held.lock)
    os.close(running.data_dir(tmp_path / "one", 0).lock)


def test_a_redis_that_is_not_there_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    port = port_pair()
    code, _, err = exits(capsys, "up", "--port", "0", "--redis", f"redis://127.0.0.1:{port}")
    assert code == 1
    assert f"nothing answers at 127.0.0.1:{port}" in err


def test_a_plan_without_options_serves_the_demo_model() -> None:
    plan = plan_of("--port", "0")
    engine, gateway = plan.services
    assert engine.argv[1:5] == ("-P", "-m", "engine", "serve")
    assert engine.argv[engine.argv.index("--served-model-name") + 1] == up.DEMO_NAME
    assert Path(engine.argv[engine.argv.index("--model") + 1]).name == "model"
    config = Path(gateway.argv[gateway.argv.index("--config") + 1])
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert load_gateway_config(config, {}).models[0].replicas == (engine.url,)
    assert plan.running.url == f"{gateway.url}/v1"
    assert plan.running.model == up.DEMO_NAME


def test_a_plan_has_a_console_behind_a_key_of_its_own() -> None:
    plan = plan_of("--port", "0", "--api-key", "k")
    ours = plan.running
    assert ours.admin_url is not None
    assert ours.admin_key not in (None, "k")
    file = Path(plan.services[-1].argv[-1])
    admin = load_gateway_config(file, {}).admin
    assert ours.admin_url == f"http://127.0.0.1:{admin.port}"
    assert str(ours.admin_key) not in file.read_text()
    text = up.announcement(plan, 1.0)
    assert f"Console    {ours.admin_url}/console" in text
    assert f"Admin key  {ours.admin_key}" in text


def test_options_reach_the_service_that_they_are_for(tmp_path: Path) -> None:
    argv = ("--port", "0", "--model", str(tmp_path), "--api-key", "k", "--data-dir", str(tmp_path / "data"))
    more = ("--alias", "a", "*", "--alias", "b", "--max-model-len", "128")
    plan = plan_of(*argv, *more, "--redis", "redis://127.0.0.1:6379/1")
    engine, gateway = plan.services
    file = tmp_path / "data" / "gateway.toml"
    url = f"{gateway.url}/v1"
    ours = plan.running
    admin = {"admin_url": ours.admin_url, "admin_key": ours.admin_key}
    assert ours == Running(url, "k", tmp_path.name, os.getpid(), config=str(file), **admin)
    assert plan.aliases == ("a", "*", "b")
    assert engine.argv[-2:] == ("--max-model-len", "128")
    assert engine.log == tmp_path / "data" / "engine.log"
    config = load_gateway_config(file, {})
    assert (config.quotas.store, config.redis.url) == ("redis", "redis://127.0.0.1:6379/1")
    assert config.directory.store == "redis"
    assert plan_of("--port", "0", "--model", "Qwen/Qwen3-0.6B").running.model == "Qwen3-0.6B"
    assert plan_of("--port", "0", *EVERYWHERE, "--plaintext").running.url.startswith("http://127.0.0.1:")


def test_several_engines_are_numbered_and_all_in_the_gateways_file() -> None:
    plan = plan_of("--port", "0", "--replicas", "3", "--max-model-len", "128")
    *engines, gateway = plan.services
    assert [engine.name for engine in engines] == ["engine-0", "engine-1", "engine-2"]
    assert [engine.log.name for engine in engines] == ["engine-0.log", "engine-1.log", "engine-2.log"]
    assert len({engine.url for engine in engines}) == 3
    for engine in engines:
        assert engine.argv[engine.argv.index("--port") + 1] == engine.url.rpartition(":")[2]
        assert engine.argv[-2:] == ("--max-model-len", "128")
        assert engine.restarts
    assert not gateway.restarts
    config = Path(gateway.argv[gateway.argv.index("--config") + 1])
    assert load_gateway_config(config, {}).models[0].replicas == tuple(engine.url for engine in engines)
    assert "Engines    3" in up.announcement(plan, 1.0)
    assert not plan_of("--port", "0").services[0].restarts


def test_up_takes_the_model_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ENGINE_MODEL", "Qwen/Qwen3-0.6B")
    assert plan_of("--port", "0").running.model == "Qwen3-0.6B"
    assert plan_of("--port", "0", "--model", "some/other").running.model == "other"
    monkeypatch.setenv("PENSTOCK_ENGINE_SERVED_MODEL_NAME", "mine")
    assert plan_of("--port", "0").running.model == "mine"
    monkeypatch.setenv("PENSTOCK_ENGINE_MODEL", "")
    monkeypatch.setenv("PENSTOCK_ENGINE_SERVED_MODEL_NAME", "")
    assert plan_of("--port", "0").running.model == up.DEMO_NAME


def test_the_drain_time_of_an_option_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plan_of("--port", "0")
    assert plain.services[0].argv[-2:] == ("--drain-timeout-s", str(up.DRAIN_S))
    assert plain.grace_s == up.DRAIN_S + up.ENDING_S
    assert plan_of("--port", "0", "--drain-timeout-s", "50").grace_s == 50 + up.ENDING_S
    monkeypatch.setenv("PENSTOCK_ENGINE_DRAIN_TIMEOUT_S", "60")
    told = plan_of("--port", "0")
    assert "--drain-timeout-s" not in told.services[0].argv, "it would win over the variable"
    assert told.grace_s == 60 + up.ENDING_S
    monkeypatch.setenv("PENSTOCK_GATEWAY_TIMEOUTS__DRAIN_S", "70")
    assert plan_of("--port", "0").grace_s == 70 + up.ENDING_S


# -- TLS ------------------------------------------------------------------------------------------


def certificate(directory: Path, *names: str, expired: bool = False) -> tuple[str, str]:
    """Paths of a certificate of a private authority, and of its key."""
    not_after = datetime(2020, 1, 1, tzinfo=UTC) if expired else None
    issued = trustme.CA().issue_cert(*names, not_after=not_after)
    cert, key = directory / "cert.pem", directory / "key.pem"
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(key)
    return str(cert), str(key)


def tls_plan(*argv: str) -> up.StartPlan:
    return plan_of("--port", "0", "--tls-cert", "cert.pem", "--tls-key", "key.pem", *argv)


def test_a_certificate_is_for_the_gateway_and_the_engine_stays_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cert, key = certificate(tmp_path, "127.0.0.1")
    plan = tls_plan()
    engine, gateway = plan.services
    assert engine.url.startswith("http://127.0.0.1:")
    assert "--tls-cert" not in engine.argv
    assert gateway.url.startswith("https://127.0.0.1:")
    assert plan.running.url == f"{gateway.url}/v1"
    assert plan.running.cert == gateway.cert == cert
    tls = load_gateway_config(Path(gateway.argv[gateway.argv.index("--config") + 1]), {}).listen.tls
    assert tls is not None
    assert (tls.cert, tls.key) == (cert, key)
    assert "https://127.0.0.1" in up.announcement(plan, 1.0)
    assert "The certificate is for 127.0.0.1. " in up.announcement(plan, 1.0)


@pytest.mark.parametrize(
    ("names", "host", "url"),
    [
        (("localhost",), "127.0.0.1", "https://localhost:"),
        (("localhost", "127.0.0.1"), "127.0.0.1", "https://127.0.0.1:"),
        (("localhost", "::1"), "::", "https://[::1]:"),
        (("penstock.test",), "0.0.0.0", "https://127.0.0.1:"),
    ],
)
def test_the_url_has_a_name_that_the_certificate_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], host: str, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    certificate(tmp_path, *names)
    plan = tls_plan("--host", host)
    assert plan.running.url.startswith(url)
    assert plan.certificate_names == names


def test_an_unusable_tls_certificate_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ("up", "--port", "0", "--tls-cert", "cert.pem", "--tls-key", "key.pem")
    told = exits(capsys, *argv)
    assert told[0] == 1
    assert f"penstock up: cannot use {tmp_path / 'cert.pem'}: " in told[2]
    (tmp_path / "cert.pem").write_text("nothing")
    assert "holds no certificate in PEM" in exits(capsys, *argv)[2]
    certificate(tmp_path, "localhost")
    (tmp_path / "key.pem").write_bytes(trustme.CA().issue_cert("localhost").private_key_pem.bytes())
    assert f"cannot use {tmp_path / 'cert.pem'} with {tmp_path / 'key.pem'}: " in exits(capsys, *argv)[2]
    certificate(tmp_path, "localhost", expired=True)
    assert f"cannot use {tmp_path / 'cert.pem'}: certificate has expired" in exits(capsys, *argv)[2]


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = exits(capsys, "up", "--port", str(port))
    assert code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in err
    assert "choose another with --port" in err


def test_a_host_that_is_not_this_machine_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = exits(capsys, "up", "--port", "0", "--host", "192.0.2.1", "--plaintext")
    assert code == 1
    assert "cannot listen on 192.0.2.1:0: " in err
    assert "choose another with --host" in err


def test_the_announcement_can_be_pasted() -> None:
    key = "it's$HOME"
    ours = Running(url="http://127.0.0.1:1/v1", key=key, model="m'水", pid=1)
    text = up.announcement(up.StartPlan((), ours, DataDir(Path(), is_kept=True), aliases=("a", "*")), 1.25)
    curl = text[text.index("curl") : text.index("With the OpenAI")].replace("curl -N", "printf '%s\\n'", 1)
    words = subprocess.run(["sh", "-c", curl], capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[0] == "http://127.0.0.1:1/v1/chat/completions"
    assert f"Authorization: Bearer {key}" in words
    assert json.loads(words[-1])["model"] == "m'水"
    snippet = text[text.index("from openai") : text.index("In another")]
    compile("\n".join(line.strip() for line in snippet.splitlines()), "snippet", "exec")
    assert repr(key) in snippet
    assert "also as a, *" in text


@pytest.mark.parametrize("is_active", [True, False])
def test_the_announcement_names_a_command_that_a_shell_finds(
    monkeypatch: pytest.MonkeyPatch, is_active: bool
) -> None:
    own = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{own}:/usr/bin:/bin" if is_active else "/usr/bin:/bin")
    ours = Running(url="http://127.0.0.1:1/v1", key="key", model="m", pid=1)
    text = up.announcement(up.StartPlan((), ours, DataDir(Path(), is_kept=True)), 1.25)
    [line] = [line for line in text.splitlines() if line.startswith("In another terminal: ")]
    chat = line.removeprefix("In another terminal: ").partition(". ")[0]
    assert chat == ("penstock chat" if is_active else f"{own / 'penstock'} chat")
    subprocess.run(["sh", "-c", f"{chat} --help"], check=True, capture_output=True)
