"""What a stranger does: `penstock up`, then curl, the OpenAI SDK, `penstock chat`; and what an operator
does: join the logs of both services by the request id.

One pair of services on the demo model serves the whole module. Waits are for conditions, and bounded.
"""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
import trustme

from tests.effort import IS_WHOLE, drawn
from tests.engine.demo.questions import ACCURACY_MIN, QUESTIONS, Question
from tests.line_check import schema_problem
from tests.services import PATIENCE_S, engine_at_rest, gauges, until

pytestmark = pytest.mark.slow

PENSTOCK = Path(sys.executable).with_name("penstock")
KEY = "My API Key"
"""Any string will do, also one with spaces."""
MODEL = "demo"
ALIAS = "gpt-5.4"


@dataclass
class Up:
    """`penstock up`, running."""

    process: subprocess.Popen[str]
    run_dir: Path
    cache_dir: Path
    printed: str

    @property
    def url(self) -> str:
        found = re.search(r"Base URL\s+(\S+)", self.printed)
        assert found is not None
        return found[1]

    @property
    def engine_url(self) -> str:
        found = re.search(r'replicas = \["([^"]+)"\]', (self.run_dir / "gateway.toml").read_text())
        assert found is not None
        return found[1]

    def end(self) -> str:
        """Wait until it has ended; what it printed since its start."""
        printed, _ = self.process.communicate(timeout=PATIENCE_S)
        return printed

    def indented(self, start: str) -> str:
        """The indented block that begins with `start`, as a reader would copy it."""
        block = self.printed[self.printed.index(f"  {start}") :].split("\n\n")[0]
        return "\n".join(line.removeprefix("  ") for line in block.splitlines())

    def environment(self) -> dict[str, str]:
        return {**os.environ, "XDG_CACHE_HOME": str(self.cache_dir), "NO_PROXY": "*"}

    def completed(self, service: str, request_id: str) -> dict[str, Any]:
        """The one completed line of a request, once it is written."""

        def lines() -> list[dict[str, Any]]:
            text = (self.run_dir / f"{service}.log").read_text()
            parsed = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
            return [
                line
                for line in parsed
                if line.get("event") == "request.completed" and line.get("request_id") == request_id
            ]

        until(lambda: bool(lines()))
        [line] = lines()
        assert schema_problem(line) is None
        return line


def start(directory: Path, *options: str) -> Up:
    run_dir, cache_dir = directory / "run", directory / "cache"
    up = Up(None, run_dir, cache_dir, "")  # type: ignore[arg-type]
    argv = [str(PENSTOCK), "up", "--port", "0", "--api-key", KEY, "--data-dir", str(run_dir), *options]
    up.process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=up.environment()
    )
    assert up.process.stdout is not None
    for line in up.process.stdout:
        up.printed += line
        if line.startswith("In another terminal"):
            return up
    raise AssertionError(up.printed)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running = start(tmp_path_factory.mktemp("up"), "--alias", ALIAS)
    yield running
    running.process.send_signal(signal.SIGINT)
    running.end()
    assert running.process.returncode == 0


@pytest.fixture
def client(up: Up) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=up.url, api_key=KEY, max_retries=0, timeout=PATIENCE_S, _strict_response_validation=True
    ) as sdk:
        yield sdk


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


# -- the first minute -----------------------------------------------------------------------------


def test_the_printed_curl_line_streams_a_readable_answer(up: Up) -> None:
    done = subprocess.run(
        ["bash", "-c", up.indented("curl")], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.endswith("data: [DONE]\n\n"), "the closing comment is for the gateway alone"
    chunks = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("data: {")]
    answer = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert len(chunks) > 5
    assert "penstock" in answer.lower()
    assert answer.endswith(".")


def test_the_printed_sdk_snippet_runs(up: Up) -> None:
    snippet = up.indented("from openai")
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "penstock" in done.stdout.lower()


