"""What agents are put through, each in a stage of its own.

`session`: an agent does a task. `killed`: an agent is killed while its answer comes: the sequence ends, its
pages are free, and what was computed is charged. `slow-tool`: the command that an agent runs takes
`PAUSE_S`, while people chat who fill the cache more than once. `together`: two agents of one tenant at once,
while people of another chat.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from shared.wire.end_reason import EndReason
from tests.agents.catalogue import Agent
from tests.agents.chats import Chats, chatting
from tests.agents.outcome import Outcome, mischarged, outcome
from tests.agents.stage import RUN_S, Guest, Stage, end, guest, staged
from tests.services import Line, Service, admin_url, engine_at_rest, engine_url, gateway_at_rest, until

PAUSE_S: Final = 20
RECITED: Final = 3000
"""The words of the answer that is broken off."""
BREAK_EVENTS: Final = 200
"""The events of it after which the agent is killed."""
FEW_PAGES: Final = 1280
"""A cache that one session and a few chats fill. Half of it holds the longest session: qwen-code's prompts
have 37,000 tokens, and it asks for room for 32,000 more."""
PEOPLE: Final = 2
PROMPT_LEN: Final = 600
LONG_PROMPT_LEN: Final = 4000
"""The words of chats that are to fill the cache."""

Keep = Callable[[Guest], None]
"""Takes what was recorded of an agent."""


def session(agents: list[Agent], folder: Path, template: str, keep: Keep) -> Iterator[Outcome]:
    for agent in agents:
        with (
            staged(folder / agent.name, template) as stage,
            guest(stage, agent, folder / agent.name / "own") as own,
        ):
            runs = own.session()
            keep(own)
            yield _rested(stage, outcome("session", stage, own, runs))


def slow_tool(agents: list[Agent], folder: Path, template: str, keep: Keep) -> Iterator[Outcome]:
    for agent in agents:
        with (
            staged(folder / agent.name, template, FEW_PAGES) as stage,
            guest(stage, agent, folder / agent.name / "own", PAUSE_S) as own,
        ):
            with chatting(stage.url, PEOPLE, LONG_PROMPT_LEN) as chats:
                runs = own.session()
            yield _rested(stage, _beside(outcome("slow-tool", stage, own, runs), chats))


def together(agents: list[Agent], folder: Path, template: str, keep: Keep) -> Iterator[Outcome]:
    with staged(folder, template) as stage, ExitStack() as stack:
        guests = [stack.enter_context(guest(stage, agent, folder / agent.name)) for agent in agents]
        with chatting(stage.url, PEOPLE, PROMPT_LEN) as chats, ThreadPoolExecutor(len(guests)) as pool:
            sessions = list(pool.map(Guest.session, guests))
        for own, runs in zip(guests, sessions, strict=True):
            yield _rested(stage, _beside(outcome(TOGETHER, stage, own, runs), chats))


def killed(agents: list[Agent], folder: Path, template: str, keep: Keep) -> Iterator[Outcome]:
    for agent in agents:
        with (
            staged(folder / agent.name, template) as stage,
            guest(stage, agent, folder / agent.name / "own") as own,
        ):
            yield _rested(stage, _kill(stage, own))


def _kill(stage: Stage, own: Guest) -> Outcome:
    """Kill an agent when BREAK_EVENTS of its answer have come."""
    came, heard = 0, threading.Event()

    def hear(piece: bytes) -> None:
        nonlocal came
        came += piece.count(b"\n\n")
        if came > BREAK_EVENTS:
            heard.set()

    own.recorder.on_answer = hear
    began_s = time.time()
    process = own.started(own.agent.order(own.place, f"Recite {RECITED} words and use no tool."))
    faults = [] if heard.wait(RUN_S) else ["the answer did not begin"]
    end(process)
    until(lambda: bool(cut(stage.engine)) and bool(cut(stage.gateway)))
    [line] = cut(stage.engine)
    if not 0 < line["completion_tokens"] < RECITED:
        faults.append(f"{line['completion_tokens']} tokens were computed")
    return Outcome(
        scene="killed",
        agent=own.agent.name,
        version=own.agent.version,
        api=own.agent.api,
        template=stage.template,
        done=[],
        seconds=[round(time.time() - began_s, 1)],
        turns=[],
        beside=len(own.recorder.exchanges),
        faults=faults + mischarged(stage),
    )


def cut(service: Service) -> list[Line]:
    """The requests whose caller left."""
    return [line for line in service.completed if line["end_reason"] == EndReason.CLIENT_CANCEL]


def _beside(made: Outcome, chats: Chats) -> Outcome:
    """The outcome with what the chats were like."""
    faults = [f"a chat failed: {each}" for each in chats.failed] + ([] if chats.done else ["no chat ended"])
    return msgspec.structs.replace(
        made, faults=made.faults + faults, chats=chats.done, chat_gap_p99_ms=chats.gap_ms(0.99)
    )


def _rested(stage: Stage, made: Outcome) -> Outcome:
    """The outcome, once nobody holds anything. An engine that began nothing has no gauges yet."""
    if any(line.get("prompt_tokens") for line in stage.engine.completed):
        until(lambda: engine_at_rest(engine_url(stage.engine)) and gateway_at_rest(admin_url(stage.gateway)))
    return made


TOGETHER: Final = "together"
SCENES: Final = {"session": session, "killed": killed, "slow-tool": slow_tool, TOGETHER: together}
