"""Finds out whether a model ranks documents, and in which format: its operator says so, or its files do.

    modules.json, .../config.json   a LogitScore, as sentence-transformers (from 5.4 on) writes a reranker
                                    that answers by two tokens
    config.json                     is_original_qwen3_reranker, or classifier_from_token: what vLLM is told
    the chat template               one that asks Qwen3-Reranker's question

Rules:

1. A checkpoint whose files say nothing of it, as the first ones of Qwen3-Reranker, is one where its operator
   says so (`--reranker qwen3`).
2. What the files ask for and is not implemented is refused by name: a relevance that is slightly another is
   found by nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from engine.contract.embedders import MODULES, logit_score
from shared.text.model_files import BadModelFile, read_object, read_text, shown
from shared.text.reranking import FORMATS, JUDGE
from shared.text.tokenizer_files import TokenizerFiles

RerankerSetting = Literal["auto", "qwen3", "none"]
QWEN3: Final = "qwen3"
_HINT: Final = "(--reranker none starts it without /v1/rerank)"


def reranker_of(directory: Path, setting: RerankerSetting, files: TokenizerFiles) -> str | None:
    """The name of the format in which the model ranks documents. None where it ranks none. Raises
    BadModelFile, which names the file."""
    if setting != "auto":
        return None if setting == "none" else setting
    asks = JUDGE in (files.chat_template or "")
    modules = read_text(directory / MODULES)
    if modules is not None and (path := logit_score(modules)) is not None:
        _check_logit_score(directory, path, asks=asks)
        return QWEN3
    return QWEN3 if asks or _is_told(read_object(directory / "config.json") or {}) else None


def _is_told(config: Mapping[str, Any]) -> bool:
    """True if vLLM would be told by config.json that the model is a Qwen3-Reranker."""
    format_ = FORMATS[QWEN3]
    by_tokens = config.get("classifier_from_token") == [format_.false, format_.true]
    return bool(config.get("is_original_qwen3_reranker")) or by_tokens


def _check_logit_score(directory: Path, path: str, *, asks: bool) -> None:
    """Raises BadModelFile for a relevance that is not what Qwen3-Reranker's is."""
    where = f"{path}/config.json"
    own = Path(path)
    if own.is_absolute() or own.name != path:
        raise BadModelFile(f"{MODULES}: path {shown(path)} is no directory of the model's own")
    asked = read_object(directory / own / "config.json") or {}
    if asked.get("false_token_id") is None:
        raise BadModelFile(f"{where}: false_token_id null is not supported {_HINT}")
    if not asks:
        raise BadModelFile(
            f"{where}: the chat template asks another question than Qwen3-Reranker's, which is not supported "
            f"{_HINT}"
        )
