"""A model directory as the API process takes it: what is refused, and what is said in the log."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.api.ask.model import ServedModel, UnusableModel, load_model
from engine.contract.messages import END_TOKENS_MAX
from shared.text.tokenizer import TokenizerBundle, UnusableTokenizer
from tests.engine.api.tiny import EOS, write_model_dir
from tests.fakes import captured_logs
from tests.shared.text.chat_templates import STRICT


def load(directory: Path) -> ServedModel:
    return load_model(directory, name="m", created=0)


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_tokenizer_that_panics_is_refused_before_it_serves(tmp_path: Path) -> None:
    strip = {"type": "Strip", "content": " ", "start": 0, "stop": 1}
    change(
        write_model_dir(tmp_path) / "tokenizer.json",
        decoder={"type": "Sequence", "decoders": [{"type": "Fuse"}, strip]},
    )
    with pytest.raises(UnusableTokenizer, match="cannot be loaded: the tokenizers library panicked"):
        load(tmp_path)
    change(tmp_path / "tokenizer.json", added_tokens=[])
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(UnusableModel, match="cannot be used: the tokenizers library panicked"):
        load(tmp_path)


def test_keys_that_mean_nothing_are_named_in_a_line_for_each_file(tmp_path: Path) -> None:
    write_model_dir(tmp_path)
    change(tmp_path / "tokenizer_config.json", chat_templat="x", eos_tokn="y", eos_token=EOS)
    change(tmp_path / "generation_config.json", **{f"key_{i}": i for i in range(500)})
    with captured_logs() as lines:
        load(tmp_path)
    said = {line["file"]: line["names"] for line in lines if line["event"] == "engine.keys_ignored"}
    assert said["tokenizer_config.json"] == ("chat_templat", "eos_tokn")
    assert said["generation_config.json"][-1] == "and 480 more"


def test_variables_of_the_template_are_told_to_the_gateway_with_the_tokenizer(tmp_path: Path) -> None:
    template = (
        "{% if not think is defined %}{% set think = 1 %}{% endif %}{{ think }}{{ messages[0].content }}"
    )
    change(write_model_dir(tmp_path) / "tokenizer_config.json", chat_template=template)
    assert load(tmp_path).tokenizer.bundle.template_arguments == ("think",)
    told = load_model(
        tmp_path, name="m", created=0, template_arguments=(), template_defaults='{"think": "so "}'
    )
    bundle = msgspec.json.decode(told.bundle_json, type=TokenizerBundle)
    assert (bundle.template_arguments, bundle.template_defaults) == ((), {"think": "so "})
    with pytest.raises(UnusableTokenizer, match="messages is no variable"):
        load_model(tmp_path, name="m", created=0, template_arguments=("messages",))


def test_the_format_of_answers_is_the_checkpoints_its_familys_or_the_operators(tmp_path: Path) -> None:
    def name(choice: str = "auto") -> str | None:
        found = load_model(tmp_path, name="m", created=0, answer_format=choice).answer_format
        return None if found is None else found.name

    config = write_model_dir(tmp_path) / "tokenizer_config.json"
    assert name() is None
    change(config, chat_template="{{ messages[0].content }}<tool_call>")
    assert (name(), name("none"), name("mistral")) == ("hermes", None, "mistral")
    own = {"open": "<c>", "close": "</c>", "content": "json"}
    change(config, response_template={"start_anchor": "a", "fields": {"tool_calls": own}})
    assert name() == "checkpoint"
    change(config, chat_template="{{ messages[0].content }}", response_template={"fields": {"x": {}}})
    with pytest.raises(UnusableModel, match=r"response_template.*fields.x.*--answer-format"):
        name()
    with pytest.raises(UnusableModel, match="--answer-format: nothing"):
        name("nothing")


def test_a_model_whose_answers_do_not_end_is_warned_of(tmp_path: Path) -> None:
    (write_model_dir(tmp_path) / "generation_config.json").write_text("{}")
    change(tmp_path / "tokenizer_config.json", eos_token=None, chat_template=None)
    with captured_logs() as lines:
        assert load(tmp_path).eos_ids == frozenset()
    assert [line["event"] for line in lines] == ["engine.no_end_token", "tokenizer.decides_nothing"]


@pytest.mark.parametrize("stated", [1, [1, 2], None])
def test_an_answer_ends_at_the_tokenizers_end_token_too(
    tmp_path: Path, stated: int | list[int] | None
) -> None:
    """As with a model that was trained to chat and kept its base's generation_config.json."""
    change(write_model_dir(tmp_path) / "generation_config.json", eos_token_id=stated)
    with captured_logs() as lines:
        model = load(tmp_path)
    own = model.special_ids[EOS]
    assert model.eos_ids == {own, *([stated] if isinstance(stated, int) else stated or [])}
    told = [
        (line["model"], line["tokenizer"]) for line in lines if line["event"] == "engine.end_tokens_differ"
    ]
    assert told == ([(sorted(model.eos_ids - {own}), own)] if stated else [])


