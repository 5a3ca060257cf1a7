"""What README shows works as it stands there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from engine.api import admission, generate
from engine.config import EngineConfig
from engine.config import build_parser as engine_parser
from gateway import app, hygiene
from gateway.config import LimitsConfig, TimeoutsConfig, load
from gateway.identity.keys import hash_key
from gateway.routing import replicas
from shared import census, fair_share, holding, memory, openai, text_slices, validation

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_gateways_file_is_a_configuration() -> None:
    [text] = blocks("toml")
    config = load(tomllib.loads(text.replace("sha256:...", hash_key("any"))), {})
    assert config.models[0].aliases == ("gpt-5.4",)
    assert config.keys[0].limits.token_budget == 50_000_000


def test_ci_runs_the_test_command_word_for_word() -> None:
    pattern = re.search(r"grep -m1 '(.+?)' README.md", (ROOT / ".ci" / "run").read_text())
    assert pattern is not None
    [line] = [line for line in README.splitlines() if re.search(pattern[1], line)]
    assert line in "".join(blocks("bash"))


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:tests|engine|gateway|shared)/[\w/.]+)`", README)))
)
def test_every_file_that_is_named_is_there(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_option_of_the_engine_that_is_named_exists() -> None:
    known = set(re.findall(r"--[a-z][a-z-]+", engine_parser().format_help()))
    assert set(re.findall(r"`(--[a-z][a-z-]+)`", README)) - known == {"--check"}, "which the benches have"


def rows(header: str) -> dict[str, str]:
    """The table whose first row is this one: its first column, to the last."""
    lines = README[README.index(header) :].splitlines()[2:]
    cells = [line.strip("| ").split(" | ") for line in lines[: lines.index("")]]
    return {first: last for first, *_, last in cells}


def numbers(text: str) -> list[int]:
    """Those of a cell, in bytes where it says so."""
    units = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
    found = re.findall(r"(\d[\d,]*)(?: (KiB|MiB|GiB))?", text)
    return [int(number.replace(",", "")) * units.get(unit, 1) for number, unit in found]


def test_the_bounds_of_a_request_are_those_of_the_code() -> None:
    stated = {what: numbers(bound) for what, bound in rows("| what | number |").items()}
    config = EngineConfig("any")
    expected = {
        "request body": [openai.BODY_LEN_MAX, TimeoutsConfig().body_s],
        "values in it; fields of all objects; strings; fields at its top level": [
            census.VALUES_MAX,
            census.FIELDS_MAX,
            census.STRINGS_MAX,
            validation.FIELDS_MAX,
        ],
        "request line, header, headers; all of them at the gateway": [
            app.LINE_LEN_MAX,
            app.HEADER_LEN_MAX,
            app.HEADERS_MAX,
            hygiene.HEAD_LEN_MAX,
        ],
        "messages; prompts; `n`; choices in all": [
            openai.MESSAGES_MAX,
            openai.PROMPTS_MAX,
            openai.CHOICES_MAX,
            openai.PROMPTS_MAX,
        ],
        "tokens of all prompts; characters without a word's end": [
            holding.TOKENS_MAX,
            text_slices.RUN_LEN_MAX,
        ],
        "an answer, log-probabilities included, as estimated from what is asked for": [
            admission.ANSWER_LEN_MAX
        ],
        "`stop` strings; length; `stop_token_ids`; `logit_bias`": [
            openai.STOP_MAX,
            openai.STOP_LEN_MAX,
            openai.STOP_TOKEN_IDS_MAX,
            openai.LOGIT_BIAS_MAX,
        ],
        "`logprobs`, `top_logprobs`": [openai.LOGPROBS_MAX],
    }
    assert {what: stated[what] for what in expected} == expected
    [engine_row] = [bounds for what, bounds in stated.items() if "--max-queue-len" in what]
    assert engine_row[:2] == [config.max_num_seqs, config.max_queue_len]


def test_what_a_request_may_cost_is_what_the_code_says() -> None:
    stages = {what: numbers(bound) for what, bound in rows("| stage | reserved before it").items()}
    assert stages["validate"] == [validation.INLINE_LEN_MAX]
    assert stages["the engine's door"][-1] == admission.ANSWER_LEN_MAX
    assert stages["tokenize"] == [text_slices.SLICE_LEN]
    assert stages["answer"] == [generate.WRITE_LEN]
    assert f"{admission.WINDOW_TOKENS} tokens of each choice" in README
    alpha = fair_share.ALPHA
    assert f"has {alpha}/{alpha + 1} of `live_max`" in README


def test_the_formulas_of_memory_are_those_of_the_code() -> None:
    stated = {process: numbers(terms) for process, terms in rows("| process | bytes |").items()}
    config = EngineConfig("any")
    assert f"{memory.FRAGMENTATION} x `request_memory`" in README
    assert stated["gateway"][2:] == [LimitsConfig().request_memory, memory.LIVE_REQUEST, memory.THREAD]
    assert stated["the engine's API"][2:] == [config.request_memory, memory.STREAM, memory.THREAD]
    assert stated["its core, on a CPU"] == [memory.SEQUENCE, memory.TOKEN, memory.STEP]


def test_what_a_body_is_reckoned_as_is_what_the_code_says() -> None:
    tokens_max = f"{holding.TOKENS_MAX:,}"
    formula = f"`3b + {holding.VALUE_BYTES}v + {holding.TOKEN_BYTES} min(b, {tokens_max})`"
    assert formula in " ".join(README.split())
    rest = 1000 * holding.VALUE_BYTES + 10_000 * holding.TOKEN_BYTES
    for is_narrow, times in ((True, 3), (False, 9)):
        body = census.Census(values=1000, fields=0, strings=0, is_narrow=is_narrow)
        assert holding.memory_of(10_000, body) == times * 10_000 + rest


def test_failed_replicas_cool_as_long_as_it_says() -> None:
    assert replicas.COOLING_S_MIN == 1.0, "for a second"
    assert f"up to {replicas.COOLING_S_MAX:.0f};" in README
