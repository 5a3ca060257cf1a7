"""What a caller predicts of its answer: how it reaches the core, and what of it is told and charged. That it
changes no token is held in `tests/engine/core` and `tests/engine/runtime`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from engine.contract.messages import FinishReason
from engine.contract.packing import unpacked
from shared.apis.prediction import PREDICTION_LEN_MAX
from shared.wire import sse
from tests.engine.api.conftest import MODEL, Served, until

TEXT = "the lazy dog"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
PREDICTED = {**CHAT, "prediction": {"type": "content", "content": TEXT}}


def sent(served: Served) -> list[int]:
    """The tokens of the prediction that the core was sent last."""
    return unpacked(served.core.asked[-1].prediction).tolist()


@pytest.mark.parametrize(
    "content", [TEXT, [{"type": "text", "text": "the la"}, {"type": "text", "text": "zy dog"}]]
)
async def test_the_core_is_sent_its_tokens_once_for_all_choices(served: Served, content: object) -> None:
    served.says(TEXT)
    prediction = {"type": "content", "content": content}
    answer = await served.http.post("/v1/chat/completions", json={**CHAT, "n": 3, "prediction": prediction})
    assert answer.status_code == 200
    assert sent(served) == served.ids(TEXT)
    assert [add.prediction is served.core.added[0].prediction for add in served.core.added] == [True] * 3
    assert "x-penstock-ignored-fields" not in answer.headers


async def test_the_ids_that_a_gateway_counted_are_taken_where_they_are_a_tokens(served: Served) -> None:
    served.says(TEXT)
    own = served.engine.state.ready_model()[0].tokenizer.hash
    trusted = {"tokenizer": own, "prompt_ids": [[5, 6]], "predicted_ids": [7, 8, 9]}
    for penstock, expected in (
        (trusted, [7, 8, 9]),
        (trusted | {"tokenizer": "another"}, served.ids(TEXT)),
        (trusted | {"predicted_ids": [7, 10**6]}, served.ids(TEXT)),
    ):
        await served.http.post("/v1/chat/completions", json={**PREDICTED, "penstock": penstock})
        assert sent(served) == expected


async def answered(
    served: Served, said: list[tuple[int, int]], body: dict[str, Any], *, steps: int = 9
) -> Any:
    """The response to a request of one sequence, whose steps tell so much of its prediction."""
    core = served.core
    core.is_held = True
    task = asyncio.create_task(served.http.post("/v1/chat/completions", json=body))
    await until(lambda: bool(core.waiting))
    handle = core.added[-1].handle
    for at in range(steps):
        core.predicted = [(handle, *said[at])] if at < len(said) else []
        core.step()
    return await task


@pytest.mark.parametrize("streams", [False, True])
async def test_usage_lines_and_the_report_tell_what_was_right_and_charge_what_was_wrong(
    served: Served, lines: list[dict[str, Any]], streams: bool
) -> None:
    served.says(TEXT)
    body = {**PREDICTED, "stream": streams}
    if streams:
        body["stream_options"] = {"include_usage": True}
    # a step of this core brings one token, so that one may be right at most
    response = await answered(served, [(1, 2), (0, 4), (1, 0)], body)
    own = len(served.ids(TEXT)) + 1
    if streams:
        *_, last, _done, comment, _ = response.content.split(b"\n\n")
        usage = json.loads(last[6:])["usage"]
        report = sse.parse_closing(comment.removeprefix(b": penstock "))
    else:
        usage = response.json()["usage"]
        report = sse.parse_closing(response.headers[sse.CLOSING_HEADER])
    assert usage["completion_tokens"] == own + 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + own + 6
    assert usage["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 2,
        "rejected_prediction_tokens": 6,
    }
    assert report is not None
    assert (report.completion_tokens, report.accepted_prediction_tokens) == (own + 6, 2)
    assert report.rejected_prediction_tokens == 6
    [line] = lines
    assert (line["completion_tokens"], line["accepted_prediction_tokens"]) == (own + 6, 2)
    assert line["rejected_prediction_tokens"] == 6


async def test_of_a_prediction_that_is_not_used_nothing_is_charged(
    served: Served, lines: list[dict[str, Any]]
) -> None:
    served.says(TEXT)
    usage = (await served.http.post("/v1/chat/completions", json=PREDICTED)).json()["usage"]
    assert usage["completion_tokens"] == len(served.ids(TEXT)) + 1
    assert usage["completion_tokens_details"]["rejected_prediction_tokens"] == 0
    assert "rejected_prediction_tokens" not in lines[0]
    usage = (await served.http.post("/v1/chat/completions", json=CHAT)).json()["usage"]
    assert "completion_tokens_details" not in usage


async def test_what_is_right_behind_the_end_of_the_text_is_no_token_of_the_answer(served: Served) -> None:
    """A stop string ends a text within the tokens of a step, and the others of it are late."""
    served.says(TEXT)
    first = served.tokenizer.decode(served.ids(TEXT)[:2])
    response = await answered(served, [(0, 0), (5, 1)], {**PREDICTED, "stop": [first[-1]]}, steps=2)
    usage = response.json()["usage"]
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 1
    assert usage["completion_tokens"] == 3


async def test_who_leaves_is_charged_for_what_was_wrong_by_then(
    served: Served, lines: list[dict[str, Any]]
) -> None:
    core = served.core
    served.says(TEXT, ends=False)
    core.is_held, core.heeds_aborts = True, False
    task = asyncio.create_task(served.http.post("/v1/chat/completions", json=PREDICTED))
    await until(lambda: bool(core.waiting))
    core.predicted = [(1, 0, 3)]
    core.step()
    await until(core._messages.empty)
    task.cancel()
    await until(lambda: core.aborted == [1])
    core.predicted = [(1, 0, 2)]
    core.step()
    core.finish(1, FinishReason.ABORTED, late_tokens=1)
    await until(lambda: bool(lines))
    assert (lines[0]["completion_tokens"], lines[0]["rejected_prediction_tokens"]) == (2 + 1 + 5, 5)


@pytest.mark.parametrize(
    ("prediction", "param", "code"),
    [
        ("text", "prediction", "invalid_value"),
        ({"type": "content"}, "prediction.content", None),
        ({"content": "x"}, "prediction.type", None),
        ({"type": "content", "content": 7}, "prediction.content", None),
        ({"type": "content", "content": [{"type": "image_url"}]}, None, None),
        ({"type": "outline", "content": "x"}, "prediction.type", "unsupported_parameter"),
        ({"type": "content", "content": "x" * (PREDICTION_LEN_MAX + 1)}, "prediction.content", None),
        ({"type": "content", "content": "é" * (PREDICTION_LEN_MAX // 2 + 1)}, "prediction.content", None),
    ],
)
async def test_what_is_no_prediction_is_refused_by_its_field(
    served: Served, prediction: object, param: str | None, code: str | None
) -> None:
    response = await served.http.post("/v1/chat/completions", json={**CHAT, "prediction": prediction})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == param or (param is None and error["param"].startswith("prediction.content"))
    assert code in (None, error["code"])


async def test_the_longest_prediction_is_taken_and_unknown_fields_within_are_named(served: Served) -> None:
    served.says(TEXT)
    prediction: dict[str, Any] = {"type": "content"}
    prediction["content"] = [{"type": "text", "text": "é" * (PREDICTION_LEN_MAX // 2)}]
    response = await served.http.post("/v1/chat/completions", json={**CHAT, "prediction": prediction})
    assert response.status_code == 200
    part = {"type": "text", "text": "x", "zzz": 1}
    prediction = {"type": "content", "content": [part], "yyy": 2}
    response = await served.http.post("/v1/chat/completions", json={**CHAT, "prediction": prediction})
    assert response.headers["x-penstock-ignored-fields"] == "prediction.yyy, prediction.content.zzz"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_other_apis_have_no_prediction_and_name_it(served: Served, path: str) -> None:
    served.says(TEXT)
    body = (
        {"model": MODEL, "prompt": "hello"} if path == "/v1/completions" else {"model": MODEL, "input": "x"}
    )
    prediction = {"type": "content", "content": TEXT}
    response = await served.http.post(path, json={**body, "prediction": prediction})
    assert response.status_code == 200
    assert response.headers["x-penstock-ignored-fields"] == "prediction"
    assert served.core.added[-1].prediction is None
