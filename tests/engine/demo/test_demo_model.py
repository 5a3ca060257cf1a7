"""The demo model: its corpus can be made again, its files are small, and it answers what it should."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from engine.demo import MODEL_DIR
from engine.demo.train import corpus, evaluate, polish
from engine.demo.train.draw import Draw
from engine.demo.train.network import DemoModel, Shape
from engine.demo.train.text import END, answer_spans, render, token_id
from shared.apis.chat import ChatRequest
from shared.apis.validation import parse
from shared.fairness.fair_threads import at_once
from shared.text.tokenizer import Tokenizer as ServedTokenizer
from shared.text.tokenizer import TokenizerBundle, read_files
from tests.engine.demo.questions import QUESTIONS

WEIGHT_BYTES_MAX = 8_000_000
HEADER_BYTES_MAX = 10_000
VOCABULARY_MAX = 4096
QUESTIONS_MIN = 70


def plain(text: str) -> str:
    """A question without its case and punctuation."""
    return re.sub(r"[^a-z0-9+*/=-]+", " ", text.lower()).strip()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> DemoModel:
    """The committed weights in the training network, computed in fp32."""
    weights = load_file(MODEL_DIR / "model.safetensors")
    result = DemoModel(Shape(vocab_size=weights["model.embed_tokens.weight"].shape[0]))
    result.load_state_dict({name: value.float() for name, value in weights.items()})
    return result.eval()


# ------------------------------------------------------------------------------------ corpus


def test_the_corpus_can_be_made_again_in_any_order() -> None:
    forwards = [corpus.conversation(index) for index in range(200)]
    backwards = [corpus.conversation(index) for index in reversed(range(200))]
    assert forwards == backwards[::-1]
    assert len({c.messages()[0] for c in forwards}) > 100


@pytest.mark.parametrize("held_out", [False, True])
def test_every_answer_of_the_corpus_passes_its_own_check(held_out: bool) -> None:
    topics: Counter[str] = Counter()
    for index in range(3000):
        for turn in corpus.conversation(index, held_out).turns:
            assert re.search(turn.check, turn.answer), turn
            topics[turn.topic] += 1
    assert min(topics.values()) > 20
    assert set(topics) == {question.topic for question in QUESTIONS}


def test_held_out_wordings_are_disjoint_from_the_others() -> None:
    options = [str(number) for number in range(50)]
    trained = {Draw(seed).wording(options) for seed in range(2000)}
    held_out = {Draw(seed, held_out=True).wording(options) for seed in range(2000)}
    assert trained | held_out == set(options)
    assert not trained & held_out


@pytest.mark.nightly
def test_questions_are_fresh() -> None:
    """No question of the table, not even without case and punctuation, is one that training has seen."""
    rounds = itertools.chain(corpus.conversations(), polish.conversations())
    seen = {plain(question) for question in {turn.question for c in rounds for turn in c.turns}}
    assert len(QUESTIONS) >= QUESTIONS_MIN
    assert [question.text for question in QUESTIONS if plain(question.text) in seen] == []


# ------------------------------------------------------------------------------------- files


def test_the_files_are_small(tokenizer: Tokenizer) -> None:
    weights = load_file(MODEL_DIR / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    weight_bytes = sum(value.numel() * value.element_size() for value in weights.values())
    assert weight_bytes <= WEIGHT_BYTES_MAX
    assert (MODEL_DIR / "model.safetensors").stat().st_size <= weight_bytes + HEADER_BYTES_MAX
    assert tokenizer.get_vocab_size() <= VOCABULARY_MAX


def test_ids_agree_between_the_files(tokenizer: Tokenizer) -> None:
    config = json.loads((MODEL_DIR / "config.json").read_text())
    generation = json.loads((MODEL_DIR / "generation_config.json").read_text())
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert config["eos_token_id"] == generation["eos_token_id"] == token_id(tokenizer, END)


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("2024 and 17+20").tokens
    assert [t for t in tokens if re.search(r"\d", t)] == list("20241720")


@pytest.mark.parametrize("text", ["plain", "naïve 東京 🙂\n\n  two  spaces\ttab ", "\x00\x7f"])
def test_any_text_comes_back_from_its_tokens(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_chat_template_renders_what_training_rendered() -> None:
    messages = corpus.conversation(3).messages()
    as_dicts = [{"role": role, "content": content} for role, content in messages]
    from transformers import AutoTokenizer  # its import takes seconds, in each process that collects

    template = AutoTokenizer.from_pretrained(MODEL_DIR)
    assert template.apply_chat_template(as_dicts, tokenize=False) == render(messages)
    asked = template.apply_chat_template(as_dicts[:-1], tokenize=False, add_generation_prompt=True)
    assert asked == render(messages[:-1], ask=True)


def test_only_the_assistant_is_learned(tokenizer: Tokenizer) -> None:
    messages = [
        ("system", "Be kind."),
        ("user", "Hello"),
        ("assistant", "Hi."),
        ("user", "2"),
        ("assistant", "3"),
    ]
    ids = tokenizer.encode(render(messages)).ids
    spans = [ids[span.start : span.stop] for span in answer_spans(ids, tokenizer)]
    assert [tokenizer.decode(span, skip_special_tokens=False) for span in spans] == [f"Hi.{END}", f"3{END}"]


# ----------------------------------------------------------------------------------- answers


def test_transformers_computes_the_same(model: DemoModel, tokenizer: Tokenizer) -> None:
    from transformers import LlamaForCausalLM  # its import takes seconds, in each process that collects

    reference = LlamaForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode(render(corpus.conversation(1).messages())).ids])
    with torch.inference_mode():
        ours = model.logits(model.hidden(ids)[0])
        theirs = reference(ids).logits
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)


def test_some_fresh_questions_are_answered_together_as_alone(model: DemoModel, tokenizer: Tokenizer) -> None:
    """The end-to-end test asks the engine all of them."""
    some = QUESTIONS[::16]
    together = evaluate.answers(model, tokenizer, [question.messages for question in some])
    assert together == [evaluate.answers(model, tokenizer, [question.messages])[0] for question in some]
    wrong = [
        question.text for question, answer in zip(some, together, strict=True) if not question.accepts(answer)
    ]
    assert len(wrong) <= 1, wrong


# ------------------------------------------------------------------------------------ functions


def test_functions_are_signatures_in_the_system_prompt_and_calls_are_as_hermes_writes_them() -> None:
    weather = {
        "name": "get_weather",
        "description": "Get the weather.",
        "parameters": {"type": "object", "properties": {"city": {}, "unit": {}}, "required": ["city"]},
    }
    body = {
        "model": "demo",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather in Paris?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "18"},
        ],
        "tools": [{"type": "function", "function": tool} for tool in (weather, {"name": "now"})],
    }
    prompt = parse(json.dumps(body).encode(), ChatRequest).request.prompt_form
    template = ServedTokenizer(TokenizerBundle.of(read_files(MODEL_DIR))).template_of(prompt)
    rendered = at_once(template.slices(prompt))
    head = "Be brief.\n\nFunctions:\nget_weather(city, unit?): Get the weather.\nnow()\n"
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert head in rendered
    assert f"assistant\n{call}{END}\n" in rendered
    assert rendered.endswith(f"tool\n18{END}\n<|im_start|>assistant\n")