def test_a_tokenizers_end_token_that_the_model_has_not_is_none(tmp_path: Path) -> None:
    own = load(write_model_dir(tmp_path)).special_ids[EOS]
    change(tmp_path / "tokenizer_config.json", eos_token="<|beyond|>", chat_template=None)
    change(tmp_path / "config.json", vocab_size=340)
    model = load(tmp_path)
    assert "<|beyond|>" not in model.special_ids
    assert model.eos_ids == {own}


def test_a_turn_that_ends_with_another_token_is_warned_of(tmp_path: Path) -> None:
    change(write_model_dir(tmp_path) / "generation_config.json", eos_token_id=1)
    change(tmp_path / "tokenizer_config.json", eos_token="<|user|>")
    with captured_logs() as lines:
        load(tmp_path)
    assert [line["named"] for line in lines if line["event"] == "engine.turn_end_is_no_end"] == [EOS]


@pytest.mark.parametrize("ends", [END_TOKENS_MAX, END_TOKENS_MAX + 1])
def test_end_tokens_are_limited(tmp_path: Path, ends: int) -> None:
    change(write_model_dir(tmp_path) / "generation_config.json", eos_token_id=[*range(ends)])
    if ends == END_TOKENS_MAX:
        assert load(tmp_path).eos_ids == set(range(ends))
        return
    with pytest.raises(UnusableModel, match=f"eos_token_id: the model has {ends} end tokens, more than"):
        load(tmp_path)


def test_a_template_that_renders_nothing_is_warned_of(tmp_path: Path) -> None:
    template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    change(write_model_dir(tmp_path) / "tokenizer_config.json", chat_template=template)
    with captured_logs() as lines:
        load(tmp_path)
    assert [(line["event"], line.get("detail")) for line in lines] == [
        ("template.rendered_apart", None),
        ("engine.chat_template_fails", "the chat template raised SecurityError"),
        ("tokenizer.decides_nothing", None),
    ]


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"]
)
def test_a_fifo_among_the_files_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    (write_model_dir(tmp_path) / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises((UnusableModel, UnusableTokenizer), match=f"{name} .*not a regular file"):
        load(tmp_path)


@pytest.mark.parametrize(("text", "problem"), [(None, "has no config.json"), ("{", "is not valid JSON")])
def test_the_file_that_the_core_reads_first_is_looked_at_before_it_starts(
    tmp_path: Path, text: str | None, problem: str
) -> None:
    (write_model_dir(tmp_path) / "config.json").unlink()
    (tmp_path / "tokenizer.json").unlink()
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnusableModel, match=problem):
        load(tmp_path)


def test_a_template_that_leaves_out_past_reasoning_is_told_of_with_what_keeps_it(tmp_path: Path) -> None:
    change(write_model_dir(tmp_path) / "tokenizer_config.json", chat_template=STRICT)
    told: list[object] = []
    for defaults in (None, '{"keep_thinking": false}', '{"keep_thinking": true}'):
        with captured_logs() as lines:
            load_model(tmp_path, name="m", created=0, template_defaults=defaults)
        found = [line for line in lines if line["event"] == "engine.past_reasoning_left_out"]
        told.append([line["template_defaults"] for line in found])
    assert told == [[{"keep_thinking": True}], [{"keep_thinking": True}], []]


def test_a_model_without_oddities_says_nothing(tmp_path: Path) -> None:
    with captured_logs() as lines:
        model = load(write_model_dir(tmp_path))
    assert lines == []
    assert model.eos_ids == {model.tokenizer.encode(EOS)[0]}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"split_special_tokens": True}, "split_special_tokens true"),
        ({"fix_mistral_regex": True}, "fix_mistral_regex true"),
        ({"fast_tokenizer_files": ["tokenizer.json", "tokenizer.5.0.0.json"]}, "fast_tokenizer_files"),
        ({"extra_special_tokens": "<x>"}, "extra_special_tokens"),
        ({"added_tokens_decoder": {"1": {"content": "<x>", "colour": "red"}}}, "colour"),
        ({"added_tokens_decoder": {"one": {"content": "<x>"}}}, "one"),
        ({"added_tokens_decoder": {"9999": {"content": "<new>"}}}, "<new>.* is declared as 9999"),
    ],
)
def test_tokenizers_that_would_encode_otherwise_are_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    change(write_model_dir(tmp_path) / "tokenizer_config.json", **fields)
    with pytest.raises(UnusableTokenizer, match=named):
        load(tmp_path)
