"""`penstock chat`: a conversation in the terminal, with any OpenAI-compatible server.

Ctrl-C stops an answer (the connection is closed, so that the server stops computing it), Ctrl-D
leaves, `/new` begins a new conversation.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Generator, Iterator
from typing import Final

import httpx
import msgspec

from shared.arguments import Parser, checked
from shared.cli.settings import KEY_VARIABLE, read_running
from shared.openai import ErrorEnvelope, ModelList

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
    """What of a chunk is shown. Looser than our own chunks, because other servers send others."""

    choices: list[_Choice] = []


class Turn(msgspec.Struct):
    role: str
    content: str


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talk to a model. Ctrl-C stops an answer, Ctrl-D leaves, /new begins anew.",
        epilog="Without options it finds the `penstock up` that runs on this machine.",
    )
    parser.add_argument(
        "--url",
        type=checked(_url_problem),
        help=f"base URL of an OpenAI-compatible server (default: of penstock up, or {DEFAULT_URL})",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="model to talk to (default: the first that the server has)"
    )
    parser.add_argument("--key", help=f"API key (default: ${KEY_VARIABLE}, or that of penstock up)")
    parser.add_argument("-m", "--message", metavar="TEXT", help="say this one thing, print the answer, leave")
    parser.set_defaults(run=run)


def _url_problem(url: str) -> str | None:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return "must be a URL like http://host:8000/v1"
    fits = parsed.scheme in ("http", "https") and parsed.host
    return None if fits else "must be a URL like http://host:8000/v1"


def run(options: argparse.Namespace) -> int:
    running = read_running()
    url, key, model = options.url, options.key or os.environ.get(KEY_VARIABLE), options.model
    if running is not None and url in (None, running.url):
        url, key, model = running.url, key or running.key, model or running.model
    client = httpx.Client(
        base_url=url or DEFAULT_URL,
        headers={"authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        trust_env=options.url is not None,  # no proxy stands between us and our own machine
    )
    try:
        with client:
            conversation = Conversation(client, model or first_model(client))
            if options.message is not None:
                show(conversation.say(options.message))
            else:
                converse(conversation)
    except ChatFailed as error:
        sys.stderr.write(f"penstock chat: {error}\n")
        return 1
    return 0


def converse(conversation: Conversation) -> None:
    """Read, answer, until the end of input."""
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives `input` its line editing

        print(f"Talking to {conversation.model}. Ctrl-C stops an answer, Ctrl-D leaves, /new begins anew.")
    while True:
        try:
            text = input("\n> " if interactive else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            continue
        if text == "/new":
            conversation.turns.clear()
        elif text:
            try:
                show(conversation.say(text))
            except ChatFailed as error:
                if not interactive:
                    raise
                print(f"({error})")


def show(parts: Generator[str]) -> None:
    """Print the parts as they come, and end the line. Ctrl-C ends them."""
    end = "\n"
    try:
        for part in parts:
            sys.stdout.write(part)
            sys.stdout.flush()
    except KeyboardInterrupt:
        parts.close()  # which closes the connection
        end = " (stopped)\n"
    except ChatFailed:
        sys.stdout.write("\n")
        raise
    sys.stdout.write(end)


class Conversation:
    """The turns so far. An answer that fails takes its question with it; one that is stopped stays."""

    def __init__(self, client: httpx.Client, model: str) -> None:
        self._client = client
        self.model = model
        self.turns: list[Turn] = []

    def say(self, text: str) -> Generator[str]:
        """The answer, part by part. Raises ChatFailed."""
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
    with _failures(), client.stream("GET", "models") as answer:
        if answer.status_code != 200:
            raise _refusal(answer)
        try:
            models = msgspec.json.decode(answer.read(), type=ModelList).data
        except (msgspec.DecodeError, UnicodeDecodeError):
            models = []
    if not models:
        raise ChatFailed(f"{client.base_url} names no model; choose one with --model")
    return models[0].id


def _parts(answer: httpx.Response) -> Iterator[str]:
    for line in answer.iter_lines():
        name, _, data = line.partition(":")
        if name != "data":
            continue
        data = data.strip()
        if data == "[DONE]":
            return
        try:
            chunk = msgspec.json.decode(data, type=_Chunk)
        except (msgspec.DecodeError, UnicodeEncodeError):
            raise ChatFailed("the server sent an event that is no chunk of a chat") from None
        if not chunk.choices:
            _raise_error_event(data)
        yield from (choice.delta.content for choice in chunk.choices if choice.delta.content)
    raise ChatFailed("the answer was cut off")


def _raise_error_event(data: str) -> None:
    with contextlib.suppress(msgspec.DecodeError):
        raise ChatFailed(msgspec.json.decode(data, type=ErrorEnvelope).error.message)


def _refusal(answer: httpx.Response) -> ChatFailed:
    try:
        message = msgspec.json.decode(answer.read(), type=ErrorEnvelope).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = f"the server answered {answer.status_code}"
    request_id = answer.headers.get("x-request-id")
    return ChatFailed(f"{message} ({answer.status_code}, request {request_id})" if request_id else message)


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """What the transport raises, in words."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise ChatFailed(f"nothing answers at {error.request.url}; is `penstock up` running?") from None
    except httpx.TransportError as error:
        raise ChatFailed(f"the connection failed: {error}") from None
