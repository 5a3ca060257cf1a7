"""The command `penstock chat`: a conversation in the terminal, with any OpenAI-compatible server.

Ctrl-C stops an answer: the connection is closed, so that the server stops computing it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import ssl
import sys
from collections.abc import Generator, Iterator
from functools import partial
from typing import Final

import httpx
import msgspec

from shared.apis.models import ModelList
from shared.cli import terminal
from shared.cli.admin import url_problem
from shared.cli.running import KEY_VARIABLE, read_running
from shared.cli.terminal import UnusableInput, harmless
from shared.process import tls
from shared.process.arguments import Parser, checked
from shared.wire import sse
from shared.wire.envelope import ErrorEnvelope
from shared.wire.undecodable import UNDECODABLE

COMMANDS: Final = "/new begins a new conversation; /quit, /exit or Ctrl-D leaves; /help says this."
DEFAULT_URL: Final = "http://127.0.0.1:8000/v1"
CONNECT_TIMEOUT_S: Final = 5.0
READ_TIMEOUT_S: Final = 600.0


class ChatFailed(Exception):
    """The server refused, or could not be reached. The message is for the user."""


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Chunk(msgspec.Struct):
    """The parts of a chunk that are shown. Looser than our own chunks, because other servers send others."""

    choices: list[_Choice] = []


class Turn(msgspec.Struct):
    role: str
    content: str


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description=f"Talk to a model. Ctrl-C stops an answer. {COMMANDS}",
        epilog="Without options it finds the `penstock up` that runs on this machine.",
    )
    add_server(parser)
    parser.add_argument(
        "-m",
        "--message",
        metavar="TEXT",
        type=checked(terminal.text_problem),
        help="say this one thing, print the answer, leave",
    )
    parser.set_defaults(run=run)


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which server is meant, and which model of it."""
    parser.add_argument(
        "--url",
        type=checked(partial(url_problem, like="http://host:8000/v1")),
        help=f"base URL of an OpenAI-compatible server (default: of penstock up, or {DEFAULT_URL})",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        type=checked(terminal.text_problem),
        help="model to ask (default: the first that the server has)",
    )
    parser.add_argument(
        "--key",
        type=checked(_key_problem, is_secret=True),
        default=os.environ.get(KEY_VARIABLE) or None,
        help=f"API key (default: ${KEY_VARIABLE}, or that of penstock up)",
    )


def _key_problem(key: str) -> str | None:
    """Why a key cannot be sent; None when it can. Looser than for a key of ours: another server's may be
    longer."""
    return None if key.isascii() and key.isprintable() else "must be printable ASCII"


def run(options: argparse.Namespace) -> int:
    terminal.prepare()
    try:
        server = server_of(options.url, options.key)
        with client_of(server) as client:
            conversation = Conversation(client, options.model or server.model or first_model(client))
            if options.message is not None:
                show(conversation.say(options.message))
            else:
                converse(conversation)
    except (ChatFailed, UnusableInput) as error:
        sys.stderr.write(f"penstock chat: {harmless(str(error))}\n")
        return 1
    return 0


class Server(msgspec.Struct, frozen=True):
    """A server to talk to."""

    url: str
    """Its base URL."""
    key: str | None
    model: str | None
    """The model of the `penstock up` that runs there; None for any other server."""
    verify: ssl.SSLContext | bool = True


def server_of(asked: str | None, key: str | None) -> Server:
    """The server at the URL that was asked for, or the `penstock up` that runs on this machine. The key of
    `penstock up` goes to no other server. Raises ChatFailed."""
    url = DEFAULT_URL if asked is None else asked.rstrip("/")
    running = read_running(None if asked is None else url)
    if running is None:
        return Server(url, key, None)
    verify = True if running.cert is None else _pinned(running.cert)
    return Server(running.url, key or running.key, running.model, verify)


def client_of(server: Server) -> httpx.Client:
    """An HTTP client of a server."""
    is_own = server.model is not None or server.url == DEFAULT_URL
    return httpx.Client(
        base_url=server.url,
        headers={"authorization": f"Bearer {server.key}"} if server.key else {},
        timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        trust_env=not is_own,  # no proxy stands before this machine's own services
        verify=server.verify,
    )


def _pinned(cert: str) -> ssl.SSLContext:
    try:
        return tls.pinned_context(cert)
    except tls.UnusableTls as error:
        raise ChatFailed(f"{error}; that is the certificate with which `penstock up` was started") from None


def converse(conversation: Conversation) -> None:
    """Read messages and show the answers, until the end of input."""
    interactive = sys.stdin is not None and sys.stdin.isatty()
    if interactive:
        print(f"Talking to {harmless(conversation.model)}. Ctrl-C stops an answer. {COMMANDS}")
    while True:
        try:
            match terminal.read_message():
                case None | "/quit" | "/exit":
                    return
                case "/help":
                    print(COMMANDS)
                case "/new":
                    conversation.turns.clear()
                case text:
                    show(conversation.say(text))
        except (ChatFailed, UnusableInput) as error:
            if not interactive:
                raise
            print(f"({harmless(str(error))})")


