"""Large answers in pieces: the same bytes as in one, and never much of the event loop at once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from engine.api.answer import completions, rows
from engine.api.answer import encoder as encoding
from engine.api.answer.chat import ChatEncoder
from engine.api.answer.completions import CompletionEncoder
from engine.api.answer.detokenizer import Detokenizer
from engine.api.answer.encoder import Answered, Heading
from engine.api.answer.outputs import ChoiceOutput, Delta, Entry, RequestOutput
from engine.api.answer.parts import Part
from engine.api.answer.rows import Echo
from engine.contract.messages import TokenLogprobs
from shared.apis.chat import ChatCompletion
from shared.apis.completions import Completion
from shared.apis.generation import PromptTokensDetails, Usage
from tests.engine.api.conftest import MODEL, Serve, Served

USAGE = Usage(3, 4, 7, PromptTokensDetails(0))


class Letters:
    """Token i is a character."""

    def token_bytes(self, token_id: int) -> bytes:
        return chr(97 + token_id % 26).encode() if token_id != 5 else b"\xff"


def scored(token_id: int, top: int) -> TokenLogprobs:
    return TokenLogprobs(-0.5 - token_id, list(range(top)), [-float(i) for i in range(top)])


def delta(index: int, tokens: int, top: int | None, *, is_first: bool = True) -> Delta:
    entries = [Entry(i, i, None if top is None else scored(i, top)) for i in range(tokens)]
    return Delta(index, [Part('x"\u2028\n' * tokens)], entries, "stop", is_first)


def heading(logprobs: int | None, *, ids: bool = False) -> Heading:
    return Heading('id"choices":[', 1, 'm"choices":[', "fp", False, ids, logprobs)


def output(prompt_logprobs: list[TokenLogprobs]) -> ChoiceOutput:
    class Nothing:
        lost_len = 0
        is_unfinished = False

        def step(self, token_id: int) -> str:
            return ""

        def flush(self) -> str:
            return ""

    made = ChoiceOutput(0, RequestOutput(1), Detokenizer(Nothing()))
    made.prompt_logprobs = prompt_logprobs
    return made


@pytest.fixture(params=[1, 7, 10_000])
def piece_entries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    for name in ("PIECE_ENTRIES", "PIECE_TEXT_LEN"):
        monkeypatch.setattr(encoding, name, request.param)
    for name in ("PIECE_TEXT_LEN", "PIECE_IDS"):
        monkeypatch.setattr(completions, name, request.param)
    return int(request.param)


@pytest.mark.parametrize("top", [None, 0, 3])
@pytest.mark.parametrize("ids", [False, True])
def test_a_whole_chat_is_what_its_struct_encodes_to(piece_entries: int, top: int | None, ids: bool) -> None:
    encoder = ChatEncoder(heading(top, ids=ids), Letters(), Answered([], [[1, 2]], []))
    deltas = [delta(0, 9, top), delta(1, 0, top)]
    pieces = list(encoder.whole(deltas, USAGE))
    body = b"".join(pieces)
    assert body == msgspec.json.encode(msgspec.json.decode(body, type=ChatCompletion))
    decoded = msgspec.json.decode(body, type=ChatCompletion)
    assert [choice.message.content for choice in decoded.choices] == [one.text for one in deltas]
    for choice, one in zip(decoded.choices, deltas, strict=True):
        assert (choice.logprobs is None) == (top is None)
        if choice.logprobs is not None:
            assert len(choice.logprobs.content) == len(one.entries)
    if piece_entries == 1 and top:
        assert len(pieces) > 18


@pytest.mark.parametrize("top", [None, 0, 3])
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("echoes", [False, True])
def test_a_whole_completion_is_what_its_struct_encodes_to(
    piece_entries: int, top: int | None, ids: bool, echoes: bool
) -> None:
    echo = Echo("prompt", [1, 2, 3], [0, 2, 4])
    prompt_logprobs = [scored(i, top or 0) for i in (2, 3)]
    encoder = CompletionEncoder(
        heading(top, ids=ids),
        Letters(),
        Answered([output(prompt_logprobs)] * 2, [echo.prompt_ids] * 2, [echo if echoes else None] * 2),
    )
    deltas = [delta(0, 9, top), delta(1, 4, top)]
    body = b"".join(encoder.whole(deltas, USAGE))
    decoded = msgspec.json.decode(body, type=Completion)
    assert body == msgspec.json.encode(decoded)
    for choice, one in zip(decoded.choices, deltas, strict=True):
        assert choice.text == ("prompt" if echoes else "") + one.text
        assert choice.prompt_token_ids == (echo.prompt_ids if ids else msgspec.UNSET)
        if top is not None:
            assert choice.logprobs is not None
            lengths = {
                len(choice.logprobs.tokens),
                len(choice.logprobs.text_offset),
                len(choice.logprobs.token_logprobs),
                len(choice.logprobs.top_logprobs),
            }
            assert lengths == {len(one.entries) + (3 if echoes else 0)}
            assert choice.logprobs.text_offset[-1] == one.entries[-1].start + (len("prompt") if echoes else 0)


@pytest.mark.parametrize("top", [None, 0])
def test_a_long_prompt_that_is_repeated_is_streamed_in_chunks(
    monkeypatch: pytest.MonkeyPatch, top: int | None
) -> None:
    monkeypatch.setattr(completions, "PIECE_TEXT_LEN", 4)
    echo = Echo("prompt", [1, 2, 3], [0, 2, 4] if top is not None else [])
    encoder = CompletionEncoder(
        heading(top), Letters(), Answered([output([scored(2, 0), scored(3, 0)])], [[]], [echo])
    )
    events = encoder.events(delta(0, 1, top))
    chunks = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    assert [chunk["text"] for chunk in chunks] == ["prom", "pt", 'x"\u2028\n', ""]
    lists = [chunk["logprobs"]["text_offset"] if chunk.get("logprobs") else [] for chunk in chunks]
    assert lists == ([[]] * 4 if top is None else [[0, 2, 4], [], [6], []])


@pytest.mark.parametrize("chosen", [0, 26])
def test_of_two_tokens_with_one_text_the_likelier_is_listed(chosen: int) -> None:
    """As "A" and the byte <0x41> of a vocabulary that has both."""
    values = {0: -0.1, 1: -3.0, 26: -9.0}
    told = TokenLogprobs(values[chosen], list(values), list(values.values()))
    encoder = CompletionEncoder(heading(3), Letters(), Answered([output([])], [], [None]))
    [choice] = json.loads(
        b"".join(encoder.whole([Delta(0, [Part("a")], [Entry(chosen, 0, told)], "stop", True)], USAGE))
    )["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -0.1, "b": -3.0}]
    assert choice["logprobs"]["token_logprobs"] == [values[chosen]]


def test_a_long_scored_prompt_is_streamed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "PIECE_ENTRIES", 30)
    text = "abcdefghij" * 10
    echo = Echo(text, list(range(100)), list(range(100)))
    prompt_logprobs = [scored(i, 2) for i in range(1, 100)]
    encoder = CompletionEncoder(
        heading(2, ids=True), Letters(), Answered([output(prompt_logprobs)], [[7, 7]], [echo])
    )
    first = delta(0, 3, 2)
    events = [json.loads(event.removeprefix(b"data: ")) for event in encoder.events(first)]
    chunks = [event["choices"][0] for event in events]
    assert len(chunks) == 10 + 1 + 1
    assert "".join(chunk["text"] for chunk in chunks) == text + first.text
    columns = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    offsets = [offset for column in columns for offset in column["text_offset"]]
    assert offsets == [*range(100), 100, 101, 102]
    assert all(len(column["tokens"]) <= 10 for column in columns)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[7, 7], *[None] * 11]
    assert [len(chunk.get("token_ids", ())) for chunk in chunks] == [0] * 10 + [3, 0]


@pytest.mark.parametrize("streams", [False, True])
def test_the_rows_of_a_long_scored_prompt_are_made_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    """Making all of them first would hold the loop for a tenth of a second."""
    monkeypatch.setattr(encoding, "PIECE_ENTRIES", 10)
    made, row = 0, rows.LogprobRow

    def counted(*fields: Any) -> Any:
        nonlocal made
        made += 1
        return row(*fields)

    monkeypatch.setattr(rows, "LogprobRow", counted)
    echo = Echo("a" * 500, list(range(500)), list(range(500)))
    prompt_logprobs = [scored(i, 0) for i in range(1, 500)]
    encoder = CompletionEncoder(heading(0), Letters(), Answered([output(prompt_logprobs)], [], [echo]))
    pieces = encoder.events(delta(0, 5, 0)) if streams else encoder.whole([delta(0, 5, 0)], USAGE)
    before, most = 0, 0
    for _ in pieces:
        most, before = max(most, made - before), made
    assert made >= 505
    assert most <= 10


# -- through the engine ---------------------------------------------------------------------------


async def pieces_written(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often others were let run while an answer was written."""
    pauses: list[int] = []
    sleep = asyncio.sleep

    async def counted(seconds: float, *rest: Any) -> Any:
        pauses.append(1)
        return await sleep(seconds, *rest)

    monkeypatch.setattr(asyncio, "sleep", counted)
    return pauses