def test_chat_in_the_terminal_needs_no_options_beside_up(up: Up) -> None:
    argv = [str(PENSTOCK), "chat", "-m", "What is the capital of France?"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, env=up.environment())
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_no_prompt_text_and_no_key_in_any_log(up: Up, client: openai.OpenAI) -> None:
    client.chat.completions.create(model=MODEL, messages=ask("canary-7391 wants to know"), max_tokens=5)
    client.completions.create(model=MODEL, prompt="canary-7391 again", max_tokens=5)
    for log in up.run_dir.glob("*.log"):
        text = log.read_text()
        assert "canary-7391" not in text
        assert KEY not in text
    assert KEY not in (up.run_dir / "gateway.toml").read_text()


# -- the demo model -------------------------------------------------------------------------------


async def test_the_demo_model_answers_its_questions(up: Up) -> None:
    async with openai.AsyncOpenAI(base_url=up.url, api_key=KEY, timeout=PATIENCE_S) as sdk:

        async def answer(question: Question) -> str:
            messages: Any = [{"role": role, "content": content} for role, content in question.messages]
            done = await sdk.chat.completions.create(model=MODEL, messages=messages, temperature=0)
            assert done.choices[0].finish_reason == "stop", f"{question.text!r} found no end"
            return done.choices[0].message.content or ""

        asked = QUESTIONS[:: drawn(3, whole=1)]
        answers = [await answer(question) for question in asked]  # one by one: bf16 sums depend on company
    wrong = [(q.text, a) for q, a in zip(asked, answers, strict=True) if not q.accepts(a)]
    assert len(asked) >= 30
    assert 1 - len(wrong) / len(asked) >= (ACCURACY_MIN if IS_WHOLE else 0.9), wrong


# -- the OpenAI SDK, its strict validation on ------------------------------------------------------


def test_chat(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(model=MODEL, messages=ask("What is the capital of Italy?"), seed=1)
    assert "Rome" in (done.choices[0].message.content or "")
    assert done.choices[0].finish_reason == "stop"
    assert done.usage is not None
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    assert done._request_id


def test_stream_with_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=ask("Tell me a story."), temperature=0)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=ask("Tell me a story."),
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_usage_tells_what_was_cached_of_a_session(up: Up, path: str, streams: bool) -> None:
    text = f"{path} {streams}: {'two and two make four. ' * 40}"
    prompt = {"prompt": text} if path == "completions" else {"messages": ask(text)}
    body = {"model": MODEL, "max_tokens": 2, "stream": streams, **prompt}
    if streams:
        body["stream_options"] = {"include_usage": True}
    told, name = [], path.partition("/")[0]
    for turn in range(2):
        id_ = f"cached-{name}-{streams}-{turn}"
        headers = {"authorization": f"Bearer {KEY}", "x-request-id": id_, "x-session-id": "mine"}
        answer = httpx.post(f"{up.url}/{path}", json=body, headers=headers, timeout=PATIENCE_S)
        data = answer.text.split("data: ")[-2] if streams else answer.text
        usage, line = json.loads(data)["usage"], up.completed("gateway", id_)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        told.append(cached / usage["prompt_tokens"])
        assert (line["prompt_tokens"], line["cached_tokens"]) == (usage["prompt_tokens"], cached)
        assert re.fullmatch("[0-9a-f]{16}", line["session"])
    assert told[0] < 0.5 < told[1]


def test_logprobs_choices_and_seed(client: openai.OpenAI) -> None:
    def draw(n: int) -> Any:
        return client.chat.completions.create(
            model=MODEL,
            messages=ask("Hello!"),
            n=n,
            seed=5,
            temperature=1.5,
            max_tokens=8,
            logprobs=True,
            top_logprobs=2,
        )

    three = draw(3)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in three.choices}) > 1
    assert draw(1).choices[0].message.content == three.choices[0].message.content
    for entry in three.choices[0].logprobs.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 2


def test_completions(client: openai.OpenAI) -> None:
    done = client.completions.create(model=MODEL, prompt=["The capital", "A river"], max_tokens=4, echo=True)
    assert [choice.index for choice in done.choices] == [0, 1]
    assert done.choices[0].text.startswith("The capital")
    ids = client.completions.create(model=MODEL, prompt=[[300, 301], [302]], max_tokens=4)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3
    # the SDK's type for a chunk allows no null finish_reason, though OpenAI's own stream has it
    lenient = client.copy(_extra_kwargs={"_strict_response_validation": False})
    stream = lenient.completions.create(model=MODEL, prompt="The capital", max_tokens=4, stream=True)
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks)
    assert last.choices[0].finish_reason == "length"


