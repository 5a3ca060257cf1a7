"""Long chats are rendered by a process of their own: the same text, within bounds, and beside other jobs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.apis.chat_messages import ChatMessage
from shared.apis.prompt import ChatPrompt
from shared.fairness.fair_threads import FairThreads, Slices, at_once
from shared.text.chat_template import ChatTemplate
from shared.text.rendering import APART_LEN, MEMORY_MAX, Renderer
from shared.wire.errors import ApiError, InvalidRequest, Overloaded
from tests.fakes import VirtualClock

SPLITTING = (
    "{{ bos_token }}{{ strftime_now('%Y') }}"
    "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}\n{% endfor %}"
)
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"
GREEDY = (
    "{% set ns = namespace(x='x' * 10000000) %}"
    "{% for i in range(9) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
)


def long_chat(text: str = "", count: int = APART_LEN) -> ChatPrompt:
    return ChatPrompt(
        [ChatMessage("user", f"{text}é"), ChatMessage("assistant", "ab</think>" * (count // 10 + 1))]
    )


@pytest.fixture
def renderer() -> Iterator[Renderer]:
    made = Renderer()
    yield made
    made.close()


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"}, VirtualClock(wall=1e9))


def test_a_long_chat_has_the_text_that_it_has_in_place(renderer: Renderer) -> None:
    ours, chat = template(SPLITTING), long_chat()
    assert at_once(ours.slices(chat, renderer)) == ours.render(chat) == "<s>2001user: é\nassistant: \n"
    first = renderer.pid
    assert first not in (None, os.getpid())
    assert at_once(ours.slices(long_chat("\U0001f600"), renderer)).startswith("<s>2001user: \U0001f600é")
    assert renderer.pid == first, "it stays"


def test_a_short_chat_needs_no_process(renderer: Renderer) -> None:
    chat = ChatPrompt([ChatMessage("user", "a" * APART_LEN)])
    assert at_once(template(SPLITTING).slices(chat, renderer)).endswith("a\n")
    assert renderer.pid is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages.x.y }}", "cannot render these messages"),
        (GREEDY, "too long for the model's chat template"),
    ],
)
def test_a_long_chat_that_is_refused(renderer: Renderer, source: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        at_once(template(source).slices(long_chat("secret"), renderer))
    assert caught.value.param == "messages"
    assert "secret" not in caught.value.message + str(caught.value.detail)
    assert at_once(template(SPLITTING).slices(long_chat(), renderer)), "the next one is served"


def test_the_process_never_has_more_memory_than_is_stated(renderer: Renderer) -> None:
    with pytest.raises(InvalidRequest):
        at_once(template(GREEDY).slices(long_chat(), renderer))
    status = Path(f"/proc/{renderer.pid}/status").read_text()
    peak_kib = int(status.split("VmPeak:")[1].split()[0])
    assert peak_kib * 1024 <= MEMORY_MAX


def until_it_waits(slices: Slices[str]) -> None:
    """Begin a job, whose first slice ends when it waits for the answer."""
    next(slices)


def test_a_template_that_never_ends_has_its_time() -> None:
    clock = VirtualClock()
    renderer = Renderer(clock=clock)
    job = template(ENDLESS).slices(long_chat(), renderer)
    until_it_waits(job)
    killed = renderer.pid
    clock.advance(10)
    with pytest.raises(InvalidRequest, match="too long for the model's chat template") as caught:
        at_once(job)
    assert caught.value.detail == "it takes too long"
    assert killed is not None
    assert renderer.pid is None
    renderer.close()
    assert not Path(f"/proc/{killed}").exists()


def test_who_leaves_leaves_nothing(renderer: Renderer) -> None:
    job = template(ENDLESS).slices(long_chat(), renderer)
    until_it_waits(job)
    killed = renderer.pid
    job.close()
    assert at_once(template(SPLITTING).slices(long_chat(), renderer))
    renderer.close()
    assert not Path(f"/proc/{killed}").exists()


def test_a_process_that_died_is_started_again(renderer: Renderer) -> None:
    ours = template(SPLITTING)
    at_once(ours.slices(long_chat(), renderer))
    assert renderer.pid is not None
    os.kill(renderer.pid, 9)
    os.waitid(os.P_PID, renderer.pid, os.WEXITED | os.WNOWAIT)
    assert at_once(ours.slices(long_chat(), renderer))


def test_a_process_that_cannot_be_started_is_said() -> None:
    with pytest.raises(Overloaded):
        at_once(template(SPLITTING).slices(long_chat(), Renderer(argv=("/nowhere",))))


def test_a_process_that_ends_at_once_is_said() -> None:
    renderer = Renderer(argv=("/bin/false",))
    with pytest.raises(ApiError, match="too long for the model's chat template"):
        at_once(template(SPLITTING).slices(long_chat(), renderer))
    renderer.close()


async def test_others_go_on_beside_a_template_that_never_ends(renderer: Renderer) -> None:
    """One thread for all of them: the job that waits gives it back."""
    threads = FairThreads(1)
    endless = asyncio.create_task(threads.run("acme", template(ENDLESS).slices(long_chat(), renderer)))
    waits = asyncio.create_task(threads.run("acme", template(SPLITTING).slices(long_chat(), renderer)))
    for _ in range(3):
        assert await threads.call("other", lambda: "served") == "served"
    assert not endless.done()
    assert not waits.done(), "one chat at a time"
    endless.cancel()
    assert (await waits).endswith("assistant: \n")
    threads.close()


def test_the_process_knows_nothing_of_our_environment(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SECRET", "canary")
    at_once(template(SPLITTING).slices(long_chat(), renderer))
    assert b"canary" not in Path(f"/proc/{renderer.pid}/environ").read_bytes()
