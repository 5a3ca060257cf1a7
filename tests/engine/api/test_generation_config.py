"""generation_config.json: what is taken from it, and what is refused by name rather than ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.api.ask.admission import SamplingDefaults
from engine.api.ask.model import VALUE_MAX, GenerationDefaults, UnusableModel, read_generation_defaults
from engine.contract.generation_keys import GENERATION_KEYS
from shared.text.model_files import Meaning, Only

VOCAB_SIZE = 100


def read(directory: Path, generation: Any = None, config: Any = None) -> GenerationDefaults:
    """What the two files say, each given as its fields or its text; None: there is no such file."""
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (directory / name).write_text(text)
    return read_generation_defaults(directory, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        ({"temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2]}, SamplingDefaults(0.6, 0.9)),
        ({"temperature": None, "top_k": 50, "do_sample": True}, SamplingDefaults(top_k=50)),
        ({"temperature": 0.6, "do_sample": False}, SamplingDefaults(temperature=0.0)),
        ({"temperature": 0.6, "do_sample": None}, SamplingDefaults(temperature=0.6)),
        ({}, SamplingDefaults()),
        (None, SamplingDefaults()),
    ],
)
def test_what_a_request_leaves_open(tmp_path: Path, generation: Any, defaults: SamplingDefaults) -> None:
    assert read(tmp_path, generation).sampling == defaults


@pytest.mark.parametrize(
    ("generation", "named"),
    [
        ('{"temperature": -1}', "temperature"),
        ('{"top_p": "most"}', "top_p"),
        ("[]", "object"),
        ("{", "JSON"),
        ('{"temperature": NaN}', "temperature"),
        ('{"temperature": Infinity}', "temperature Infinity is too large"),
        (f'{{"temperature": {VALUE_MAX}}}', f"temperature {VALUE_MAX}.0 is too large"),
        ('{"top_k": 1e400}', "top_k"),
        ('{"top_k": 1' + 400 * "0" + "}", "top_k"),
        ('{"eos_token_id": "</s>"}', "eos_token_id"),
    ],
)
def test_what_makes_no_sense_is_named(tmp_path: Path, generation: str, named: str) -> None:
    with pytest.raises(UnusableModel, match=named) as caught:
        read(tmp_path, generation)
    assert "generation_config.json" in str(caught.value)


WRONG: dict[str, tuple[object, ...]] = {
    "do_sample": (0, 1, "false", [], {}),
    "temperature": (True, "0.5", [0.5]),
    "top_p": (True, "0.5", {}),
    "min_p": (False, "0"),
    "repetition_penalty": (True, "1"),
    "top_k": (True, 50.5, "50"),
    "eos_token_id": (True, 1.5, "1", [True], [[1]], {}),
}
"""Values of types that no key of the name has. Transformers takes some for others: 0 is false there."""


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
def test_a_value_of_a_wrong_type_is_refused_by_name(tmp_path: Path, name: str, value: object) -> None:
    used = {name for name, meaning in GENERATION_KEYS.items() if meaning is Meaning.USED}
    assert WRONG.keys() == used
    with pytest.raises(UnusableModel, match=rf"^generation_config\.json .*{name}"):
        read(tmp_path, {name: value})


def test_a_number_that_is_none_does_no_harm_where_nothing_reads_it(tmp_path: Path) -> None:
    assert read(tmp_path, '{"length_penalty": NaN, "top_p": 0.5}').sampling == SamplingDefaults(top_p=0.5)


CHANGING = {
    "suppress_tokens": [1, 2],
    "begin_suppress_tokens": [3],
    "bad_words_ids": [[5]],
    "no_repeat_ngram_size": 3,
    "num_beams": 4,
    "min_new_tokens": 5,
    "min_length": 5,
    "typical_p": 0.9,
    "epsilon_cutoff": 1e-3,
    "eta_cutoff": 1e-3,
    "top_h": 0.4,
    "penalty_alpha": 0.6,
    "guidance_scale": 1.5,
    "sequence_bias": [[[5], -1.0]],
    "forced_eos_token_id": 2,
    "stop_strings": ["."],
    "exponential_decay_length_penalty": [5, 1.1],
    "cache_implementation": "quantized",
}


@pytest.mark.parametrize("name", CHANGING)
def test_what_would_change_every_answer_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnusableModel, match=f"generation_config.json of .*{name} .* is not supported, only"):
        read(tmp_path, {name: CHANGING[name], "temperature": 0.5})


def test_values_that_change_nothing_are_served(tmp_path: Path) -> None:
    for name, meaning in GENERATION_KEYS.items():
        if isinstance(meaning, Only):
            for value in meaning.values:
                assert read(tmp_path, {name: value}).sampling == SamplingDefaults()


def test_every_setting_that_transformers_knows_has_a_meaning() -> None:
    from transformers import GenerationConfig

    keys = vars(GenerationConfig())
    known = {name for name in keys if not name.startswith("_")}
    assert len(known) > 50
    assert known <= GENERATION_KEYS.keys()


def test_keys_without_a_meaning_are_noted(tmp_path: Path) -> None:
    assert read(tmp_path, {"temprature": 0.3, "top_p": 0.5}).unread == ("temprature",)


@pytest.mark.parametrize(
    ("generation", "config", "eos_ids"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 8}, {7}),
        ({"eos_token_id": [7, 9]}, None, {7, 9}),
        (None, {"eos_token_id": 8}, {8}),
        ({"temperature": 0.5}, {"eos_token_id": [8]}, {8}),
        ({"eos_token_id": []}, {"eos_token_id": 8}, {8}),
        ({"eos_token_id": 120}, {"vocab_size": 121}, {120}),
        (None, None, set()),
        ({}, {"eos_token_id": None}, set()),
    ],
)
def test_tokens_that_end_an_answer(tmp_path: Path, generation: Any, config: Any, eos_ids: set[int]) -> None:
    assert read(tmp_path, generation, config).eos_ids == eos_ids


@pytest.mark.parametrize("eos", [99_999, -1, [1, 100]])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_an_end_that_no_answer_can_come_to_is_refused(tmp_path: Path, name: str, eos: Any) -> None:
    (tmp_path / name).write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(
        UnusableModel, match=rf"{name}: eos_token_id .* is no token of this model, which has 100"
    ):
        read_generation_defaults(tmp_path, VOCAB_SIZE)


def test_without_the_file_config_json_is_read_as_transformers_does(tmp_path: Path) -> None:
    old = {"do_sample": True, "temperature": 0.3, "eos_token_id": 4}
    expected = GenerationDefaults(frozenset({4}), SamplingDefaults(temperature=0.3), VOCAB_SIZE)
    assert read(tmp_path, None, old) == expected
    with pytest.raises(UnusableModel, match=r"^config\.json of .*num_beams 3"):
        read(tmp_path, None, old | {"num_beams": 3})
    assert read(tmp_path, {}, old | {"num_beams": 3}).sampling == SamplingDefaults()


def test_a_model_of_more_than_text_has_its_keys_in_its_text_config(tmp_path: Path) -> None:
    found = read(tmp_path, None, {"vision_config": {}, "text_config": {"eos_token_id": 7, "vocab_size": 50}})
    assert (found.eos_ids, found.vocab_size) == (frozenset({7}), 50)