def show(parts: Generator[str]) -> None:
    """Print the parts of an answer as they come, and end the line. Ctrl-C stops the answer."""
    end = "\n"
    try:
        for part in parts:
            terminal.show(part)
    except KeyboardInterrupt:
        parts.close()  # closes the connection
        end = " (stopped)\n"
    except ChatFailed:
        terminal.show("\n")
        raise
    terminal.show(end)


class Conversation:
    """The turns so far. An answer that fails is removed with its question; one that is stopped stays."""

    def __init__(self, client: httpx.Client, model: str) -> None:
        self._client = client
        self.model = model
        self.turns: list[Turn] = []

    def say(self, text: str) -> Generator[str]:
        """Ask `text`, and yield the answer part by part. Raises ChatFailed."""
        self.turns.append(Turn("user", text))
        answer: list[str] = []
        try:
            for part in self._stream():
                answer.append(part)
                yield part
        except ChatFailed:
            self.turns.pop()
            raise
        except (GeneratorExit, KeyboardInterrupt):
            self._keep(answer)
            raise
        self._keep(answer)

    def _keep(self, answer: list[str]) -> None:
        if answer:
            self.turns.append(Turn("assistant", "".join(answer)))
        else:
            self.turns.pop()

    def _stream(self) -> Iterator[str]:
        body = {"model": self.model, "stream": True, "messages": self.turns}
        headers = {"content-type": "application/json"}
        content = msgspec.json.encode(body)
        with (
            _failures(),
            self._client.stream("POST", "chat/completions", content=content, headers=headers) as answer,
        ):
            if answer.status_code != 200:
                raise _refusal(answer)
            yield from _parts(answer)


def first_model(client: httpx.Client) -> str:
    """The first model that the server names. Raises ChatFailed."""
    with _failures(), client.stream("GET", "models") as answer:
        if answer.status_code != 200:
            raise _refusal(answer)
        try:
            models = msgspec.json.decode(answer.read(), type=ModelList).data
        except UNDECODABLE:
            models = []
    if not models:
        raise ChatFailed(f"{client.base_url} names no model; choose one with --model{_url_advice(answer)}")
    return models[0].id


def _parts(answer: httpx.Response) -> Iterator[str]:
    try:
        for line in sse.lines(answer.iter_bytes()):
            name, _, data = line.partition(b":")
            if name != b"data":
                continue
            if data.strip() == b"[DONE]":
                return
            chunk = msgspec.json.decode(data, type=_Chunk)
            if not chunk.choices:
                _raise_error_event(data)
            yield from (choice.delta.content for choice in chunk.choices if choice.delta.content)
    except ValueError:  # msgspec's errors are ValueErrors
        raise ChatFailed("the server sent an event that is no chunk of a chat") from None
    raise ChatFailed("the answer was cut off")


def _raise_error_event(data: bytes) -> None:
    with contextlib.suppress(*UNDECODABLE):
        raise ChatFailed(msgspec.json.decode(data, type=ErrorEnvelope).error.message)


def _refusal(answer: httpx.Response) -> ChatFailed:
    try:
        message = msgspec.json.decode(answer.read(), type=ErrorEnvelope).error.message
    except UNDECODABLE:
        message = f"the server answered {answer.status_code}"
    request_id = answer.headers.get("x-request-id")
    text = f"{message} ({answer.status_code}, request {request_id})" if request_id else message
    return ChatFailed(text + _key_advice(answer) + _url_advice(answer))


def _key_advice(answer: httpx.Response) -> str:
    """Where a key is given, when none was and the server asks for one; else empty."""
    if answer.status_code != httpx.codes.UNAUTHORIZED or "authorization" in answer.request.headers:
        return ""
    return f"; give one by --key or ${KEY_VARIABLE}"


def _url_advice(answer: httpx.Response) -> str:
    """A hint about the base URL when it has no path, as few servers' have none; else empty."""
    url = answer.request.url
    if url.path not in ("/models", "/chat/completions"):
        return ""
    return f"; the base URL of most servers ends with /v1: {url.copy_with(raw_path=b'/v1')}"


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Translate the transport's errors to ChatFailed, in words."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise ChatFailed(_no_connection(error)) from None
    except httpx.RequestError as error:
        raise ChatFailed(f"the connection failed: {error}") from None


def _no_connection(error: httpx.ConnectError | httpx.ConnectTimeout) -> str:
    url = error.request.url.copy_with(raw_path=b"/")
    match _tls_failure(error):
        case None:
            return f"nothing answers at {error.request.url}; is `penstock up` running?"
        case ssl.SSLCertVerificationError() as failure:
            return (
                f"the certificate of {url} is not trusted: {failure.verify_message}. If a private authority "
                "signed it, set SSL_CERT_FILE to the authority's certificate, and use a name that it is for"
            )
        case failure:
            return f"{url} does not speak TLS as it should ({failure.reason}); is it http:// perhaps?"


def _tls_failure(error: BaseException | None) -> ssl.SSLError | None:
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error
