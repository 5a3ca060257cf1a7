"""An engine's settings: one frozen value, each of whose fields declares a setting
(`shared.process.settings`).

A setting is an option (`--max-model-len 4096`), a variable (`PENSTOCK_ENGINE_MAX_MODEL_LEN=4096`) and a key
of the TOML file that `--config` names (`max_model_len = 4096`), of which the first that is given wins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from engine.contract.embedders import read_cuts
from engine.runtime.setup.runner_config import CONTEXT_LEN_MAX, RunnerConfig, Seconds
from shared.apis.holding import memory_max
from shared.process import setting_values
from shared.process.arguments import Parser, add_settings
from shared.process.setting_values import ConfigError
from shared.process.settings import LogLevel, ModelName, Port, Rule, Text, Unit, option_of
from shared.telemetry.tracing import CollectorUrl, TracingConfig
from shared.wire.shapes import BODY_LEN_MAX

ENV_PREFIX: Final = "PENSTOCK_ENGINE_"
COUNT_MAX: Final = 1 << 30
TOKENIZER_THREADS_MAX: Final = 64
MIB: Final = 1 << 20
MEMORY_MIN: Final = MIB
"""Bytes. Less than this is a size whose unit was forgotten."""
MEMORY_MAX: Final = 1 << 50
REQUEST_MEMORY_MIN: Final = -(-memory_max(BODY_LEN_MAX) * 4 // 3 // MIB) * MIB
"""Bytes, whole MiB. The largest body must fit into one tenant's three quarters."""

Memory = Annotated[int, Meta(ge=MEMORY_MIN, le=MEMORY_MAX)]
MemoryOr0 = Annotated[
    int,
    Rule("be 0, or a size from 1MiB to 1024TiB", lambda size: size == 0 or MEMORY_MIN <= size <= MEMORY_MAX),
]
Count = Annotated[int, Meta(ge=1, le=COUNT_MAX)]

