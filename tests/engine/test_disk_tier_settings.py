"""The settings of the disk tier, the fingerprint of its files, and a directory that cannot be used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine import disk_tier
from engine.config import EngineConfig
from engine.core.page_files import DirectoryInUse, PageFiles, open_directory
from engine.disk_tier import fingerprint_of, open_disk_tier
from engine.runtime.host.runner import HostRunner
from shared.config import ConfigError
from tests.fake_runner import runner_info


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size 1"),
        ({"kv_host_tier": False}, "--kv-host-tier"),
        ({"swap_memory": 0}, "--swap-memory"),
        ({"prefix_cache": False}, "the prefix cache"),
    ],
)
def test_what_a_disk_tier_needs_is_told(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as failed:
        EngineConfig("m", kv_disk_dir="/kv", **settings)
    assert told in failed.value.problems[0]
    EngineConfig("m", **settings)


def runner(*, host_tier: bool = True) -> HostRunner:
    """A runner with host pages of eight bytes, and no network."""
    info = msgspec.structs.replace(runner_info(host_pages=4), host_tier=host_tier)
    pages = [memoryview(bytearray(8)) for _ in range(4)]
    rest: Any = None
    return HostRunner(info, rest, rest, SimpleNamespace(view=pages.__getitem__), rest)  # type: ignore[arg-type]


def model_in(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(bytes(100))
    return path


def test_the_tier_is_opened_and_its_directory_belongs_to_one_engine(tmp_path: Path) -> None:
    model = model_in(tmp_path / "m")
    config = EngineConfig(str(model), kv_disk_dir=str(tmp_path / "kv"))
    assert open_disk_tier(EngineConfig(str(model)), runner()) is None
    assert open_disk_tier(config, runner(host_tier=False)) is None
    disk = open_disk_tier(config, runner())
    assert disk is not None
    with pytest.raises(DirectoryInUse):
        open_disk_tier(config, runner())


def test_a_tilde_in_the_directory_is_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = EngineConfig(str(model_in(tmp_path / "m")), kv_disk_dir="~/kv/pages")
    assert open_disk_tier(config, runner()) is not None
    assert (tmp_path / "kv" / "pages").is_dir()


def test_a_directory_that_cannot_be_used_is_no_tier_and_no_failure(tmp_path: Path) -> None:
    model = model_in(tmp_path / "m")
    (tmp_path / "file").write_text("")
    config = EngineConfig(str(model), kv_disk_dir=str(tmp_path / "file" / "kv"))
    assert open_disk_tier(config, runner()) is None


def test_the_fingerprint_tells_models_and_types_apart(tmp_path: Path) -> None:
    model = model_in(tmp_path / "m")
    config, one = EngineConfig(str(model)), runner()
    first = fingerprint_of(config, one)
    assert first == fingerprint_of(EngineConfig(str(model), port=1), one)
    assert first != fingerprint_of(EngineConfig(str(model), weights="int8"), one)
    other = runner()
    other.info = msgspec.structs.replace(other.info, dtype="bfloat16")
    assert first != fingerprint_of(config, other)


def test_the_fingerprint_sees_every_byte_of_the_weights_and_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was tuned further in its middle layers alone, in an image whose files have equal times."""
    monkeypatch.setattr(disk_tier, "PART_LEN", 2 << 20)  # a file of several parts
    monkeypatch.setattr(disk_tier, "READ_LEN", 1 << 19)
    model = model_in(tmp_path / "m")
    config, one, weights = EngineConfig(str(model)), runner(), model / "model.safetensors"
    seen = set()
    for changed in (None, 0, (2 << 20) + 17, 3 << 20, (5 << 20) - 1):
        data = bytearray(5 << 20)
        if changed is not None:
            data[changed] = 1
        weights.write_bytes(data)
        os.utime(weights, ns=(0, 0))
        seen.add(fingerprint_of(config, one))
    assert len(seen) == 5
    os.utime(weights, ns=(1, 1))  # the same file, downloaded again
    assert fingerprint_of(config, one) in seen


def test_the_fingerprint_tells_releases_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, one = EngineConfig(str(model_in(tmp_path / "m"))), runner()
    first = fingerprint_of(config, one)
    monkeypatch.setattr(disk_tier, "version", lambda: "next")
    assert first != fingerprint_of(config, one)


def test_a_page_files_lock_ends_with_its_owner(tmp_path: Path) -> None:
    files = PageFiles(open_directory(tmp_path), bytes(32), 8, 1000)
    files.close()
    PageFiles(open_directory(tmp_path), bytes(32), 8, 1000).close()


def test_without_a_directory_no_compiler_is_imported() -> None:
    """An installation for CPUs has no Triton."""
    code = """
import sys
sys.modules["triton"] = None
from types import SimpleNamespace
from engine.disk_tier import open_disk_tier
assert open_disk_tier(SimpleNamespace(kv_disk_dir=None), SimpleNamespace()) is None
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
