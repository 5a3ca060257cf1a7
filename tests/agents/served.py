"""The engine that agents talk to, `python -m tests.agents.served serve|core ...`: the engine's own API process
and core, around a model that plays a script in place of weights.

The model is a directory with a real family's chat template, a tokenizer of the demo model's words and the
family's own tokens, and no weights. Its context is as long as an agent expects.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from engine.__main__ import core
from engine.api.core.process import CoreProcess
from engine.api.http import server
from engine.config import CoreStart, from_args
from engine.contract.messages import Runner
from engine.demo import MODEL_DIR
from engine.runtime.setup.runner_config import RunnerConfig
from shared.process import interrupts, logs
from shared.process.loops import loop_factory
from tests.agents.script import played
from tests.agents.scripted_runner import ScriptedRunner
from tests.answer_texts import FORMATS
from tests.fake_runner import runner_info
from tests.suites.templates import shipped

CONTEXT_LEN: Final = 131_072
PAGE_SIZE: Final = 64
PAGES: Final = 8192
STEP_S: Final = 0.002
"""The time that a step takes: without it an answer would be over before anybody could leave."""
MODULE: Final = "tests.agents.served"
FAMILIES: Final = {"qwen3": "qwen3", "qwen3_8": "qwen3.5"}
"""The formats of answers, by the names under which TRL ships their templates."""
OWN_TOKENS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
FAMILY: Final = "family.txt"
"""The file of the model's directory with the name of its template."""


def make_model(directory: Path, family: str, cache: Path) -> None:
    """Write the model's directory. Raises SuiteFailed where the templates cannot be fetched."""
    tokenizer: dict[str, Any] = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    config: dict[str, Any] = json.loads((MODEL_DIR / "config.json").read_text())
    settings: dict[str, Any] = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    first = config["vocab_size"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokenizer["added_tokens"] += [
        {"id": number, "content": text, **plain} for number, text in enumerate(OWN_TOKENS, first)
    ]
    config |= {"vocab_size": first + len(OWN_TOKENS), "max_position_embeddings": CONTEXT_LEN}
    settings |= {"model_max_length": CONTEXT_LEN, "chat_template": shipped(cache)[family]}
    directory.mkdir(parents=True, exist_ok=True)
    files = {"tokenizer.json": tokenizer, "config.json": config, "tokenizer_config.json": settings}
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    (directory / "generation_config.json").write_bytes((MODEL_DIR / "generation_config.json").read_bytes())
    (directory / FAMILY).write_text(family)


def load(settings: RunnerConfig, progress: Callable[[str], None], _lost: Callable[[str], None]) -> Runner:
    directory = Path(settings.model)
    progress("a script")
    info = runner_info(
        pages=PAGES,
        page_size=settings.page_size,
        slots=settings.max_num_seqs,
        max_model_len=settings.max_model_len or CONTEXT_LEN,
        vocab_size=json.loads((directory / "config.json").read_text())["vocab_size"],
    )
    format_ = FORMATS[FAMILIES[(directory / FAMILY).read_text()]]
    return ScriptedRunner(
        info,
        settings.max_step_tokens,
        directory / "tokenizer.json",
        lambda prompt: played(prompt, format_),
        pause=lambda: time.sleep(STEP_S),
    )


def main(argv: list[str]) -> int:
    match argv:
        case ["core"]:
            interrupts.leave_to_parent()
            return core(CoreStart.decode(sys.stdin.buffer.read()), load)
        case ["serve", *options]:
            interrupts.end_quietly()
            config = from_args(options, os.environ)
            logs.configure("engine", level=config.log_level)
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                return runner.run(
                    server.serve(
                        config, Path, lambda config, tokens: CoreProcess(config, tokens, module=MODULE)
                    )
                )
    raise SystemExit(f"{MODULE}: serve or core")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
