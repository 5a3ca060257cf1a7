"""`penstock init` writes a file that starts; `penstock gateway --check` says all that is wrong with one."""

from __future__ import annotations

import re
import stat
import subprocess
from pathlib import Path

import pytest

from gateway.__main__ import main as gateway
from gateway.config.whole import load
from gateway.identity.keys import hash_key
from shared import cli
from shared.process.exit_codes import ExitCode

Out = pytest.CaptureFixture[str]


def test_what_init_writes_starts_and_lets_its_key_in(tmp_path: Path, capsys: Out) -> None:
    file = tmp_path / "gateway.toml"
    assert cli.main(["init", str(file), "--model", "qwen", "--engine-url", "http://10.0.0.1:8000"]) == 0
    out = capsys.readouterr().out
    [key], [admin] = (set(re.findall(rf"sk_{kind}_\w+", out)) for kind in ("live", "admin"))
    config = load(file, {})
    assert [one.hash for one in config.keys] == [hash_key(key)]
    assert [one.hash for one in config.admin.keys] == [hash_key(admin)]
    assert (config.models[0].name, config.models[0].replicas) == ("qwen", ("http://10.0.0.1:8000",))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert gateway(["--check", str(file)]) == ExitCode.CLEAN


def test_each_setting_that_init_offers_is_one(tmp_path: Path) -> None:
    """With every commented setting switched on it is refused for what contradicts, and for no name."""
    file = tmp_path / "gateway.toml"
    assert cli.main(["init", str(file)]) == 0
    text = re.sub(r"^# (\w+ = |\[)", r"\1", file.read_text(), flags=re.MULTILINE)
    file.write_text(text.replace("[redis]                       # several", "[redis] # several"))
    config = load(file, {})
    assert config.redis.url is not None
    assert config.listen.tls is not None
    assert config.tenants[0].limits.concurrent == 16


def test_init_replaces_no_file(tmp_path: Path, capsys: Out) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text("mine")
    assert cli.main(["init", str(file)]) == 1
    assert file.read_text() == "mine"
    assert str(file) in capsys.readouterr().err


def test_init_keeps_its_keys_where_a_shell_reads_them_and_shows_none(tmp_path: Path, capsys: Out) -> None:
    file, keys = tmp_path / "gateway.toml", tmp_path / "keys.env"
    assert cli.main(["init", str(file), "--keys", str(keys)]) == 0
    assert "sk_" not in capsys.readouterr().out
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    script = f'. {keys}; printf "%s %s" "$KEY" "$PENSTOCK_ADMIN_KEY"'
    key, admin = subprocess.run(["sh", "-c", script], capture_output=True, text=True).stdout.split()
    config = load(file, {})
    assert [config.keys[0].hash, config.admin.keys[0].hash] == [hash_key(key), hash_key(admin)]


def test_init_leaves_no_file_where_one_is_there_or_would_not_start(tmp_path: Path, capsys: Out) -> None:
    file, keys = tmp_path / "gateway.toml", tmp_path / "keys.env"
    asked = ["init", str(file), "--keys", str(keys)]
    assert cli.main([*asked, "--engine-url", "http://a/v1"]) == ExitCode.UNUSABLE_CONFIG
    assert "/v1" in capsys.readouterr().err
    assert not file.exists()
    assert not keys.exists()
    keys.write_text("mine")
    assert cli.main(asked) == 1
    assert not file.exists()
    assert keys.read_text() == "mine"


WRONG = """
[[models]]
name = "m"
replicas = ["http://a/v1", "nonsense"]
fallback = ["n"]

[[tenants]]
id = "acme"
limits = { requests_per_min = -1 }

[[keys]]
id = "k"
hash = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
tenant = "nobody"

[listen]
prot = 1
"""


def test_a_check_tells_every_mistake_at_once_with_its_line(tmp_path: Path, capsys: Out) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(WRONG)
    assert gateway(["--check", str(file)]) == ExitCode.UNUSABLE_CONFIG
    told = re.findall(rf"^{file}:(\d+): ([\w.\[\]]+): .*$", capsys.readouterr().err, re.MULTILINE)
    assert told == [
        ("2", "models.m"),
        ("2", "models.m"),
        ("5", "models.m.fallback"),
        ("9", "tenants[0].limits.requests_per_min"),
        ("14", "keys.k.tenant"),
        ("17", "listen.prot"),
    ]


def test_a_check_says_where_nobody_would_get_in(tmp_path: Path, capsys: Out) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('[[models]]\nname = "m"\nreplicas = ["http://a"]\n')
    assert gateway(["--check", str(file)]) == ExitCode.CLEAN
    assert "401" in capsys.readouterr().err


QUOTED = """
[listen]
port = "8000"

[timeouts]
total_s = "30"

[limits]
live_max = "many"

[[models]]
name = "m"
replicas = ["http://a"]

[[tenants]]
id = "t"

[[keys]]
id = "k"
hash = "sk_live_0123456789ab_secret"
tenant = "t"

[[keys]]
id = "l"
key = "sk_live_0123456789ab_secret"
tenant = "t"
"""


def test_a_check_says_what_is_quoted_and_where_a_key_is_in_place_of_its_hash(
    tmp_path: Path, capsys: Out
) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(QUOTED)
    assert gateway(["--check", str(file)]) == ExitCode.UNUSABLE_CONFIG
    told = capsys.readouterr().err
    problems = dict(re.findall(r":(\d+): (.*)$", told, re.MULTILINE))
    assert [line for line, problem in problems.items() if "quotes" in problem] == ["3", "6"]
    assert all("keys mint" in problems[line] for line in ("20", "25"))
    assert "secret" not in told


def test_a_check_of_no_file_and_of_no_toml(tmp_path: Path, capsys: Out) -> None:
    file = tmp_path / "gateway.toml"
    assert gateway(["--check", str(file)]) == ExitCode.UNUSABLE_CONFIG
    file.write_text("a = 1\nb = \n")
    assert gateway(["--check", str(file)]) == ExitCode.UNUSABLE_CONFIG
    assert f"{file}:2: " in capsys.readouterr().err
