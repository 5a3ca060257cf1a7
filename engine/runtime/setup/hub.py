"""Resolves the model that the operator named to a directory on disk.

No torch here; the hub's client is imported only when it is needed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from engine.runtime.setup.model_directory import check_model_directory, check_model_file
from engine.runtime.setup.model_errors import ModelUnavailable

FILES_WANTED: Final = ("*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer.model", "*.jinja")
FILES_REFUSED: Final = ("[!0-9]*/*", "[0-9][!_]*/*", "consolidated*")
"""Subfolders, but for those of an embedder's modules (`1_Pooling`), and Mistral's consolidated files hold the
same weights in other formats."""
_HUB_ID: Final = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def resolve_model(model: str, revision: str | None = None) -> Path:
    """The directory that `model` names, or the snapshot of a hub id at `revision` (None: the newest),
    downloaded on first use. Raises ModelUnavailable."""
    path = Path(os.path.expanduser(model))
    if model and path.is_dir():
        check_model_directory(path)
        return path
    if path.is_file():
        check_model_file(path)
    if not _HUB_ID.fullmatch(model):
        raise ModelUnavailable(f"{model!r} is neither a directory nor a hub id like 'Qwen/Qwen3-0.6B'")
    try:
        snapshot = download(model, revision)
    except ModelUnavailable as error:  # what looks like a hub id may be a path with one slash
        raise ModelUnavailable(f"there is no directory {model!r}, and as a hub id: {error}") from error
    check_model_directory(snapshot)
    return snapshot


def download(hub_id: str, revision: str | None = None, cache: Path | None = None) -> Path:
    """The directory of a hub id's snapshot in `cache` (None: the hub client's own), downloaded where it is
    not there yet. That of a commit is `models--OWNER--NAME/snapshots/COMMIT`. Raises ModelUnavailable."""
    from huggingface_hub import errors as hub
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                hub_id,
                revision=revision,
                cache_dir=cache,
                allow_patterns=list(FILES_WANTED),
                ignore_patterns=list(FILES_REFUSED),
            )
        )
    except hub.GatedRepoError as error:
        raise ModelUnavailable(
            f"{hub_id} is gated: accept its terms on the hub and set HF_TOKEN to a token of that account"
        ) from error
    except hub.RevisionNotFoundError as error:
        raise ModelUnavailable(f"{hub_id} has no revision {revision} on the hub") from error
    except hub.RepositoryNotFoundError as error:
        raise ModelUnavailable(f"the hub has no model {hub_id}, or it is private: set HF_TOKEN") from error
    except (OSError, ValueError, RuntimeError) as error:  # what the hub client raises without a network
        raise ModelUnavailable(
            f"{hub_id} is not in the local cache, and the hub cannot be reached ({type(error).__name__}); "
            "download it where there is a network and pass its directory as the model"
        ) from error
