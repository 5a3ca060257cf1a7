"""What the READMEs say holds: their commands, files, links, settings, limits, formulas and errors.

Each check names the document that makes the statement. Numbers are read from the documents' tables: one that
changes in the code must change in its document.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import tokenize
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Final

import pytest
import yaml

from engine.api.answer import encoder, outputs
from engine.api.answer import exchange as engine_exchange
from engine.api.ask import admission, engine_state, prompt_packing
from engine.config import EngineConfig
from engine.config import build_parser as engine_parser
from gateway import __main__ as gateway_main
from gateway.admission import tokens
from gateway.client import connection
from gateway.config import whole as config
from gateway.config.edge import LimitsConfig
from gateway.config.timeouts import TimeoutsConfig
from gateway.identity import jwt
from gateway.identity.keys import hash_key
from gateway.listen import listener
from gateway.operators import listener as admin_listener
from gateway.relay import stream
from gateway.request import pipeline
from shared import cli
from shared.apis import chat_form, decisions, holding, patterns, rerank, schemas, structure, tools, validation
from shared.apis.chat import ChatRequest
from shared.apis.completions import CompletionRequest
from shared.cli.service import SERVICES
from shared.fairness import fair_share, fair_turns
from shared.http2 import limits as http2_limits
from shared.process import accepting, listening
from shared.process.settings import walk
from shared.text import known_pieces, prompts, rendering, text_slices
from shared.wire import errors, shapes
from shared.wire.end_reason import MEANINGS
from tests.bench import __main__ as bench
from tests.bench import memory_sums as memory

ROOT: Final = Path(__file__).parent.parent
TOPS: Final = ("engine", "gateway", "shared", "tests")
CODE: Final = ("engine", "gateway", "shared", "tests/bench")

README: Final = ROOT / "README.md"
API: Final = ROOT / "shared/API.md"
CHANGES: Final = "shared/CHANGELOG.md"
GATEWAY: Final = ROOT / "gateway/README.md"
ENGINE: Final = ROOT / "engine/README.md"
DOCUMENTS: Final = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (
        README,
        *(
            path
            for top in TOPS
            for path in sorted([*(ROOT / top).glob("*.md"), *(ROOT / top).glob("docs/*.md")])
        ),
        *sorted((ROOT / ".github").glob("[A-Z]*.md")),
    )
}
EVERYTHING: Final = "\n".join(DOCUMENTS.values())


def blocks(text: str, language: str) -> list[str]:
    """The contents of a document's code blocks in one language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def rows(text: str, header: str) -> list[list[str]]:
    """The cells of a table's rows, given the beginning of its first line."""
    lines = text[text.index(header) :].splitlines()[2:]
    return [line.strip("| ").split(" | ") for line in lines[: lines.index("")]]


def statements(text: str, header: str) -> dict[str, str]:
    """A table's first column, to its last."""
    return {first: last for first, *_, last in rows(text, header)}


def numbers(text: str) -> list[int]:
    """The whole numbers in a cell, in bytes where it names a unit of bytes."""
    units = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
    found = re.findall(r"(\d[\d,]*)(?: (KiB|MiB|GiB))?", text)
    return [int(number.replace(",", "")) * units.get(unit, 1) for number, unit in found]


# -- the documents themselves ---------------------------------------------------------------------


def test_the_readme_leads_to_every_other_document() -> None:
    """But for what a forge shows by itself."""
    linked = set(re.findall(r"\]\(([^)#]+)", README.read_text()))
    assert set(DOCUMENTS) - {"README.md", ".github/SECURITY.md"} <= linked


def anchors(text: str) -> set[str]:
    """The fragments that GitHub gives to a document's headings."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_within_the_repository_leads_somewhere() -> None:
    broken = []
    for document, text in DOCUMENTS.items():
        for target, fragment in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
            file = (ROOT / document).parent / target if target else ROOT / document
            if not file.is_file() or (fragment and fragment not in anchors(file.read_text())):
                broken.append(f"{document}: {target}#{fragment}")
    assert broken == []


def test_every_file_that_is_named_is_there() -> None:
    outside_models, missing = {"tokenizer.json", "config.json"}, []
    for document, text in DOCUMENTS.items():
        named = re.findall(rf"(?<![\w/.-])(?:{'|'.join(TOPS)})/[\w./-]*\w", text)
        in_backticks = re.findall(r"`([\w.-]+(?:/[\w.-]+)*\.(?:py|md|sh|jsonl))`", text)
        paths = {*named, *in_backticks} - outside_models
        missing += [f"{document}: {path}" for path in paths if not (ROOT / path).exists()]
    assert missing == []


def test_every_test_that_is_named_is_there() -> None:
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", EVERYTHING):
        found = re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)
        assert found, f"{path}::{name}"


# -- commands -------------------------------------------------------------------------------------


def command_lines(text: str, program: str) -> Iterator[list[str]]:
    """The words that follow a program's name, in code blocks and between backticks."""
    lines = "\n".join(blocks(text, "bash")).splitlines()
    code = [line.partition(" #")[0] for line in lines]
    code += re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    of_others = ("helm ", "kubectl ", "export ", "git ")
    for line in (one for one in code if not one.startswith(of_others)):
        for words in re.findall(rf"(?:^|[\s/]){re.escape(program)} ([^&\n]+)", line):
            yield words.split()