NO_NAMES: Final = "none"
TEMPLATE_LEN_MAX: Final = 32 * 1024


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _is_object(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


def _are_lens(text: str) -> bool:
    try:
        read_cuts(text)
    except ValueError:
        return False
    return True


EmbeddingLens = Annotated[
    str, Meta(min_length=1, max_length=256), Rule("be numbers separated by commas, or any", _are_lens)
]
TemplateNames = Annotated[
    str,
    Meta(min_length=1, max_length=TEMPLATE_LEN_MAX),
    Rule("be names separated by commas, or none", lambda text: all(map(str.isidentifier, _names(text)))),
]
TemplateDefaults = Annotated[
    str, Meta(min_length=1, max_length=TEMPLATE_LEN_MAX), Rule("be a JSON object", _is_object)
]

_SNAPSHOT: Final = re.compile(r".*/models--([^/]+)/snapshots/[0-9a-f]{40}")

GONE: Final = {"kv_host_tier": "gone: host memory keeps what is evicted wherever swap_memory is not 0"}
"""Sentences on what became of settings that are no more, by name."""
HEADINGS: Final[Mapping[str, str]] = {
    "model": "model",
    "page_size": "memory",
    "max_num_seqs": "scheduling",
    "host": "network and requests",
    "startup_timeout_s": "start, end and log",
}
"""The headings of `--help` and of the tables, by the setting that is the first below each."""


@dataclass(frozen=True, slots=True)
class EngineConfig(RunnerConfig):
    """Everything that an engine is told: the runner's settings, and those of all around it.

    Raises ConfigError, which names every setting that is out of range.
    """

    # an operator has less choice than a test with a tiny model
    max_model_len: Annotated[int, Meta(ge=2, le=CONTEXT_LEN_MAX), Unit("tokens")] | None = None
    page_size: Literal[16, 32, 64, 128, 256] = 64
    kv_cache_memory: Memory | None = None
    swap_memory: MemoryOr0 | None = None

    gap_target_ms: Annotated[float, Meta(gt=0.0)] = 100.0
    """The longest gap that running streams are to see when prompts are computed beside them. inf: as long as
    max_step_tokens takes."""
    gap_target_priority_ms: Annotated[float, Meta(gt=0.0)] = 50.0
    """The longest gap while a stream of the class priority runs."""
    gap_target_flex_ms: Annotated[float, Meta(gt=0.0)] = 500.0
    """The longest gap while only streams of the class flex run."""
    prompt_share: Annotated[float, Meta(ge=0.05, le=0.9)] = 0.5
    """The least share of the time that prompts have when no gap target can be kept: one half makes gaps at
    most twice as long as without prompts."""
    max_queue_len: Annotated[Count, Unit("sequences")] = 256
    """Sequences that may wait; beyond it requests get 503 with Retry-After at once."""
    max_queue_tokens: Count = 1 << 20
    """Prompt tokens that may wait; beyond it requests get 503 at once, though one request of a tenant may
    always wait."""
    discipline: Literal["response-ratio", "fifo"] = "response-ratio"
    """Which of those that wait goes first: by class, tenant, length and waiting, or first come first
    served."""
    session_keep_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 30.0
    """The prefix cache keeps for this time, before all else, what a request leaves that belongs to a session
    or may call tools, so that the next turn finds it when the tool has run: half of the cache at most. 0: it
    is cached like any other."""
    overlap: bool | None = None
    """Plan the next step while one is computed. Unset: on a GPU; a CPU gains nothing."""

    host: Text = "127.0.0.1"
    """Address to listen on."""
    port: Port = 8001
    """Port to listen on; 0 takes any free one, which the log line engine.listening names."""
    probe_port: Port | None = None
    """Port for probes and /metrics alone, always in plain text: for a kubelet and for Prometheus, which have
    no certificate. Unset: only the other port has them."""
    served_model_name: ModelName | None = None
    """Name that clients use. Unset: the last part of the model's directory or id, and of a snapshot in the
    hub's cache OWNER/NAME."""
    template_arguments: TemplateNames | None = None
    """Variables of the chat template that requests may set in chat_template_kwargs, separated by commas;
    none: no variable. Unset: those that the template reads and does not set itself."""
    template_defaults: TemplateDefaults | None = None
    """JSON object with values for variables of the chat template that a request does not set, or may not set,
    such as {"enable_thinking": false}."""
    embedding_dimensions: EmbeddingLens | None = None
    """The lengths to which a request may cut vectors (dimensions): numbers, separated by commas, or any, for
    a model that was made for it (Matryoshka). Unset: what its config.json says (is_matryoshka,
    matryoshka_dimensions), else none."""
    answer_format: Text = "auto"
    """How the model marks reasoning and calls: the name of a family, or a file (see "Answers" in the README);
    none: neither is looked for. auto: the checkpoint's response_template, else its family's."""
    reranker: Literal["auto", "qwen3", "none"] = "auto"
    """Says that the model ranks documents (/v1/rerank), as Qwen3-Reranker does. auto: where its files say so:
    a LogitScore in modules.json, is_original_qwen3_reranker in config.json, or the question in its chat
    template. The first checkpoints of Qwen3-Reranker say nothing of it: qwen3."""
    tls_cert: Text | None = None
    """File with the certificate chain, PEM: serve TLS, HTTP/2 by ALPN. Unset: plain text."""
    tls_key: Text | None = None
    """File with its private key, PEM."""
    tls_client_ca: Text | None = None
    """File with an authority's certificate, PEM: let in only clients, probes too, that have a certificate of
    it (mTLS)."""
    request_memory: Annotated[int, Meta(ge=REQUEST_MEMORY_MIN, le=MEMORY_MAX)] = 1 << 30
    """Memory of the API process for bodies, prompts and answers of requests. A tenant has three quarters of
    it at most; beyond it requests get 503."""
    tokenizer_threads: Annotated[int, Meta(ge=1, le=TOKENIZER_THREADS_MAX)] = 2
    """Threads that tokenize."""
    body_timeout_s: Seconds = 30.0
    """A request body must have arrived after this time."""
    keepalive_timeout_s: Seconds = 75.0
    """An idle connection is closed after this time."""
    stall_deadline_s: Seconds = 60.0
    """A stream that its client does not read ends after this time."""
    stream_keepalive_s: Seconds | None = None
    """A stream that had nothing to say for this time, and at most twice as long, is sent a keep-alive: in
    Messages a ping, else a comment. Unset: 10 s in Messages, none in any other API."""

    startup_timeout_s: Seconds = 900.0
    """Loading and warming up may take this long."""
    core_timeout_s: Seconds = 30.0
    """A core that has not answered for this time takes no requests until it answers again, and those that it
    holds end; more than the longest step takes."""
    drain_timeout_s: Seconds = 30.0
    """After SIGTERM open answers may finish for this time."""
    exit_on_failure: bool = False
    """When the process that computes has died, tell the open requests and exit with status 5, for systemd's
    Restart=on-failure. Off: stay and answer 500 to /livez, for a liveness probe."""
    otlp_endpoint: CollectorUrl | None = None
    """URL that takes requests' spans by OTLP over HTTP, such as http://collector:4318/v1/traces; it needs the
    extra otel. Unset: what OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT say.
    OTEL_SDK_DISABLED=true and OTEL_TRACES_EXPORTER=none end any export."""
    trace_ratio: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Part of the traces that are exported, where no traceparent decides; a gateway always sends one."""
    trace_errors: bool = True
    """Export every request that failed. On unless --no-trace-errors is given."""
    trace_slow_s: Annotated[float, Meta(gt=0.0, le=86_400.0)] | None = None
    """Export every request that took this long. Unset: none for that reason."""
    vllm_metrics: bool = False
    """Tell the main figures under vLLM's names, too, such as vllm:num_requests_waiting, for dashboards and
    routers that query those."""
    log_level: LogLevel = "info"
    """Lowest level that is logged."""

    def contradictions(self) -> Iterator[str]:
        """The problems that no single setting shows."""
        yield from RunnerConfig.contradictions(self)  # not super(): slots=True makes the class anew
        if self.kv_disk_dir is not None and not self.prefix_cache:
            yield "--kv-disk-dir needs the prefix cache, and --no-prefix-cache is given"
        if (self.tls_cert is None) != (self.tls_key is None):
            yield "--tls-cert and --tls-key belong together"
        if self.tls_client_ca is not None and self.tls_cert is None:
            yield "--tls-client-ca needs --tls-cert and --tls-key"
        if self.probe_port == self.port != 0:
            yield "--probe-port and --port must differ"

    @property
    def name(self) -> str:
        """The name that clients use."""
        return self.served_model_name or served_name(self.model)

    @property
    def template_names(self) -> tuple[str, ...] | None:
        """The variables of the chat template that requests may set. None for those that it reads."""
        names = self.template_arguments
        return None if names is None else () if names == NO_NAMES else _names(names)

    @property
    def tracing(self) -> TracingConfig:
        """The settings of spans, as both services have them."""
        return TracingConfig(self.otlp_endpoint, self.trace_ratio, self.trace_errors, self.trace_slow_s)

    @property
    def runner(self) -> RunnerConfig:
        """The runner's part of the settings."""
        return RunnerConfig(**{field.name: getattr(self, field.name) for field in fields(RunnerConfig)})


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """The tokens of a model, as grammars need to know them."""

    tokenizer_json: str
    """The whole tokenizer, with the tokens that other files add to it."""
    vocab_size: int
    """The number of token ids that the model has."""
    end_ids: tuple[int, ...]
    """The tokens that end an answer."""


@dataclass(frozen=True, slots=True)
class CoreStart:
    """The core process's standard input."""

    config: EngineConfig
    inbox: str
    """ZeroMQ endpoint the core reads `CoreInput` from."""
    outbox: str
    """ZeroMQ endpoint the core writes `CoreOutput` to."""
    parent_pid: int
    """The API process: the core ends when it does."""
    tokens: ModelTokens = ModelTokens("", 0, ())

    def encode(self) -> bytes:
        """MessagePack, because JSON has no infinity, which `gap_target_ms` may be."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> CoreStart:
        """The inverse of `encode`."""
        return msgspec.msgpack.decode(data, type=CoreStart)


def build_parser(prog: str = "penstock engine") -> Parser:
    """The command line, for `python -m engine serve`, `penstock engine` and `penstock up` alike."""
    parser = Parser(
        prog=prog,
        description="Serve one model over OpenAI's HTTP API.",
        epilog="Every option but --config can also be set in the environment, --max-model-len as "
        f"{ENV_PREFIX}MAX_MODEL_LEN; a variable that is empty counts as unset.",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE.toml",
        help="file with settings, such as max_model_len = 4096; options and variables win over it",
    )
    add_settings(parser, EngineConfig, HEADINGS)
    parser.gone = {option_of(path): told for path, told in GONE.items()}
    return parser


def from_args(argv: Sequence[str], env: Mapping[str, str], parser: Parser | None = None) -> EngineConfig:
    """The settings that a command line, variables and a file make. On wrong ones it prints what is right and
    leaves with status 2, as argparse does."""
    parser = parser or build_parser()
    given = vars(parser.parse_args(argv))
    file: Path | None = given.pop("config")
    try:
        return setting_values.load(EngineConfig, file or {}, env, ENV_PREFIX, given, gone=GONE)
    except ConfigError as error:
        parser.error("\n  ".join(error.problems if len(error.problems) < 2 else ["", *error.problems]))


def served_name(model: str) -> str:
    """The name of a model that is given none: the last part of its hub id, or of its directory's whole path,
    so that `.` has one too. A snapshot in the hub's cache has the name of its repository."""
    path = os.path.abspath(os.path.expanduser(model))
    if snapshot := _SNAPSHOT.fullmatch(path):
        return snapshot[1].replace("--", "/")
    return Path(path).name or "model"
