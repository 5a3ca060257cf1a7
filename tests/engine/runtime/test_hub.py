"""Directories, hub ids, and the messages when neither leads anywhere."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from engine.runtime.setup.hub import download, resolve_model
from engine.runtime.setup.model_directory import unreadable_weights
from engine.runtime.setup.model_errors import ModelUnavailable


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["/no/such/place", "./nowhere", "word", "", "a/b/c", "../x"])
def test_neither_directory_nor_hub_id(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelUnavailable, match="neither a directory nor a hub id"):
        resolve_model(model)


def test_a_hub_id_downloads_weights_and_text_files_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}

    def snapshot(hub_id: str, **options: Any) -> str:
        asked.update(options, hub_id=hub_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("Qwen/Qwen3-0.6B") == tmp_path
    assert asked["hub_id"] == "Qwen/Qwen3-0.6B"
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any(pattern in ("*", "*.bin", "*.py", "*.pt") for pattern in asked["allow_patterns"])


def test_a_revision_and_a_cache_are_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def snapshot(hub_id: str, **options: Any) -> str:
        asked.update(options)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("Qwen/Qwen3-0.6B", "v2") == tmp_path
    assert (asked["revision"], asked["cache_dir"]) == ("v2", None)
    download("Qwen/Qwen3-0.6B", "0" * 40, tmp_path)
    assert (asked["revision"], asked["cache_dir"]) == ("0" * 40, tmp_path)


def test_a_revision_that_there_is_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing(errors.RevisionNotFoundError):
        def __init__(self) -> None:  # without the answer that it is made of
            Exception.__init__(self)

    def snapshot(hub_id: str, **options: Any) -> str:
        raise Missing

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelUnavailable, match=r"Qwen/Qwen3-0.6B has no revision v2 on the hub"):
        resolve_model("Qwen/Qwen3-0.6B", "v2")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errors.LocalEntryNotFoundError("offline"), "cannot be reached"),
        (errors.OfflineModeIsEnabled("offline"), "cannot be reached"),
        (ConnectionError("no route"), "cannot be reached"),
        (errors.HFValidationError("bad id"), "cannot be reached"),
    ],
)
def test_no_network(monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    def snapshot(hub_id: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelUnavailable, match=said) as caught:
        resolve_model("Qwen/Qwen3-0.6B")
    assert "there is no directory 'Qwen/Qwen3-0.6B', and as a hub id: " in str(caught.value)


# -- what is no model -----------------------------------------------------------------------------


def _shard(path: Path, cut_len: int = 0) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}).encode()
    whole = struct.pack("<Q", len(header)) + header + bytes(256)
    path.write_bytes(whole[: len(whole) - cut_len])


def _lfs(directory: Path) -> None:
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def _gguf(directory: Path) -> None:
    (directory / "tiny-q4_k_m.gguf").write_bytes(b"GGUF\x03")


def _adapter(directory: Path) -> None:
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}')
    _shard(directory / "adapter_model.safetensors")


def _cache_of_one(directory: Path) -> None:
    (directory / "snapshots" / "abc").mkdir(parents=True)


def _whole_cache(directory: Path) -> None:
    (directory / "models--Qwen--Qwen3-0.6B").mkdir()


def _consolidated(directory: Path) -> None:
    _shard(directory / "consolidated.safetensors")


def _pickled(directory: Path) -> None:
    (directory / "config.json").write_text("{}")
    (directory / "pytorch_model.bin").write_bytes(b"PK")


def _sentencepiece(directory: Path) -> None:
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.model").write_bytes(b"\n")
    _shard(directory / "model.safetensors")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (_lfs, ("model.safetensors", "git lfs pull")),
        (_gguf, ("tiny-q4_k_m.gguf", "GGUF", 'engine = "openai"')),
        (_adapter, ("LoRA", "Qwen/Qwen3-8B", "merge_and_unload")),
        (_cache_of_one, ("snapshots/abc",)),
        (_whole_cache, ("Qwen/Qwen3-0.6B",)),
        (_consolidated, ("consolidated.safetensors", "tokenizer.json")),
        (_pickled, ("pytorch_model.bin", "save_pretrained")),
        (_sentencepiece, ("tokenizer.model", "AutoTokenizer")),
    ],
)
def test_what_is_no_model_is_named_with_the_way_out(
    make: Callable[[Path], None], told: tuple[str, ...], tmp_path: Path
) -> None:
    make(tmp_path)
    with pytest.raises(ModelUnavailable) as refused:
        resolve_model(str(tmp_path))
    assert [word for word in told if word not in str(refused.value)] == []


def test_a_file_is_no_model(tmp_path: Path) -> None:
    _gguf(tmp_path)
    (tmp_path / "notes").write_text("")
    with pytest.raises(ModelUnavailable, match="GGUF"):
        resolve_model(str(tmp_path / "tiny-q4_k_m.gguf"))
    with pytest.raises(ModelUnavailable, match="is a file"):
        resolve_model(str(tmp_path / "notes"))


@pytest.mark.parametrize(("cut_len", "told"), [(100, "cut short"), (300, "cut short"), (0, "what it said")])
def test_a_shard_that_was_cut_is_told_from_a_damaged_one(cut_len: int, told: str, tmp_path: Path) -> None:
    _shard(tmp_path / "model.safetensors", cut_len)
    assert told in unreadable_weights(tmp_path / "model.safetensors", ValueError("what it said"))
