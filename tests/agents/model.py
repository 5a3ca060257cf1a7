"""The model's directory: a real family's chat template, a tokenizer of the demo model's words and the
family's own tokens, and no weights. Its context is as long as an agent expects.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec
import tokenizers

from engine.demo import MODEL_DIR
from tests.agents.served import CONTEXT_LEN, SCRIPTED, Scripted, scripted
from tests.suites.templates import shipped

OWN_TOKENS: Final = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
OPENINGS: Final = {"qwen3": "<|im_start|>assistant\n", "qwen3_8": "<|im_start|>assistant\n<think>\n"}
"""What begins an answer, by the names of the templates."""


def opening_len(directory: Path) -> int:
    """The tokens of a prompt that begin the answer, and are not in the next prompt as they are."""
    raw = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    return len(raw.encode(OPENINGS[scripted(directory).template], add_special_tokens=False).ids)


def make_model(directory: Path, template: str, pages: int, cache: Path) -> None:
    """Write the model's directory. `pages`: of the cache that it is served with. Raises SuiteFailed where the
    templates cannot be fetched."""
    tokenizer: dict[str, Any] = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    config: dict[str, Any] = json.loads((MODEL_DIR / "config.json").read_text())
    settings: dict[str, Any] = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    first = config["vocab_size"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokenizer["added_tokens"] += [
        {"id": number, "content": text, **plain} for number, text in enumerate(OWN_TOKENS, first)
    ]
    config |= {"vocab_size": first + len(OWN_TOKENS), "max_position_embeddings": CONTEXT_LEN}
    settings |= {"model_max_length": CONTEXT_LEN, "chat_template": shipped(cache)[template]}
    directory.mkdir(parents=True, exist_ok=True)
    files = {"tokenizer.json": tokenizer, "config.json": config, "tokenizer_config.json": settings}
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    (directory / "generation_config.json").write_bytes((MODEL_DIR / "generation_config.json").read_bytes())
    (directory / SCRIPTED).write_bytes(msgspec.json.encode(Scripted(template, pages)))