def test_models(client: openai.OpenAI) -> None:
    assert {model.id for model in client.models.list()} == {MODEL, ALIAS}
    assert client.models.retrieve(ALIAS).id == ALIAS
    done = client.chat.completions.create(model=ALIAS, messages=ask("Hi"), max_tokens=2)
    assert done.model in (ALIAS, MODEL)


class GetWeather(pydantic.BaseModel):  # type: ignore[misc]  # pydantic's types are not read
    city: Literal["Paris", "Rome"]


class CalendarEvent(pydantic.BaseModel):  # type: ignore[misc]
    day: Literal["Friday", "Saturday"]
    participants: list[Literal["Alice", "Bob"]] = pydantic.Field(max_length=2)


EVENT_ASKED: Any = [
    {"role": "system", "content": "Extract the event information."},
    {"role": "user", "content": "Alice and Bob are going to a science fair on Friday."},
]


def test_the_stream_helper_assembles_a_call_and_its_result_is_answered(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {
        "model": MODEL,
        "tools": [openai.pydantic_function_tool(GetWeather, name="get_weather")],
        "temperature": 0,
    }
    messages: list[Any] = ask("What is the weather in Paris?")
    with client.chat.completions.stream(messages=messages, tool_choice="required", **arguments) as stream:
        events = list(stream)
        choice = stream.get_final_completion().choices[0]
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    [done] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert "".join(event.arguments_delta for event in deltas) == done.arguments
    assert len(deltas) > 1, "arguments come as they are generated"
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)
    messages += [
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": "14 degrees and cloudy"},
    ]
    whole = client.chat.completions.create(messages=messages, tool_choice="none", max_tokens=40, **arguments)
    assert whole.choices[0].message.tool_calls is None
    assert whole.choices[0].message.content


def test_an_answer_is_parsed_whole_and_while_it_streams(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {
        "model": MODEL,
        "messages": EVENT_ASKED,
        "response_format": CalendarEvent,
        "temperature": 0,
    }
    event = client.chat.completions.parse(**arguments).choices[0].message.parsed
    assert isinstance(event, CalendarEvent)
    with client.chat.completions.stream(**arguments) as stream:
        partly = [each.parsed for each in stream if each.type == "content.delta"]
        assert stream.get_final_completion().choices[0].message.parsed == event
    assert {len(each or {}) for each in partly} >= {1, 2}, "field by field"


NAME = "tools[0].function.name"


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"model": "no-such-model"}, openai.NotFoundError, "model"),
        ({"temperature": 2.1}, openai.BadRequestError, "temperature"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"max_tokens": 100_000}, openai.BadRequestError, "max_tokens"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, openai.BadRequestError, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, openai.BadRequestError, NAME),
    ],
)
def test_errors_raise_the_class_that_belongs_to_them(
    client: openai.OpenAI, change: dict[str, Any], error: type[openai.APIStatusError], param: str
) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "messages": ask("Hi"), "max_tokens": 2, **change}
    with pytest.raises(error) as caught:
        client.chat.completions.create(**arguments)
    assert caught.value.param == param
    assert caught.value.request_id


def test_a_wrong_key_is_an_authentication_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        client.with_options(api_key="another").models.list()
    assert "another" not in str(caught.value)


