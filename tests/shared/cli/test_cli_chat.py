from __future__ import annotations

import io
import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from shared import cli
from shared.cli import chat, running, terminal
from shared.cli.chat import ChatFailed, Conversation
from shared.cli.running import Running
from shared.wire import sse
from shared.wire.envelope import error_envelope
from shared.wire.errors import EngineFailed, Unauthenticated


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
            "No. (401, request r1); give one by --key or $PENSTOCK_API_KEY",
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


def test_line_ends_that_are_none_in_an_event_stream_stay_in_the_answer() -> None:
    """`str.splitlines` ends a line at these, and JSON lets them stand as they are."""
    separators = "a\u2028b\u2029c\x85d"
    raw = json.dumps({"choices": [{"delta": {"content": separators}}]}, ensure_ascii=False).encode()
    assert list(Server(sse.event(raw) + sse.DONE).conversation().say("Hi")) == [separators]


def test_events_may_end_in_crlf() -> None:
    assert list(Server(ANSWER.replace(b"\n", b"\r\n")).conversation().say("Hi")) == ["Hel", "lo."]


def test_an_event_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "LINE_LEN_MAX", 100)
    with pytest.raises(ChatFailed, match="no chunk of a chat"):
        list(Server(b"data: " + b"x" * 101).conversation().say("Hi"))


def test_control_characters_of_a_model_do_nothing_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    said = "\x1b]0;title\x07\x1b[2Ja\tb\r\nc\rd\x7f\x9b31m é水\U0001f600\u202e\u2066\u2028\u2029\u200f"
    chat.show(Server(chunk(said) + sse.DONE).conversation().say("Hi"))
    shown = capsys.readouterr().out
    assert shown == "␛]0;title␇␛[2Ja\tb\nc␍d␡\ufffd31m é水\U0001f600\ufffd\ufffd\ufffd\ufffd\u200f\n"


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
        if self.path == "/v1/models":
            self._answer(MODELS)
        else:
            self._answer(error_envelope(Unauthenticated("No \x1b[31mkey.")), 401)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked.append((self.headers["authorization"], body["model"], body["messages"][-1]["content"]))
        self._answer(ANSWER)

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


asked: list[tuple[str | None, str, str]] = []


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(running.KEY_VARIABLE, raising=False)
    asked.clear()
    with serving() as port:
        yield f"http://127.0.0.1:{port}/v1"


@contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """`Handler` on a port of this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join(30)


def test_one_message_to_any_server(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--url", url, "--key", "k", "-m", "Hi"]) == 0
    assert capsys.readouterr().out == "Hello.\n"
    assert asked == [("Bearer k", "first", "Hi")]


def test_a_running_up_is_found(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    running.write_running(Running(url=url, key="dev", model="demo", pid=os.getpid()))
    assert cli.main(["chat", "-m", "Hi"]) == 0
    monkeypatch.setenv(running.KEY_VARIABLE, "env")
    assert cli.main(["chat", "-m", "Hi", "--model", "other"]) == 0
    assert asked == [("Bearer dev", "demo", "Hi"), ("Bearer env", "other", "Hi")]


def test_another_server_is_not_given_the_key_of_up(url: str) -> None:
    running.write_running(Running(url="http://127.0.0.1:1/v1", key="dev", model="demo", pid=os.getpid()))
    assert cli.main(["chat", "-m", "Hi", "--url", url]) == 0
    assert asked == [(None, "first", "Hi")]


@pytest.mark.parametrize("ending", ["/", ""])
def test_the_up_beside_it_is_known_by_its_url_however_that_is_written(url: str, ending: str) -> None:
    running.write_running(Running(url=url, key="dev", model="demo", pid=os.getpid()))
    assert cli.main(["chat", "--url", url.removesuffix("/v1") + ending, "-m", "Hi"]) == 0
    assert cli.main(["chat", "--url", url + ending, "-m", "Hi"]) == 0
    assert asked == [("Bearer dev", "demo", "Hi")] * 2


def test_a_url_without_a_path_is_advised_to_have_one(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--url", url.removesuffix("/v1"), "-m", "Hi"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("penstock chat: No ␛[31mkey.; give one by --key")
    assert told.endswith(f"; the base URL of most servers ends with /v1: {url}\n")


def test_a_conversation_ends_with_its_input(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\nMore\n/new\nAnew\n /help \n/etc/hosts?"))
    assert cli.main(["chat", "--url", url]) == 0
    assert [message for _, _, message in asked] == ["Hi", "More", "Anew", "/etc/hosts?"]
    assert capsys.readouterr().out == "Hello.\n" * 3 + f"{chat.COMMANDS}\nHello.\n"


@pytest.mark.parametrize("word", ["/quit", "/exit"])
def test_quit_and_exit_end_the_conversation(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{word}\nHi\n"))
    assert cli.main(["chat", "--url", url]) == 0
    assert (asked, capsys.readouterr().out) == ([], "")


class Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_ctrl_d_leaves_a_line_of_its_own_to_the_shell(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed: Iterator[str | type[BaseException]] = iter(
        ["Hi", KeyboardInterrupt, "caf\udce9", "More", EOFError]
    )

    def read(prompt: str) -> str:
        sys.stdout.write(prompt)
        pressed = next(typed)
        if isinstance(pressed, str):
            return pressed
        raise pressed

    monkeypatch.setattr("sys.stdin", Keyboard())
    monkeypatch.setattr("builtins.input", read)
    assert cli.main(["chat", "--url", url]) == 0
    assert [message for _, _, message in asked] == ["Hi", "More"]
    shown = capsys.readouterr().out
    assert shown.startswith("Talking to first. Ctrl-C stops an answer. /new begins")
    assert "\n> (a message must be text in the terminal's encoding)\n" in shown
    assert shown.endswith("\n> Hello.\n\n> \n")


def read_from(data: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")


@pytest.mark.parametrize(
    ("stdin", "says"),
    [
        (read_from(b"caf\xe9\n"), "a message must be text in the terminal's encoding"),
        (read_from(b"x" * 101), "a message must have at most 100 characters"),
        (None, "standard input is closed; say something with -m"),
    ],
)
def test_input_that_cannot_be_sent_is_said_to_be(
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stdin: io.TextIOWrapper | None,
    says: str,
) -> None:
    monkeypatch.setattr(terminal, "MESSAGE_LEN_MAX", 100)
    monkeypatch.setattr("sys.stdin", stdin)
    assert cli.main(["chat", "--url", url]) == 1
    assert capsys.readouterr().err == f"penstock chat: {says}\n"
    assert asked == []


def test_an_output_that_cannot_be_written_is_said_to_be(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert cli.main(["chat", "--url", url, "-m", "Hi"]) == 1
        monkeypatch.undo()
    assert capsys.readouterr().err == "penstock: No space left on device\n"


@pytest.mark.usefixtures("url")
def test_a_closed_output_is_said_to_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as closed:
        closed.setattr("sys.stdout", None)
        assert cli.main(["chat", "-m", "Hi"]) == 1
        closed.setattr("sys.stderr", None)
        assert cli.main(["chat", "-m", "Hi"]) == 1
        sys.stderr.close()
    assert capsys.readouterr().err == "penstock: standard output is closed\n"


def test_what_a_terminal_cannot_show_is_replaced(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    with monkeypatch.context() as narrow:
        narrow.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii"))
        terminal.prepare()
        chat.show(Server(chunk("水é") + sse.DONE).conversation().say("Hi"))
        assert shown.getvalue() == b"??\n"


# -- TLS ------------------------------------------------------------------------------------------


@pytest.fixture
def https(url: str, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server with a certificate of a private authority, for another name than it is reached by. Its base
    URL, and where the certificates are."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = authority.issue_cert("penstock.test")
    issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "own.pem")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    issued.configure_cert(context)
    with serving(context) as port:
        yield f"https://127.0.0.1:{port}/v1", tmp_path


def test_the_up_beside_it_is_trusted_by_its_own_certificate(https: tuple[str, Path]) -> None:
    url, files = https
    cert = str(files / "own.pem")
    running.write_running(Running(url=url, key="dev", model="demo", pid=os.getpid(), cert=cert))
    assert cli.main(["chat", "-m", "Hi"]) == 0
    assert cli.main(["chat", "-m", "Hi", "--url", url]) == 0
    assert asked == [("Bearer dev", "demo", "Hi")] * 2


def test_another_certificate_than_that_of_up_is_not_trusted(
    https: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    url, files = https
    trustme.CA().issue_cert("penstock.test").cert_chain_pems[0].write_to_path(files / "other.pem")
    cert = str(files / "other.pem")
    running.write_running(Running(url=url, key="dev", model="demo", pid=os.getpid(), cert=cert))
    assert cli.main(["chat", "-m", "Hi"]) == 1
    assert "is not trusted" in capsys.readouterr().err
    (files / "other.pem").unlink()
    assert cli.main(["chat", "-m", "Hi"]) == 1
    assert f"cannot use {cert}: " in capsys.readouterr().err
    assert asked == []


def test_a_private_authority_is_told_how_to_be_trusted(
    https: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, files = https
    assert cli.main(["chat", "-m", "Hi", "--url", url]) == 1
    told = capsys.readouterr().err
    assert f"the certificate of {url.removesuffix('v1')} is not trusted: unable to get" in told
    assert "set SSL_CERT_FILE to the authority's certificate" in told
    monkeypatch.setenv("SSL_CERT_FILE", str(files / "ca.pem"))
    assert cli.main(["chat", "-m", "Hi", "--url", url]) == 1
    assert "certificate is not valid for '127.0.0.1'" in capsys.readouterr().err
    assert asked == []


def test_tls_where_there_is_none_is_said_to_be(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "-m", "Hi", "--url", url.replace("http:", "https:")]) == 1
    assert "is it http:// perhaps?" in capsys.readouterr().err


@pytest.mark.usefixtures("url")
def test_an_unreachable_server_is_reported_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--url", "http://127.0.0.1:1/v1", "-m", "Hi"]) == 1
    assert "nothing answers at http://127.0.0.1:1/v1" in capsys.readouterr().err


def test_a_closed_pipe_is_no_crash(url: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, "-m", "shared.cli", "chat", "--url", url, "-m", "Hi"]
    done = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
