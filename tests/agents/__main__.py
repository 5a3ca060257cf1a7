"""`python -m tests.agents [NAME...]`: real coding agents do a task through a gateway and an engine.

Each agent is installed from npm in the version of the table in `tests.agents.catalogue`, and runs in a
network namespace with nothing but loopback, so that it can ask nobody else. The model plays a script; the
template, the tokenizer, the parsers and the prefix cache are real. What went over the wire is kept in the
cache's folder `recorded`. An agent passes where its task is done, every request was answered, charged is what
was computed, and each turn found the prompt of the turn before in the prefix cache (`tests.agents.outcome`).

It needs npm, `unshare` and the right to make network namespaces.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from shared.process.arguments import Parser
from tests.agents.catalogue import AGENTS, BY_NAME, cache_folder
from tests.agents.outcome import Outcome
from tests.agents.scenes import SCENES, TOGETHER
from tests.agents.served import FAMILIES
from tests.suites.cache import SuiteFailed

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / "tests/bench/results"
SCENE_S: Final = 1800.0
"""The time in which a scene must be over, in seconds."""
PATIENCE_S: Final = 300
"""The time in which the services must be up, in seconds, unless `PATIENCE_S` of the environment says another
(`tests.waiting`)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scenes. Returns the process's exit code: 0 all passed, 1 not so, 2 not run."""
    parser = Parser(prog="python -m tests.agents", description="Real coding agents against both services.")
    parser.add_argument("name", nargs="*", metavar="NAME", help=f"{', '.join(BY_NAME)}; all unless named")
    parser.add_argument("--scene", action="append", choices=SCENES, help="sessions alone unless given")
    parser.add_argument("--template", choices=FAMILIES, default="qwen3_8", help="the model's family")
    parser.add_argument("--write", action="store_true", help="put the outcomes to the committed results")
    options = parser.parse_args(argv)
    names = options.name or [agent.name for agent in AGENTS]
    if unknown := set(names) - set(BY_NAME):
        parser.error(f"no such agent: {', '.join(sorted(unknown))}")
    outcomes = list[Outcome]()
    try:
        for name in names:
            BY_NAME[name].install(cache_folder())
        for scene in options.scene or ["session"]:
            for outcome in played(scene, options.template, names):
                outcomes.append(outcome)
                show(outcome)
    except SuiteFailed as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if options.write:
        write(outcomes, sys.argv[1:] if argv is None else argv)
    return 1 if any(outcome.faults for outcome in outcomes) else 0


def played(scene: str, template: str, names: Sequence[str]) -> Iterator[Outcome]:
    """The outcomes of a scene, in a namespace for each agent, or for those together that share one. Raises
    SuiteFailed."""
    for group in [list(names)] if scene == TOGETHER else [[name] for name in names]:
        kept = cache_folder() / "recorded"
        command = [sys.executable, "-m", "tests.agents.inside", scene, template, str(kept), *group]
        try:
            done = subprocess.run(
                ["unshare", "-n", *command],
                cwd=ROOT,
                env={"PATIENCE_S": str(PATIENCE_S), **os.environ},
                stdout=subprocess.PIPE,
                timeout=SCENE_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise SuiteFailed(f"{scene} of {', '.join(group)}: {error}") from error
        yield from (msgspec.json.decode(line, type=Outcome) for line in done.stdout.splitlines())


def show(made: Outcome) -> None:
    """Print an outcome: a line for it, one for each turn, and one for each fault."""
    taken = " + ".join(map(str, made.seconds))
    tasks = f"{sum(made.done)} of {len(made.done)} orders done" if made.done else "broken off"
    beside = f", {made.chats} chats beside, gap p99 {made.chat_gap_p99_ms} ms" if made.chats else ""
    sys.stdout.write(
        f"{made.agent} {made.version}, {made.scene}, {made.template}: {tasks} in {taken} s, "
        f"{len(made.turns)} turns, {made.beside} requests beside{beside}\n"
    )
    for turn in made.turns:
        share = 100 * turn.cached_tokens / turn.prompt_tokens
        kept = {None: "first of an order", True: "kept", False: "NOT KEPT"}[turn.keeps]
        sys.stdout.write(
            f"  {turn.messages:3} messages  {turn.prompt_tokens:7} tokens  {turn.cached_tokens:7} cached "
            f"{share:5.1f} %  {turn.completion_tokens:5} answered  {kept}\n"
        )
    sys.stdout.writelines(f"  FAULT {fault}\n" for fault in made.faults)
    sys.stdout.flush()


def write(outcomes: Sequence[Outcome], argv: Sequence[str]) -> None:
    """Put outcomes behind a line that says how they came about."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    head = {
        "machine": f"{os.cpu_count()} virtual cores, {platform.system()} {platform.release()}",
        "commit": commit,
        "command": f"python -m tests.agents {' '.join(argv)}",
    }
    with (RESULTS / f"agents-{datetime.now(UTC).date()}.jsonl").open("a") as out:
        for line in (head, *outcomes):
            out.write(msgspec.json.encode(line).decode() + "\n")


if __name__ == "__main__":
    sys.exit(main())
