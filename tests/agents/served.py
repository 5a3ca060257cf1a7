"""The engine that agents talk to, `python -m tests.agents.served serve|core ...`: the engine's own API
process and core, around a model that plays a script in place of weights.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from engine.__main__ import core
from engine.api.core.process import CoreProcess
from engine.api.http import server
from engine.config import CoreStart, from_args
from engine.contract.messages import Runner
from engine.runtime.setup.runner_config import RunnerConfig
from shared.process import interrupts, logs
from shared.process.loops import loop_factory
from tests.agents.script import played
from tests.agents.scripted_runner import ScriptedRunner
from tests.answer_texts import FORMATS
from tests.fake_runner import runner_info

CONTEXT_LEN: Final = 131_072
PAGES: Final = 8192
STEP_S: Final = 0.002
"""The time that a step takes: without it an answer would be over before anybody could leave."""
MODULE: Final = "tests.agents.served"
FAMILIES: Final = {"qwen3": "qwen3", "qwen3_8": "qwen3.5"}
"""The formats of answers, by the names under which TRL ships their templates."""
SCRIPTED: Final = "scripted.json"


class Scripted(msgspec.Struct, frozen=True):
    """What the model's directory says of it beside the usual files."""

    template: str
    """One of FAMILIES."""
    pages: int


def scripted(directory: Path) -> Scripted:
    return msgspec.json.decode((directory / SCRIPTED).read_bytes(), type=Scripted)


def load(settings: RunnerConfig, progress: Callable[[str], None], _lost: Callable[[str], None]) -> Runner:
    directory = Path(settings.model)
    own = scripted(directory)
    progress("a script")
    info = runner_info(
        pages=own.pages,
        page_size=settings.page_size,
        slots=settings.max_num_seqs,
        max_model_len=settings.max_model_len or CONTEXT_LEN,
        vocab_size=json.loads((directory / "config.json").read_text())["vocab_size"],
    )
    format_ = FORMATS[FAMILIES[own.template]]
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
