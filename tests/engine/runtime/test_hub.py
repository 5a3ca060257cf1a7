"""Directories, hub ids, and the messages when neither leads anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from engine.runtime.setup.hub import download, resolve_model
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
