"""People who chat beside the agents: streams of another tenant, one after another, and what they notice."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import httpx

from tests.agents.stage import CHATS_KEY
from tests.bench.figures import quantile
from tests.services import MODEL, PATIENCE_S

WORDS: Final = 150
"""The words of an answer."""


@dataclass(slots=True)
class Chats:
    """What came of the chats so far."""

    done: int = 0
    failed: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    """Between two events of a stream, the one before the first apart."""

    def gap_ms(self, q: float) -> float:
        return round(1e3 * quantile(self.gaps_s, q), 1)


@contextmanager
def chatting(url: str, people: int, prompt_len: int) -> Iterator[Chats]:
    """So many people, until the end, each with prompts of so many words that begin unlike all others'."""
    chats, over, numbers, lock = Chats(), threading.Event(), count(), threading.Lock()

    def chat() -> None:
        with httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {CHATS_KEY}"}, trust_env=False
        ) as http:
            while not over.is_set():
                _ask(http, chats, lock, f"{next(numbers)} {'of the same ' * (prompt_len // 3)}")

    threads = [threading.Thread(target=chat, name=f"chat-{number}") for number in range(people)]
    for thread in threads:
        thread.start()
    try:
        yield chats
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _ask(http: httpx.Client, chats: Chats, lock: threading.Lock, before: str) -> None:
    """One chat, from its question to the end of the answer."""
    asked = [{"role": "user", "content": f"{before}\nRecite {WORDS} words."}]
    body = {"model": MODEL, "stream": True, "messages": asked}
    gaps, last_s, whole = list[float](), 0.0, False
    try:
        with http.stream("POST", "/v1/chat/completions", json=body, timeout=PATIENCE_S) as answer:
            for line in answer.iter_lines():
                now_s = time.monotonic()
                if line.startswith("data:"):
                    whole = line == "data: [DONE]"
                    gaps += [now_s - last_s] if last_s else []
                    last_s = now_s
    except httpx.HTTPError as error:
        with lock:
            chats.failed.append(repr(error))
        return
    with lock:
        chats.gaps_s += gaps
        if answer.status_code == 200 and whole:
            chats.done += 1
        else:
            chats.failed.append(str(answer.status_code))