def help_of(run: Callable[[list[str]], object], *command: str) -> str:
    """What a command line prints when it is asked for help."""
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
        run([*command, "--help"])
    return out.getvalue()


@cache
def options_of(*command: str) -> frozenset[str]:
    """The options that `penstock COMMAND --help` tells. Those of the engine work with `up`, too."""
    match command:
        case ("engine",):
            text = help_of(engine_parser().parse_args)
        case ("gateway",):
            text = help_of(gateway_main.main)
        case _:
            text = help_of(cli.build_parser(command[0])[0].parse_args, *command)
    known = frozenset(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", text))
    return known | options_of("engine") if command == ("up",) else known


def bench_names() -> list[str]:
    """The benches that `python -m tests.bench --help` tells."""
    text = help_of(bench.main)
    return re.findall(r"^    (\w+)", text, re.MULTILINE)


def bench_options(name: str) -> frozenset[str]:
    """The options that `python -m tests.bench NAME --help` tells."""
    return frozenset(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", help_of(bench.main, name)))


def test_every_command_that_is_named_is_one_that_the_command_line_knows() -> None:
    for words in command_lines(EVERYTHING, "penstock"):
        command, *rest = words
        if command == "--version":
            continue
        assert command in cli.COMMANDS.keys() | SERVICES.keys(), words
        of_command = rest.pop(0).split(r"\|") if command in ("bench", "keys", "tenants") and rest else [""]
        given = {word for word in rest if word.startswith("-")}
        for one in of_command:
            assert given <= options_of(command, *filter(None, [one])), words
    for names, *rest in command_lines(EVERYTHING, "python -m tests.bench"):
        for one in names.split(r"\|"):
            assert one in bench_names()
            assert {word for word in rest if word.startswith("-")} <= bench_options(one), rest


def test_every_module_that_is_to_be_run_is_there() -> None:
    for name, *_ in command_lines(EVERYTHING, "python -m"):
        spec = importlib.util.find_spec(name)
        assert spec is not None, name
        assert spec.submodule_search_locations is None or importlib.util.find_spec(f"{name}.__main__"), name


def test_every_option_that_is_named_exists() -> None:
    known = {option for command in ("up", "chat", *SERVICES) for option in options_of(command)}
    known |= options_of("keys", "create") | options_of("init")
    known |= {option for name in bench_names() for option in bench_options(name)} | options_of(
        "bench", "serve"
    )
    gone = set(re.findall(r"--[a-z][a-z-]+", (ROOT / CHANGES).read_text()))
    assert set(re.findall(r"`(--[a-z][a-z-]+)`", EVERYTHING)) <= known | gone


_OF_AN_ANSWER: Final = re.compile(r"(?:usage|error|stream_options|custom_tool_call_input)\.")
"""Fields, and events of a stream, of others' APIs."""
_FILES_OF_OTHERS: Final = {"opencode.json", "ca.crt", "torch.load"}


def _values_of_the_chart(values: Mapping[str, object], path: str = "") -> Iterator[str]:
    for name, inside in values.items():
        here = f"{path}.{name}".lstrip(".")
        yield here
        if isinstance(inside, Mapping):
            yield from _values_of_the_chart(inside, here)


def test_every_setting_value_and_event_that_is_named_is_one() -> None:
    """Of all names with a dot: `limits.live_max`, `engine.replicas`, `token.refused`."""
    chart = yaml.safe_load((ROOT / "helm/values.yaml").read_text())
    settings = {one.path for kind in (config.GatewayConfig, EngineConfig) for one in walk(kind)}
    known = {f"gateway.{one.name}" for one in walk(config.ModelConfig)}  # of an entry of models
    for path in (*_values_of_the_chart(chart), *settings, "source.hub"):
        parts = path.replace("[]", "").split(".")
        known |= {".".join(parts[at:]) for at in range(len(parts))}
    sources = [path for top in TOPS[:3] for path in sorted((ROOT / top).rglob("*.py"))]
    literals = set(re.findall(r'"([a-z_]+\.[a-z_.]+)"', "".join(path.read_text() for path in sources)))
    texts = {name: text for name, text in DOCUMENTS.items() if name != CHANGES}
    texts |= {str(path): path.read_text() for path in (ROOT / "helm").glob("*.md")}
    for name, text in texts.items():
        named = set(re.findall(r"`([a-z][a-z_]*\.[a-z_][a-z_.]*)`", text))
        strange = {one for one in named - known - literals - _FILES_OF_OTHERS if not _OF_AN_ANSWER.match(one)}
        assert not strange, name


def test_every_command_is_in_the_readme() -> None:
    lines = list(command_lines(README.read_text(), "penstock"))
    assert {command for command, *_ in lines} == cli.COMMANDS.keys() | SERVICES.keys()


def test_every_bench_is_told_of() -> None:
    assert {name for name, *_ in command_lines(EVERYTHING, "python -m tests.bench")} == set(bench_names())


def test_ci_runs_the_test_command_word_for_word() -> None:
    pattern = re.search(r"grep -m1 '(.+?)' README.md", (ROOT / ".ci" / "run").read_text())
    assert pattern is not None
    [line] = [line for line in README.read_text().splitlines() if re.search(pattern[1], line)]
    assert line in "".join(blocks(README.read_text(), "bash"))


# -- the gateway's configuration ------------------------------------------------------------------


def test_the_gateways_file_is_a_configuration() -> None:
    text = blocks(GATEWAY.read_text(), "toml")[0]
    loaded = config.load(tomllib.loads(text.replace("sha256:...", hash_key("any"))), {})
    assert loaded.models[0].aliases == ("gpt-5.4",)
    assert loaded.keys[0].limits.token_budget == 50_000_000


# -- limits and memory ----------------------------------------------------------------------------


BOUNDS_OF_A_REQUEST: Final[dict[str, list[float]]] = {
    "request body": [shapes.BODY_LEN_MAX, TimeoutsConfig().body_s],
    "values in it; fields of all objects; strings; fields at its top level; levels of nesting": [
        holding.VALUES_MAX,
        holding.FIELDS_MAX,
        holding.STRINGS_MAX,
        validation.FIELDS_MAX,
        holding.DEPTH_MAX,
    ],
    "request line, header, headers; all of them at the gateway": [
        listening.LINE_LEN_MAX,
        listening.HEADER_LEN_MAX,
        listening.HEADERS_MAX,
        connection.HEAD_LEN_MAX,
    ],
    "messages; items of a response's input; prompts; `n`; choices in all": [
        shapes.MESSAGES_MAX,
        shapes.ITEMS_MAX,
        shapes.PROMPTS_MAX,
        shapes.CHOICES_MAX,
        shapes.PROMPTS_MAX,
    ],
    "tokens of all prompts; characters without a word's end": [
        holding.TOKENS_MAX,
        text_slices.RUN_LEN_MAX,
    ],
    "an answer, log-probabilities included, as estimated from what is asked for": [admission.ANSWER_LEN_MAX],
    "documents of a ranking; questions of decisions; choices; levels; bytes of a part of JSON": [
        rerank.DOCUMENTS_MAX,
        decisions.QUESTIONS_MAX,
        decisions.CHOICES_MAX,
        decisions.LEVELS_MAX,
        decisions.JSON_LEN_MAX,
    ],
    "`stop` strings; length; `stop_token_ids`; `logit_bias`": [
        shapes.STOP_MAX,
        shapes.STOP_LEN_MAX,
        shapes.STOP_TOKEN_IDS_MAX,
        shapes.LOGIT_BIAS_MAX,
    ],
    "`logprobs`, `top_logprobs`": [shapes.LOGPROBS_MAX],
    "`tools`; characters of a name": [shapes.TOOLS_MAX, tools.NAME_LEN_MAX],
    "values in the `arguments` of all calls; fields; strings; levels of nesting": [
        holding.VALUES_MAX,
        holding.FIELDS_MAX,
        holding.STRINGS_MAX,
        holding.DEPTH_MAX,
    ],
    "`chat_template_kwargs`; levels of nesting": [
        chat_form.ARGUMENTS_LEN_MAX,
        chat_form.ARGUMENTS_DEPTH_MAX,
    ],
    "a schema; `regex`; `grammar`; items of `choice`; the length of one": [
        schemas.SCHEMA_LEN_MAX,
        patterns.PATTERN_LEN_MAX,
        structure.GRAMMAR_LEN_MAX,
        structure.CHOICES_MAX,
        structure.CHOICE_LEN_MAX,
    ],
}


def test_the_bounds_of_a_request_are_those_of_the_code() -> None:
    stated = {
        what: numbers(bound) for what, bound in statements(API.read_text(), "| what | number |").items()
    }
    assert stated == BOUNDS_OF_A_REQUEST


STAGES: Final = ("| stage | reserved before it |", "| stage | bytes held |")
"""The tables of what a request may cost: what is reserved, and what each stage does at most."""


def test_what_is_reserved_before_a_stage_is_what_the_code_says() -> None:
    text = GATEWAY.read_text()
    stated = {what: numbers(bound) for what, bound in statements(text, STAGES[0]).items()}
    shares = 2 * [fair_share.ALPHA, fair_share.ALPHA + 1]
    assert {what: bounds for what, bounds in stated.items() if bounds} == {
        "seat": [int(errors.RateLimited.status), *shares],
        "answer": [admission.WINDOW_TOKENS],
    }


def test_what_a_request_may_cost_is_what_the_code_says() -> None:
    text, limits = GATEWAY.read_text(), LimitsConfig()
    costs = rows(text, STAGES[1])
    assert {cells[0]: [numbers(cell) for cell in cells[1:]] for cells in costs} == {
        "auth": [[connection.HEAD_LEN_MAX], [jwt.TOKEN_LEN_MAX], [], [], []],
        "seat": [[], [fair_turns.BEGIN_MAX], [], [], []],
        "body": [[limits.body_len_max, 2 * connection.BUFFER_LEN], [fair_turns.BEGIN_MAX], [], [], []],
        "validate": [
            [holding.memory_max(limits.body_len_max), limits.body_len_max],
            [validation.INLINE_LEN_MAX],
            [holding.SLICE_LEN],
            [],
            [],
        ],
        "tokenize": [
            [holding.TOKENS_MAX, rendering.APART_LEN, rendering.MEMORY_MAX],
            [tokens.INLINE_LEN_MAX],
            [text_slices.SLICE_LEN, int(rendering.RENDER_S_MIN), int(rendering.RENDER_S)],
            [],
            [],
        ],
        "quota": [[], [], [], [], []],
        "the engine's door": [
            [admission.ANSWER_LEN_MAX],
            [engine_state.IN_ONE_TURN],
            [prompt_packing.INLINE_IDS_MAX, prompts.SLICE_IDS],
            [],
            [1, admission.ANSWER_LEN_MAX],
        ],
        "queue": [[memory.SEQUENCE, memory.TOKEN], [], [], [], []],
        "answer": [
            [admission.WINDOW_TOKENS],
            [engine_exchange.WRITE_LEN, encoder.PIECE_ENTRIES],
            [],
            [outputs.UNSENT_TOKENS_MAX],
            [],
        ],
        "relay": [
            [stream.HEAD_LEN_MAX, http2_limits.STREAM_WINDOW_LEN, connection.WRITE_BUFFER_LEN],
            [],
            [],
            [],
            [],
        ],
        "settle": [[round(1000 * pipeline.REPORT_S)], [], [], [], []],
    }


def test_the_stages_of_what_a_request_may_cost_are_those_of_the_pipeline() -> None:
    """Those that choose a replica and connect to it hold nothing but the request."""
    order = re.findall(r"^    ([a-z]+) +[a-z]", str(pipeline.__doc__).partition("Rules")[0], re.MULTILINE)
    costs = [cells[0] for cells in rows(GATEWAY.read_text(), STAGES[1])]
    at_the_engine = ["the engine's door", "queue", "answer"]
    assert [stage for stage in costs if stage not in at_the_engine] == [
        stage for stage in order if stage not in ("tenant", "route", "connect", "wait")
    ]


def test_the_settings_that_bound_what_a_request_may_cost_exist() -> None:
    for header in STAGES:
        cells = " ".join(cell for cells in rows(GATEWAY.read_text(), header) for cell in cells)
        assert set(re.findall(r"`(\w+)`", cells)) <= {*(field.name for field in fields(LimitsConfig)), "n"}


def test_what_a_live_request_has_in_buffers_is_within_its_part_of_the_formula() -> None:
    buffers = (
        stream.HEAD_LEN_MAX,
        http2_limits.STREAM_WINDOW_LEN,
        connection.WRITE_BUFFER_LEN,
        2 * connection.BUFFER_LEN,
    )
    assert sum(buffers) <= memory.LIVE_REQUEST


def test_the_formulas_of_memory_are_those_of_the_code() -> None:
    header, options = "| process | bytes |", EngineConfig("any")
    gateway, engine = statements(GATEWAY.read_text(), header), statements(ENGINE.read_text(), header)
    assert gateway["gateway"].startswith(f"{memory.FRAGMENTATION} x `request_memory`")
    assert engine["the engine's API"].startswith(f"{memory.FRAGMENTATION} x `--request-memory`")
    stated = {process: numbers(terms) for process, terms in (gateway | engine).items()}
    memory_max = LimitsConfig().request_memory
    terms = memory_max, memory.LIVE_REQUEST, memory.THREAD, memory.CONNECTION, memory.HOLDING
    assert stated["gateway"][2:] == [*terms, memory.PIECES, 2 * rendering.MEMORY_MAX]
    assert stated["gateway with TLS"] == [memory.TLS_LARGE, accepting.HANDSHAKES_MAX, memory.TLS]
    terms_of_api = options.request_memory, memory.STREAM, memory.THREAD, 2 * rendering.MEMORY_MAX
    assert stated["the engine's API"][2:] == [*terms_of_api]
    assert stated["its core, on a CPU"] == [memory.SEQUENCE, memory.TOKEN, memory.LOGIT, memory.STEP]


def test_the_parts_of_memory_are_the_bounds_of_the_code() -> None:
    assert known_pieces.KEPT_LEN_MAX * memory.FRAGMENTATION == memory.PIECES
    assert 2 * listener.RECEIVE_BUFFER_LEN + 2 * listener.SEND_BUFFER_LEN == memory.SOCKET
    one = memory.CONNECTION + memory.HOLDING // listener.HOLDING_MAX + 2 * memory.TLS + memory.TLS_LARGE
    assert admin_listener.CONNECTIONS_MAX * one == memory.ADMIN


# -- what a caller and an operator are told -------------------------------------------------------


def kinds_of(kind: type[errors.ApiError]) -> Iterator[type[errors.ApiError]]:
    """An error class and all that derive from it."""
    yield kind
    for child in kind.__subclasses__():
        yield from kinds_of(child)


def test_every_code_of_an_error_is_listed_with_its_status() -> None:
    stated = {
        (code, int(status))
        for codes, status, _ in rows(API.read_text(), "| code | status |")
        for code in re.findall(r"`(\w+)`", codes)
    }
    told = {(kind.code, int(kind.status)) for kind in kinds_of(errors.ApiError)}
    assert stated == told


def test_every_field_that_the_api_lists_is_one_of_a_request() -> None:
    known = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    listed = {
        name
        for cells in rows(API.read_text(), "| field | values |")
        for name in re.findall(r"`(\w+)`", cells[0])
    }
    assert listed <= known
    no_wish = {"model", "messages", "prompt", "stream", "stream_options", "echo", "penstock"}
    of_others = {"best_of", "verbosity", "functions", "function_call", "modalities", "audio"}
    accepted = set(re.findall(r"`(\w+)`", API.read_text())) - listed
    assert known - listed - no_wish - of_others <= accepted


def test_every_end_of_a_request_is_listed() -> None:
    listed = statements(GATEWAY.read_text(), "| `end_reason` |")
    assert listed == {f"`{reason}`": meaning for reason, meaning in MEANINGS.items()}


def _names_of(source: str) -> set[str]:
    """A module's identifiers, and its strings without quotes."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.string.strip("\"'") for t in tokens if t.type in (tokenize.NAME, tokenize.STRING)}


def test_every_name_in_the_glossary_is_in_the_code() -> None:
    """What stands in backticks in its tables."""
    rows = [line for line in (ROOT / "shared/GLOSSARY.md").read_text().splitlines() if line.startswith("|")]
    names = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    paths = {name for name in names if "/" in name}
    missing = {
        name.removeprefix("--").replace("-", "_") if name.startswith("--") else name for name in names - paths
    }
    assert len(missing) > 50
    for path in (path for top in CODE for path in (ROOT / top).rglob("*.py")):
        source = path.read_text()
        if any(name in source for name in missing):
            missing -= _names_of(source)
    assert missing == set()
    assert [path for path in paths if not (ROOT / path).exists()] == []