@pytest.mark.parametrize("streams", [False, True])
async def test_others_run_while_a_large_answer_is_written(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    async with serve(core={"max_model_len": 2048, "pages": 256}) as served:
        served.core.script = lambda _: [7] * 1000
        served.core.is_held = True
        pauses = await pieces_written(served, monkeypatch)
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1000, "logprobs": 20, "n": 4, "stream": streams}
        task = asyncio.create_task(served.http.post("/v1/completions", json=body))
        while not task.done():
            served.core.release()
            await asyncio.sleep(0)
        answer = task.result()
        assert answer.status_code == 200
        if not streams:
            tokens = [len(choice["logprobs"]["tokens"]) for choice in answer.json()["choices"]]
            assert tokens == [1000] * 4
            assert "x-penstock-closing" in answer.headers
            assert len(pauses) > 20


async def test_small_answers_say_their_length(served: Served) -> None:
    served.says("fine")
    body = {"model": MODEL, "prompt": "x"}
    assert "content-length" in (await served.http.post("/v1/completions", json=body)).headers


@pytest.mark.parametrize("streams", [False, True])
async def test_every_choice_tells_the_scores_of_its_prompt_though_one_computed_them(
    served: Served, streams: bool
) -> None:
    served.says(" dog")
    body = {"model": MODEL, "prompt": ["the lazy", "a fox"], "echo": True, "logprobs": 2, "n": 3}
    one = {**body, "n": 1}
    if not streams:
        alone = (await served.http.post("/v1/completions", json=one)).json()["choices"]
        several = (await served.http.post("/v1/completions", json=body)).json()["choices"]
        assert [choice["logprobs"] for choice in several] == [
            choice["logprobs"] for choice in alone for _ in range(3)
        ]
        assert [choice["text"] for choice in several] == [
            choice["text"] for choice in alone for _ in range(3)
        ]
    else:
        text = (await served.http.post("/v1/completions", json={**body, "stream": True})).text
        texts = [""] * 6
        for line in text.splitlines():
            if line.startswith("data: {"):
                [choice] = json.loads(line.removeprefix("data: "))["choices"]
                texts[choice["index"]] += choice["text"]
        assert texts == ["the lazy dog"] * 3 + ["a fox dog"] * 3
    asked = [add.sampling.prompt_logprobs for add in served.core.added][-6:]
    assert asked == [2, None, None] * 2


async def test_a_stream_waits_for_the_scores_of_its_prompt(served: Served) -> None:
    """A later choice may begin before the first has its prompt's scores: after a preemption, say."""
    served.core.script = lambda add: [] if add.handle == 1 else [*served.ids(" dog<|end|>")]
    body = {"model": MODEL, "prompt": "the lazy", "echo": True, "logprobs": 1, "n": 2, "stream": True}
    async with served.http.stream("POST", "/v1/completions", json=body) as answer:
        events = answer.aiter_text()
        reading = asyncio.ensure_future(anext(events))
        for _ in range(200):
            await asyncio.sleep(0)
        assert not reading.done(), "the second choice has no scores to tell yet"
        running = served.core.running[1]
        running.script = served.ids(" cat<|end|>")
        served.core.release()
        text = await reading
        async for more in events:
            text += more
    assert '" dog"' in text
    assert text.count('"text":"the lazy') == 2
    assert "[DONE]" in text
