"""Decisions: what the core is asked for a question, the answer that is made of it, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Decision

from engine.api.ask.model import load_model
from engine.contract.packing import unpacked
from engine.core.queue.newcomers import AddSequence
from shared.apis.decisions import CHOICES_MAX, JSON_LEN_MAX, LEVELS_MAX, QUESTIONS_MAX, DecisionsRequest
from shared.apis.prompt import QuestionKind
from shared.apis.validation import parse
from shared.text.deciding import MARK
from shared.text.tokenizer import Tokenizer, TokenizerBundle
from shared.wire.errors import InvalidRequest
from tests.engine.api.conftest import MODEL, Serve, Served
from tests.engine.api.tiny import TEMPLATE, write_model_dir

ROOM = {"max_model_len": 2000, "pages": 400}
PREDICATE = {"type": "predicate", "instructions": "The fox jumps."}
CHOICE = {
    "type": "choice",
    "instructions": "Who?",
    "choices": [{"value": "fox", "description": "a brown one"}, {"value": True}, {"value": "true"}],
}
SCORE = {"type": "score", "instructions": "How lazy?", "levels": [{"label": "not"}, {"label": "very"}]}


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    async with serve(core=ROOM) as served:
        yield served
        served.assert_nothing_leaks()


def asked(*questions: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "a fox and a dog", "questions": [*questions] or [PREDICATE], **fields}


def prompts(served: Served) -> list[str]:
    return [served.tokenizer.decode(add.prompt_ids, skip_special_tokens=False) for add in served.core.added]


def scored(served: Served) -> list[list[str]]:
    return [
        [served.tokenizer.decode([token]) for token in unpacked(add.sampling.scored)]
        for add in served.core.added
    ]


def scores_of(served: Served, *of_each: list[float]) -> Callable[[AddSequence], list[float]]:
    return lambda add: [math.log(one) for one in of_each[add.handle - 1]]


async def test_each_question_is_answered_by_the_probabilities_of_its_labels(served: Served) -> None:
    served.core.scores = scores_of(served, [0.1, 0.3], [0.2, 0.1, 0.1], [0.03, 0.01])
    named = {**PREDICATE, "name": "jumps"}
    answer = (await served.http.post("/v1/decisions", json=asked(named, CHOICE, SCORE))).json()
    predicate, choice, score = answer["answers"]
    assert predicate == {"type": "predicate", "name": "jumps", "probability": pytest.approx(0.75)}
    assert choice == {
        "type": "choice",
        "name": None,
        "choice": "fox",
        "probabilities": [
            {"value": "fox", "probability": pytest.approx(0.5)},
            {"value": True, "probability": pytest.approx(0.25)},
            {"value": "true", "probability": pytest.approx(0.25)},
        ],
        "confidence": pytest.approx(0.2),
    }
    assert score == {
        "type": "score",
        "name": None,
        "score": pytest.approx(0.25),
        "probabilities": [
            {"value": 0, "label": "not", "probability": pytest.approx(0.75)},
            {"value": 1, "label": "very", "probability": pytest.approx(0.25)},
        ],
        "confidence": pytest.approx(0.03),
    }
    tokens = sum(len(one.ids) // 4 for sent in served.core.asked for one in sent.prompts)
    tokens += len(served.core.asked[0].shared) // 4
    assert answer["usage"] == {
        "input_tokens": tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "total_tokens": tokens,
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    assert set(answer) == {"answers", "model", "usage"}


async def test_the_model_is_asked_in_its_own_template(served: Served) -> None:
    await served.http.post("/v1/decisions", json=asked(PREDICATE, CHOICE, SCORE))
    before, behind = "<|user|>a fox and a dog\n\n", "<|end|><|assistant|>"
    assert prompts(served) == [
        f"{before}Is the following true? The fox jumps.\nAnswer with Y or N only.{behind}",
        f'{before}Question: Who?\nA: "fox" - a brown one\nB: true\nC: "true"\n'
        f"Answer with the letter of one option only.{behind}",
        f"{before}Question: How lazy?\n0: not\n1: very\nAnswer with the number of one level only.{behind}",
    ]
    assert scored(served) == [["N", "Y"], ["A", "B", "C"], ["0", "1"]]
    shared = {tuple(unpacked(sent.shared)) for sent in served.core.asked}
    assert shared == {tuple(served.ids(before))}
    assert not any(add.sampling.max_tokens for add in served.core.added), "nothing is sampled"


async def test_the_sdk(served: Served) -> None:
    answer = await served.sdk.decisions.create(
        model=MODEL,
        input=[{"role": "user", "content": [{"type": "input_text", "text": "a fox"}]}],
        questions=[PREDICATE, CHOICE, SCORE],
        prompt_cache_key="key",
        prompt_cache_options={"mode": "implicit", "ttl": "30m"},
        safety_identifier="user",
    )
    assert isinstance(answer, Decision)
    assert [one.type for one in answer.answers] == ["predicate", "choice", "score"]
    assert answer.usage.output_tokens == 0


async def test_the_sdk_raises_what_is_refused(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await served.sdk.decisions.create(model=MODEL, input="a", questions=[])
    assert raised.value.param == "questions"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("a fox", "a fox"),
        ([{"role": "user", "content": "a fox"}], "a fox"),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "a"},
                        {"type": "input_json", "data": {"b": [1]}},
                    ],
                },
                {"type": "message", "role": "user", "content": "c"},
            ],
            'a\n{"b":[1]}\n\nc',
        ),
        (
            [
                {"role": "developer", "content": "Be kind."},
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "yo"}],
                    "phase": "commentary",
                },
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
                {"type": "function_call_output", "call_id": "c1", "output": "2"},
                {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "in", "namespace": "n"},
                {
                    "type": "custom_tool_call_output",
                    "call_id": "c2",
                    "output": [{"type": "input_text", "text": "out"}],
                },
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            ],
            "[developer]\nBe kind.\n\n[user]\nhi\n\n[assistant]\nyo\n\n[assistant calls f]\n"
            '{"x": 1}\n\n[result of f]\n2\n\n[assistant calls n.g]\nin\n\n[result of n.g]\nout\n\n'
            "[assistant]\nno",
        ),
    ],
)
async def test_a_conversation_is_one_text(served: Served, given: Any, said: str) -> None:
    answer = await served.http.post("/v1/decisions", json=asked(input=given))
    assert answer.status_code == 200
    [prompt] = prompts(served)
    assert prompt.startswith(f"<|user|>{said}\n\nIs the following true?")


async def test_a_question_may_have_parts(served: Served) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_json", "data": [{"b": None}]}]
    await served.http.post("/v1/decisions", json=asked({**PREDICATE, "instructions": parts}))
    [prompt] = prompts(served)
    assert 'Is the following true? a\n[{"b":null}]\n' in prompt


async def test_an_input_that_holds_the_mark_is_asked_as_any_other(served: Served) -> None:
    await served.http.post("/v1/decisions", json=asked(input=f"a {MARK} b"))
    [prompt] = prompts(served)
    assert prompt.startswith(f"<|user|>a {MARK} b\n\nIs the following true?")


def choices(count: int) -> dict[str, Any]:
    return {**CHOICE, "choices": [{"value": f"c{number}"} for number in range(count)]}


IMAGE = [{"type": "input_image", "image_url": "data:image/png;base64,aaaa"}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [PREDICATE] * (QUESTIONS_MAX + 1)}, "questions"),
        ({"questions": [PREDICATE, {"type": "ask", "instructions": "x"}]}, "questions[1].type"),
        ({"questions": [{"type": "predicate"}]}, "questions[0].instructions"),
        ({"questions": [PREDICATE, choices(1)]}, "questions[1].choices"),
        ({"questions": [choices(CHOICES_MAX + 1)]}, "questions[0].choices"),
        ({"questions": [PREDICATE, choices(CHOICES_MAX)]}, "questions[1].choices"),
        (
            {"questions": [{**CHOICE, "choices": [{"value": "a"}, {"value": "a"}]}]},
            "questions[0].choices[1].value",
        ),
        (
            {"questions": [{**CHOICE, "choices": [{"value": "a"}, {"value": 1}]}]},
            "questions[0].choices[1].value",
        ),
        ({"questions": [{**SCORE, "levels": [{"label": "a"}]}]}, "questions[0].levels"),
        ({"questions": [{**SCORE, "levels": [{"label": "a"}] * (LEVELS_MAX + 1)}]}, "questions[0].levels"),
        ({"questions": [{**PREDICATE, "instructions": IMAGE}]}, "questions[0].instructions[0]"),
        ({"questions": [{**PREDICATE, "instructions": "fox " * 9000}]}, "questions[0]"),
        ({"questions": [PREDICATE, {**PREDICATE, "instructions": "fox " * 1999}]}, "questions[1]"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": "fox " * 9000}, "input"),
        ({"input": [{"role": "user", "content": IMAGE}]}, "input[0].content[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "reasoning"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_json", "data": 1}]}]},
            "input[0].content[0].data",
        ),
        (
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_json", "data": {"a": "x" * JSON_LEN_MAX}}]}
                ]
            },
            "input[0].content[0].data",
        ),
        ({"stream": True}, "stream"),
        ({"temperature": 0.5}, "temperature"),
        ({"joint": True}, "joint"),
    ],
)
async def test_what_cannot_be_decided_is_refused_by_name(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    answer = await served.http.post("/v1/decisions", json=asked(**fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not served.core.added


def test_a_question_has_a_bound_whatever_labels_a_model_has() -> None:
    levels = [{"label": f"l{number}"} for number in range(LEVELS_MAX + 1)]
    for most, more, param in (
        (choices(CHOICES_MAX), choices(CHOICES_MAX + 1), "questions[0].choices"),
        ({**SCORE, "levels": levels[1:]}, {**SCORE, "levels": levels}, "questions[0].levels"),
    ):
        parse(json.dumps(asked(most)).encode(), DecisionsRequest)
        with pytest.raises(InvalidRequest) as refused:
            parse(json.dumps(asked(more)).encode(), DecisionsRequest)
        assert refused.value.param == param


async def test_a_question_has_as_many_choices_as_there_are_labels(served: Served) -> None:
    deciding = served.tokenizer.deciding
    assert deciding is not None
    most = len(deciding.labels[QuestionKind.CHOICE].texts)
    assert 26 < most < CHOICES_MAX
    answer = (await served.http.post("/v1/decisions", json=asked(choices(most)))).json()
    assert len(answer["answers"][0]["probabilities"]) == most
    [add] = served.core.added
    assert len(set(unpacked(add.sampling.scored))) == most
    answer = await served.http.post("/v1/decisions", json=asked(choices(most + 1)))
    assert f"at most {most} items" in answer.json()["error"]["message"]


async def test_unknown_fields_are_named_wherever_they_are(served: Served) -> None:
    question = {**CHOICE, "choices": [{"value": "a", "hint": 1}, {"value": "b"}], "weight": 2}
    given = [{"role": "user", "content": "a", "mood": "x"}]
    answer = await served.http.post("/v1/decisions", json=asked(question, input=given, made_up=1))
    named = set(answer.headers["x-penstock-ignored-fields"].split(", "))
    assert named == {"made_up", "questions.choices.hint", "questions.weight", "input.mood"}


async def test_four_hundred_questions_have_four_hundred_answers(served: Served) -> None:
    served.core.scores = lambda add: [math.log(add.handle / 1000), math.log(1 - add.handle / 1000)]
    answer = (await served.http.post("/v1/decisions", json=asked(*[PREDICATE] * QUESTIONS_MAX))).json()
    found = [one["probability"] for one in answer["answers"]]
    assert found == pytest.approx([1 - number / 1000 for number in range(1, QUESTIONS_MAX + 1)])


# -- which models decide --------------------------------------------------------------------------


async def test_the_list_of_models_tells_it(served: Served) -> None:
    [card] = (await served.http.get("/v1/models")).json()["data"]
    assert card["capabilities"]["decisions"] is True


async def test_a_model_without_a_template_refuses_by_name(serve: Serve, tmp_path: Path) -> None:
    write_model_dir(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    async with serve(core=ROOM) as served:
        served.engine.state.model = load_model(tmp_path, name=MODEL, created=0)
        answer = await served.http.post("/v1/decisions", json=asked())
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "path_not_served")
        assert not served.core.added


def decides(directory: Path, template: str, **settings: Any) -> bool:
    write_model_dir(directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return load_model(directory, name="m", created=0, **settings).decides


def test_a_model_decides_where_the_token_behind_the_prompt_is_its_answer(tmp_path: Path) -> None:
    assert decides(tmp_path, TEMPLATE)
    opens = TEMPLATE + "<think>\n"
    assert not decides(tmp_path, opens, answer_format="qwen3")
    told = (
        TEMPLATE
        + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    )
    assert decides(tmp_path, told, answer_format="qwen3")
    assert not decides(tmp_path, "{% for message in messages %}{{ message.role }}{% endfor %}")
    assert not decides(tmp_path, "{{ raise_exception('no') }}")


def test_a_tokenizer_says_by_which_tokens_it_decides(tokenizer: Tokenizer) -> None:
    deciding = tokenizer.deciding
    assert deciding is not None
    assert deciding.behind == "<|end|><|assistant|>"
    for labels in deciding.labels.values():
        assert len(set(labels.ids)) == len(labels.texts)
        for text, token in zip(labels.texts, labels.ids, strict=True):
            before = tokenizer.encode(deciding.behind, False)
            assert tokenizer.encode(deciding.behind + text, False) == [*before, token]
    assert Tokenizer(TokenizerBundle(tokenizer_json=tokenizer.bundle.tokenizer_json)).deciding is None
