from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared import cli, sse
from shared.cli import chat, settings
from shared.cli.chat import ChatFailed, Conversation
from shared.cli.settings import Running
from shared.errors import EngineFailed, Unauthenticated
from shared.openai import error_envelope


def chunk(text: str | None) -> bytes:
    return sse.event(json.dumps({"id": "x", "choices": [{"index": 0, "delta": {"content": text}}]}).encode())


USAGE = sse.event(b'{"id":"x","choices":[],"usage":{"total_tokens":3}}')
ANSWER = chunk("") + chunk(None) + chunk("Hel") + b": ping\n\n" + chunk("lo.") + USAGE + sse.DONE
MODELS = json.dumps({"object": "list", "data": [{"id": "first", "created": 1, "object": "model"}]}).encode()


class Server:
    """Answers each chat with the next of `answers`; remembers what it was asked."""

    def __init__(self, *answers: bytes | httpx.Response) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(json.loads(request.content))
        answer = self.answers.pop(0)
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, content=answer)

    def conversation(self) -> Conversation:
        return Conversation(httpx.Client(transport=httpx.MockTransport(self), base_url="http://test/v1"), "m")


def test_an_answer_comes_in_parts_and_is_remembered() -> None:
    server = Server(ANSWER, ANSWER)
    conversation = server.conversation()
    assert list(conversation.say("Hi")) == ["Hel", "lo."]
    assert list(conversation.say("Again")) == ["Hel", "lo."]
    assert server.asked[0] == {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
    assert [turn["content"] for turn in server.asked[1]["messages"]] == ["Hi", "Hello.", "Again"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (chunk("x") + sse.error_event(EngineFailed("The engine failed.")), "The engine failed."),
        (chunk("x"), "the answer was cut off"),
        (b"data: nonsense\n\n", "no chunk of a chat"),
        (httpx.Response(502, content=b"<html>"), "the server answered 502"),
        (
            httpx.Response(
                401, content=error_envelope(Unauthenticated("No.")), headers={"x-request-id": "r1"}
            ),
            "No. (401, request r1)",
        ),
    ],
)
def test_an_answer_that_fails_takes_its_question_with_it(
    answer: bytes | httpx.Response, message: str
) -> None:
    conversation = Server(answer).conversation()
    with pytest.raises(ChatFailed) as caught:
        list(conversation.say("Hi"))
    assert message in str(caught.value)
    assert conversation.turns == []


class Interrupted(httpx.SyncByteStream):
    """Ctrl-C arrives while the second part is awaited."""

    closed = False

    def __iter__(self) -> Iterator[bytes]:
        yield chunk("Hel")
        raise KeyboardInterrupt

    def close(self) -> None:
        self.closed = True


def test_ctrl_c_stops_the_answer_and_keeps_what_came(capsys: pytest.CaptureFixture[str]) -> None:
    stream = Interrupted()
    conversation = Server(httpx.Response(200, stream=stream)).conversation()
    chat.show(conversation.say("Hi"))
    assert capsys.readouterr().out == "Hel (stopped)\n"
    assert [turn.content for turn in conversation.turns] == ["Hi", "Hel"]
    assert stream.closed


def test_ctrl_c_between_two_parts_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def write(self, text: str) -> int:
            if text == "Hel":
                raise KeyboardInterrupt
            return super().write(text)

    stream = Interrupted()
    conversation = Server(httpx.Response(200, stream=stream)).conversation()
    monkeypatch.setattr("sys.stdout", Terminal())
    chat.show(conversation.say("Hi"))
    assert stream.closed


# -- the command, against a socket ----------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(MODELS)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked.append((self.headers["authorization"], body["model"], body["messages"][-1]["content"]))
        self._answer(ANSWER)

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


asked: list[tuple[str | None, str, str]] = []


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(settings.KEY_VARIABLE, raising=False)
    asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join(30)


def test_one_message_to_any_server(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--url", url, "--key", "k", "-m", "Hi"]) == 0
    assert capsys.readouterr().out == "Hello.\n"
    assert asked == [("Bearer k", "first", "Hi")]


def test_the_up_beside_it_is_found(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.write_running(Running(url=url, key="dev", model="demo", pid=os.getpid()))
    assert cli.main(["chat", "-m", "Hi"]) == 0
    monkeypatch.setenv(settings.KEY_VARIABLE, "env")
    assert cli.main(["chat", "-m", "Hi", "--model", "other"]) == 0
    assert asked == [("Bearer dev", "demo", "Hi"), ("Bearer env", "other", "Hi")]


def test_another_server_is_not_given_the_key_of_up(url: str) -> None:
    settings.write_running(Running(url="http://127.0.0.1:1/v1", key="dev", model="demo", pid=os.getpid()))
    assert cli.main(["chat", "-m", "Hi", "--url", url]) == 0
    assert asked == [(None, "first", "Hi")]


def test_a_conversation_ends_with_its_input(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\nMore\n/new\nAnew\n"))
    assert cli.main(["chat", "--url", url]) == 0
    assert [message for _, _, message in asked] == ["Hi", "More", "Anew"]
    assert capsys.readouterr().out == "Hello.\n" * 3


@pytest.mark.usefixtures("url")
def test_nobody_there_is_said_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--url", "http://127.0.0.1:1/v1", "-m", "Hi"]) == 1
    assert "nothing answers at http://127.0.0.1:1/v1" in capsys.readouterr().err


def test_a_reader_who_leaves_is_no_crash(url: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, "-m", "shared.cli", "chat", "--url", url, "-m", "Hi"]
    done = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
