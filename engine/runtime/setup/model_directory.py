"""Says what a directory is that is no model as Penstock reads one, and what makes it one: files of Git LFS, a
cache's root, an adapter, weights in another format.

Nothing is said of a directory with another mistake: whatever reads its files names that one.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

import msgspec

from engine.runtime.setup.model_errors import ModelUnavailable
from shared.process.files import open_regular, read_bytes
from shared.wire.undecodable import UNDECODABLE

LFS_POINTER: Final = b"version https://git-lfs.github.com/spec/"
GGUF_MAGIC: Final = b"GGUF"
OTHER_SERVER: Final = 'another server, behind the same gateway: engine = "openai" in its [[models]]'
"""How a model is served that Penstock's engine does not read."""
_SMALL_LEN_MAX: Final = 64 * 1024
_HEADER_LEN_MAX: Final = 100 * 1024 * 1024
"""Bytes of a header of safetensors, as the library bounds it."""
_CACHED: Final = "models--"
"""The beginning of a directory's name in the hub client's cache."""
_SHOWN_MAX: Final = 3


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int] = (0, 0)
    """Unset for what is no tensor: the file's metadata."""


class _AdapterConfig(msgspec.Struct):
    base_model_name_or_path: str | None = None


def check_model_directory(directory: Path) -> None:
    """Raises ModelUnavailable where the directory is one of the kinds that this module knows."""
    try:
        names = frozenset(os.listdir(directory))
    except OSError as error:
        raise ModelUnavailable(f"{directory} cannot be read: {error.strerror}") from error
    told = _pointer(directory, names)
    if told is None and "config.json" not in names:
        told = _adapter(directory, names) or _cache(directory, names)
    told = told or _weights(directory, names) or _tokenizer(directory, names)
    if told is not None:
        raise ModelUnavailable(told)


def check_model_file(path: Path) -> None:
    """Raises ModelUnavailable, as a model is a directory."""
    if _begins(path, GGUF_MAGIC):
        raise ModelUnavailable(_gguf(path))
    raise ModelUnavailable(f"{path} is a file: a model is the directory with config.json and the weights")


def unreadable_weights(path: Path, error: Exception) -> str:
    """The message about a file of safetensors that the library refuses with `error`."""
    if _begins(path, LFS_POINTER):
        return _of_lfs(path.name, path.parent)
    whole_len, here_len = _whole_len(path), path.stat().st_size if path.exists() else 0
    if whole_len is not None and here_len < whole_len:
        return f"{path.name} is cut short ({here_len:,} of {whole_len:,} bytes): download it again"
    return f"{path.name} is not readable as safetensors: {error}"


def _whole_len(path: Path) -> int | None:
    """The length that a file of safetensors has by its own header; None where that cannot be read."""
    try:
        with open_regular(path) as file:
            header_len = int.from_bytes(file.read(8), "little")
            if header_len > _HEADER_LEN_MAX:
                return None
            header = file.read(header_len)
        if len(header) < header_len:
            return 8 + header_len
        tensors = msgspec.json.decode(header, type=dict[str, _Tensor])
    except (OSError, *UNDECODABLE):
        return None
    return 8 + header_len + max(one.data_offsets[1] for one in tensors.values())


def _begins(path: Path, mark: bytes) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(len(mark)) == mark
    except OSError:
        return False


def _pointer(directory: Path, names: frozenset[str]) -> str | None:
    for name in sorted(names):
        if name.endswith((".safetensors", ".json", ".model")) and _begins(directory / name, LFS_POINTER):
            return _of_lfs(name, directory)
    return None


def _of_lfs(name: str, directory: Path) -> str:
    return f"{name} is a Git LFS pointer, not the file itself: run `git lfs pull` in {directory}"


def _adapter(directory: Path, names: frozenset[str]) -> str | None:
    if "adapter_config.json" not in names:
        return None
    base = None
    with contextlib.suppress(OSError, *UNDECODABLE):
        text = read_bytes(directory / "adapter_config.json", _SMALL_LEN_MAX)
        base = msgspec.json.decode(text, type=_AdapterConfig).base_model_name_or_path
    of = f" of {base[:128]!r}" if base else ""
    return (
        f"{directory} is an adapter (LoRA){of}, not a model: merge it into its base by peft's "
        "merge_and_unload() and save_pretrained(), and pass the directory that this makes"
    )


def _cache(directory: Path, names: frozenset[str]) -> str | None:
    if "snapshots" in names:
        snapshots = sorted((directory / "snapshots").glob("*/"), key=lambda one: one.stat().st_mtime)
        if not snapshots:
            return f"{directory} is a hub cache's directory without a snapshot: pass the hub id instead"
        id_ = directory.name.removeprefix(_CACHED).replace("--", "/")
        return f"{directory} is the root of a cache: pass the hub id {id_}, or its snapshot {snapshots[-1]}"
    cached = sorted(name.removeprefix(_CACHED).replace("--", "/") for name in names if name[:8] == _CACHED)
    if cached:
        return f"{directory} is a hub cache: pass a hub id, such as {', '.join(cached[:_SHOWN_MAX])}"
    return None


def _weights(directory: Path, names: frozenset[str]) -> str | None:
    """The format of the weights, where it is none that is read."""
    read = [name for name in names if name.endswith(".safetensors")]
    if any(not name.startswith("consolidated") for name in read):
        return None
    if read:
        return (
            f"{directory} has Mistral's own format alone ({min(read)}): download the repository's "
            "config.json, tokenizer.json and model*.safetensors, too"
        )
    if quantised := sorted(name for name in names if name.lower().endswith(".gguf")):
        return _gguf(directory / quantised[0])
    if pickled := sorted(name for name in names if name.endswith((".bin", ".pt", ".pth"))):
        return (
            f"{directory} has pickled weights alone ({pickled[0]}), which may run code and are never loaded: "
            "convert them by transformers' AutoModelForCausalLM.from_pretrained() and save_pretrained()"
        )
    return None


def _gguf(path: Path) -> str:
    return (
        f"{path} is in llama.cpp's format (GGUF), and Penstock reads safetensors: pass the model that it was "
        f"made from, or run llama.cpp's {OTHER_SERVER}"
    )


def _tokenizer(directory: Path, names: frozenset[str]) -> str | None:
    if "tokenizer.json" in names or "tokenizer.model" not in names:
        return None
    return (
        f"{directory} has tokenizer.model and no tokenizer.json: convert it by transformers' "
        "AutoTokenizer.from_pretrained() and save_pretrained()"
    )
