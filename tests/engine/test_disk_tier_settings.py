"""The settings of the disk tier, the fingerprint of its files, and a directory that cannot be used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest
import torch

from engine import disk_tier
from engine.config import EngineConfig
from engine.contract.messages import RunnerInfo
from engine.core.pages.page_files import DirectoryInUse, PageFiles, open_directory
from engine.disk_tier import fingerprint_of, open_disk_tier
from engine.runtime.host.host_runner import HostRunner
from engine.runtime.host.host_shard import load_shard
from engine.runtime.native.decoder import built_isas
from engine.runtime.setup.runner_config import RunnerConfig
from shared.process.setting_values import ConfigError
from tests.engine.models import make_tiny_model
from tests.fake_runner import runner_info


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size 1"),
        ({"swap_memory": 0}, "--swap-memory"),
        ({"prefix_cache": False}, "the prefix cache"),
    ],
)
def test_what_a_disk_tier_needs_is_told(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as failed:
        EngineConfig("m", kv_disk_dir="/kv", **settings)
    assert told in failed.value.problems[0]
    EngineConfig("m", **settings)


def runner(host_pages: int = 4) -> HostRunner:
    """A runner with host pages of eight bytes, and no network."""
    info = runner_info(host_pages=host_pages)
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
    assert open_disk_tier(config, runner(host_pages=0)) is None
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


def info(**changed: Any) -> RunnerInfo:
    return msgspec.structs.replace(runner_info(host_pages=4), **changed)


def test_the_fingerprint_has_what_decides_a_pages_bits_and_no_more(tmp_path: Path) -> None:
    model = model_in(tmp_path / "m")
    first = fingerprint_of(model, info())
    for same in (info(max_model_len=7), info(pages=5, slots=1), info(host_pages=9, page_copy_s=0.1)):
        assert fingerprint_of(model, same) == first
    (model / "tokenizer.json").write_text("{}")
    assert fingerprint_of(model, info()) == first
    for other in (info(arithmetic="another"), info(dtype="bfloat16"), info(page_size=8), info(page_bytes=3)):
        assert fingerprint_of(model, other) != first
    (model / "config.json").write_text("[]")
    assert fingerprint_of(model, info()) != first


@pytest.mark.parametrize(("kernels", "is_same"), [("native", True), ("torch", False)])
def test_threads_are_in_the_fingerprint_where_they_change_bits(
    tmp_path: Path, kernels: Literal["native", "torch"], is_same: bool
) -> None:
    """Native kernels have the same bits with any number of threads (`test_native`), and torch has not."""
    if kernels == "native" and not built_isas():
        pytest.skip("native kernels are not built")
    model, threads = make_tiny_model("llama", tmp_path / "m"), torch.get_num_threads()
    seen = set()
    try:
        for given, context in ((1, 64), (2, 128)):
            config = RunnerConfig(
                str(model), "cpu", kernels=kernels, threads=given, max_model_len=context, max_num_seqs=1
            )
            shard = load_shard(config, lambda _: None)
            seen.add(fingerprint_of(model, shard.info(4)))
    finally:
        torch.set_num_threads(threads)
    assert (len(seen) == 1) == is_same


def test_the_fingerprint_sees_every_byte_of_the_weights_and_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was tuned further in its middle layers alone, in an image whose files have equal times."""
    monkeypatch.setattr(disk_tier, "PART_LEN", 2 << 20)  # a file of several parts
    monkeypatch.setattr(disk_tier, "READ_LEN", 1 << 19)
    model = model_in(tmp_path / "m")
    weights = model / "model.safetensors"
    seen = set()
    for changed in (None, 0, (2 << 20) + 17, 3 << 20, (5 << 20) - 1):
        data = bytearray(5 << 20)
        if changed is not None:
            data[changed] = 1
        weights.write_bytes(data)
        os.utime(weights, ns=(0, 0))
        seen.add(fingerprint_of(model, info()))
    assert len(seen) == 5
    os.utime(weights, ns=(1, 1))  # the same file, downloaded again
    assert fingerprint_of(model, info()) in seen


def test_the_fingerprint_tells_releases_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_in(tmp_path / "m")
    first = fingerprint_of(model, info())
    monkeypatch.setattr(disk_tier, "version", lambda: "next")
    assert first != fingerprint_of(model, info())


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