HOSTILE = {
    "nothing": b"",
    "not JSON": b"{",
    "no object": b"[]",
    "not UTF-8": b'{"model": "\xff"}',
    "NaN": b'{"model": "m", "temperature": NaN}',
    "a number of 10,000 digits": b'{"model": "m", "seed": ' + b"9" * 10_000 + b"}",
    "a lone surrogate": rb'{"model": "m", "messages": [{"role": "user", "content": "\ud800"}]}',
    "a lone surrogate where nobody looks": rb'{"model": "m", "zzz": "\ud800"}',
    "100,000 brackets": b'{"model": "m", "zzz": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "100,000 brackets in tools": b'{"model": "m", "tools": [' + b"[" * 100_000 + b"]" * 100_000 + b"]}",
    "our own extension": b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "penstock": {}}',
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
def test_hostile_bodies_get_a_clear_refusal(up: Up, path: str, body: bytes) -> None:
    answer = httpx.post(
        up.url + path, content=body, headers={"authorization": f"Bearer {KEY}"}, timeout=PATIENCE_S
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert answer.headers["x-request-id"]
    direct = httpx.post(f"{up.engine_url}/v1{path}", content=body, timeout=PATIENCE_S)
    if "penstock" not in body.decode(errors="replace"):
        assert direct.status_code == 400


# -- the operator ---------------------------------------------------------------------------------


def test_the_trace_command_shows_both_sides_of_a_request(up: Up) -> None:
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": "sre-question.2"}
    body = {"model": MODEL, "messages": ask("What is 2 + 3?"), "max_tokens": 5}
    httpx.post(f"{up.url}/chat/completions", json=body, headers=headers, timeout=PATIENCE_S)
    gateway, engine = (up.completed(service, "sre-question.2") for service in ("gateway", "engine"))
    assert engine["parent_span_id"] == gateway["span_id"]
    logs = [str(up.run_dir / f"{service}.log") for service in ("engine", "gateway")]
    argv = [str(PENSTOCK), "trace", "sre-question.2", "--logs", *logs]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    for line, service in ((gateway, "gateway"), (engine, "engine")):
        assert f"{service:<9}200 ok in {line['stage']}, after {line['total_ms']:.3f} ms" in done.stdout
    assert "missing" not in done.stdout


def test_the_trace_command_names_a_core_that_was_stopped(up: Up) -> None:
    """While the request hangs, of the running gateway; afterwards, of the logs."""
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": "sre-question.3"}
    body = {"model": MODEL, "messages": ask("What is 2 + 3?"), "max_tokens": 5}
    [url] = re.findall(r"Console +(\S+)/console", up.printed)
    [key] = re.findall(r"Admin key +(\S+)", up.printed)

    def trace(*argv: str) -> str:
        command = [str(PENSTOCK), "trace", "sre-question.3", *argv]
        environment = {**up.environment(), "PENSTOCK_ADMIN_KEY": key}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment
        ).stdout

    def waited_ms() -> float:
        asked = httpx.get(
            f"{url}/admin/v1/requests/sre-question.3", headers={"authorization": f"Bearer {key}"}
        )
        return float(asked.json()["data"][0]["summary"]["total_ms"]) if asked.is_success else 0.0

    with ThreadPoolExecutor(1) as threads:
        os.kill(core_pid(up), signal.SIGSTOP)
        try:
            asked = threads.submit(
                httpx.post, f"{up.url}/chat/completions", json=body, headers=headers, timeout=PATIENCE_S
            )
            until(lambda: waited_ms() > 2500.0)  # of which it is seen that a second at least is the core's
            assert re.search(
                r"^  why +[\d.]+ s so far: \S+ had not begun to answer$", trace("--admin-url", url), re.M
            )
        finally:
            os.kill(core_pid(up), signal.SIGCONT)
        assert asked.result().status_code == 200
    up.completed("engine", "sre-question.3")
    logs = [str(up.run_dir / f"{service}.log") for service in ("engine", "gateway")]
    named = (
        r"^  why +[\d.]+ s: between the engine's API process and its core; the core process did not answer"
    )
    assert re.search(named, trace("--logs", *logs), re.M), trace("--logs", *logs)


def test_both_logs_join_by_the_request_id_and_agree(up: Up) -> None:
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": "sre-question.1"}
    body = {"model": MODEL, "messages": ask("What is 2 + 3?"), "stream": True, "temperature": 0}
    answer = httpx.post(f"{up.url}/chat/completions", json=body, headers=headers, timeout=PATIENCE_S)
    assert answer.headers["x-request-id"] == "sre-question.1"
    gateway, engine = (up.completed(service, "sre-question.1") for service in ("gateway", "engine"))
    for field in (
        *("trace_id", "method", "endpoint", "status", "end_reason", "stream", "tenant", "model"),
        *("prompt_tokens", "completion_tokens", "cached_tokens"),
    ):
        assert gateway[field] == engine[field], f"{field} is the same thing in both"
    assert (gateway["stage"], engine["stage"]) == ("relay", "decode")
    assert gateway["settled_tokens"] == engine["prompt_tokens"] + engine["completion_tokens"]
    stages = re.findall(r"([a-z-]+);dur=([\d.]+)", answer.headers["server-timing"])
    assert {"auth", "validate", "tokenize", "quota", "connect", "wait"} <= {name for name, _ in stages}
    for name in ("auth", "validate", "tokenize", "quota", "route", "connect", "wait", "relay", "settle"):
        assert gateway[f"{name}_ms"] >= 0
    for name in ("queue", "prefill", "decode"):
        assert engine[f"{name}_ms"] >= 0
    parts = sum(gateway.get(f"{name}_ms", 0.0) for name in GATEWAY_STAGES)
    assert parts == pytest.approx(gateway["total_ms"], rel=0.02, abs=1.0), "every millisecond has an owner"


GATEWAY_STAGES = frozenset(
    (
        *("edge", "auth", "body", "validate", "tenant", "tokenize", "quota"),
        *("route", "connect", "wait", "relay", "settle"),
    )
)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
@pytest.mark.parametrize("read", [0, 1, 20], ids=["before the answer", "at its start", "in its middle"])
def test_a_disconnect_cancels_the_request_in_the_engine(up: Up, stream: bool, read: int) -> None:
    request_id = f"leaver-{stream}-{read}"
    body = {
        "model": MODEL,
        "messages": ask("Go on."),
        "stream": stream,
        "ignore_eos": True,
        "max_tokens": 1900,
    }
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": request_id}
    with httpx.Client(timeout=PATIENCE_S) as http:
        request = http.build_request("POST", f"{up.url}/chat/completions", json=body, headers=headers)
        if stream:
            with http.stream(
                request.method, request.url, content=request.content, headers=request.headers
            ) as answer:
                lines = answer.iter_lines()
                for _ in range(2 * read):
                    next(lines)
        else:
            leave_unary(up, request, running=read > 0)
    gateway = up.completed("gateway", request_id)
    assert gateway["status"] == 499
    assert gateway["end_reason"] == "client_cancel"
    until(lambda: engine_at_rest(up.engine_url))
    if gateway["stage"] == "relay":
        assert up.completed("engine", request_id)["end_reason"] == "client_cancel"


def leave_unary(up: Up, request: httpx.Request, *, running: bool) -> None:
    """Send a request over a socket, wait until the engine runs it (or not), and hang up."""
    import socket

    with socket.create_connection((request.url.host, request.url.port or 80)) as connection:
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        connection.sendall(f"POST {request.url.path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
        if running:
            until(lambda: gauges(up.engine_url)["running_sequences"] == 1)


def test_https_until_the_core_is_killed_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    """`penstock up` serves https with a private authority's certificate, and `penstock chat` finds it. When
    the core dies a client gets an error event at once, and `penstock up` says what died and ends."""
    authority, trust = trustme.CA(), ssl.create_default_context()
    authority.configure_trust(trust)
    own = tmp_path / "own.pem"
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(own)
    up = start(tmp_path, "--tls-cert", str(own), "--tls-key", str(own))
    assert up.url.startswith("https://localhost:")

    argv = [str(PENSTOCK), "chat", "-m", "What is the capital of France?"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, env=up.environment())
    assert "Paris" in done.stdout, done.stderr

    body = {"model": MODEL, "messages": ask("Go on."), "stream": True, "ignore_eos": True, "max_tokens": 1900}
    with httpx.stream(
        "POST",
        f"{up.url}/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {KEY}"},
        timeout=httpx.Timeout(PATIENCE_S, read=1.0),  # an error within a second, or this raises
        verify=trust,
    ) as answer:
        assert answer.status_code == 200, answer.read()
        lines = answer.iter_lines()
        for _ in range(10):
            next(lines)
        os.kill(core_pid(up), signal.SIGKILL)
        rest = "\n".join(lines)
    assert json.loads(rest.rsplit("data: ", 1)[1])["error"]["code"] == "engine_failed"
    assert "data: [DONE]" not in rest.splitlines()
    assert "SIGKILL" in up.end()
    assert up.process.returncode == 1


def core_pid(up: Up) -> int:
    for line in (up.run_dir / "engine.log").read_text().splitlines():
        if '"core.started"' in line:
            return int(json.loads(line)["pid"])
    raise AssertionError("the engine has not said where its core is")
