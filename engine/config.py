"""What an engine can be told: one frozen value, and the command line that makes it.

Every option can also be set in the environment, as `PENSTOCK_ENGINE_` and the option's name in
capitals (`PENSTOCK_ENGINE_MAX_MODEL_LEN=4096`); the command line wins.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from shared.arguments import Parser, port

ENV_PREFIX: Final = "PENSTOCK_ENGINE_"
DTYPES: Final = ("auto", "float32", "bfloat16")
DEVICES: Final = ("auto", "cpu", "cuda")
WEIGHTS: Final = ("plain", "int8", "fp8")
KV_CACHE_DTYPES: Final = ("auto", "fp8")
KERNELS: Final = ("auto", "native", "torch")
DISCIPLINES: Final = ("response-ratio", "fifo")
PAGE_SIZES: Final = (16, 32, 64, 128, 256)

_BYTES: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: str
    """A model directory, or a Hugging Face hub id."""
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 8001
    """0 takes any free port; the log line `engine.listening` names it."""
    device: str = "auto"
    dtype: str = "auto"
    weights: str = "plain"
    kernels: str = "auto"
    attention_backend: str = "auto"
    enforce_eager: bool = False
    max_model_len: int | None = None
    page_size: int = 64
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: str = "auto"
    kv_cache_memory: int | None = None
    """Bytes. None: measured from what is free."""
    swap_memory: int | None = None
    """Bytes of host memory. None: measured as well. 0: the preempted are recomputed, always."""
    max_num_seqs: int = 64
    max_step_tokens: int = 2048
    step_time_target_ms: float = 100.0
    max_queue_len: int = 256
    max_queue_tokens: int = 1 << 20
    discipline: str = "response-ratio"
    prefix_cache: bool = True
    overlap: bool | None = None
    """Plan the next step while one is computed. None: when the device computes beside the host."""
    threads: int | None = None
    tokenizer_threads: int = 2
    tensor_parallel_size: int = 1
    """Processes that compute a part of the model each. Memory settings are for each of them."""
    rank_timeout_s: float = 60.0
    startup_timeout_s: float = 900.0
    body_timeout_s: float = 30.0
    keepalive_timeout_s: float = 75.0
    stall_deadline_s: float = 60.0
    drain_timeout_s: float = 30.0
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    log_level: str = "info"

    def __post_init__(self) -> None:
        assert self.model
        assert self.served_model_name
        assert (self.tls_cert is None) == (self.tls_key is None)
        assert self.max_step_tokens >= self.max_num_seqs, "each running sequence needs a token in every step"


@dataclass(frozen=True, slots=True)
class CoreStart:
    """What the core process reads from its standard input, as JSON."""

    config: EngineConfig
    inbox: str
    """ZeroMQ endpoint the core reads `CoreInput` from."""
    outbox: str
    """ZeroMQ endpoint the core writes `CoreOutput` to."""
    parent_pid: int
    """The API process: the core ends when it does."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's options, for `python -m engine serve` and for `penstock engine` alike."""
    _add_model_arguments(parser.add_argument_group("model"))
    _add_memory_arguments(parser.add_argument_group("memory"))
    _add_scheduling_arguments(parser.add_argument_group("scheduling and threads"))
    _add_http_arguments(parser.add_argument_group("network"))


def _add_model_arguments(model: argparse._ArgumentGroup) -> None:
    model.add_argument(
        "--model",
        required=True,
        metavar="DIR|ID",
        help="model directory in Hugging Face layout, or a hub id to download",
    )
    model.add_argument(
        "--served-model-name", metavar="NAME", help="the name clients use (default: the last part of --model)"
    )
    model.add_argument(
        "--device",
        choices=DEVICES,
        default="auto",
        help="what computes: an NVIDIA GPU, or the CPU (default: auto, cuda where torch finds a GPU)",
    )
    model.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="type of weights (default: auto, bfloat16 on a GPU and where the CPU multiplies it, else "
        "float32)",
    )
    model.add_argument(
        "--weights",
        choices=WEIGHTS,
        default="plain",
        help="int8 (on a CPU) and fp8 (on a GPU) keep matrices in 8 bits with a scale per output: half the "
        "memory of bfloat16, and up to twice its tokens per second for a few streams, at some accuracy "
        "(default: plain)",
    )
    model.add_argument(
        "--kernels",
        choices=KERNELS,
        default="auto",
        help="what computes on CPU (default: auto, native where a compiler was there at installation)",
    )
    model.add_argument(
        "--attention-backend",
        default="auto",
        metavar="NAME",
        help="what computes attention on a GPU: triton, cudnn, flash-attn, flashinfer, flashinfer-trtllm or "
        "torch, or one for each phase, as prefill=cudnn,decode=triton (default: auto, a library that is "
        "installed, else ours)",
    )
    model.add_argument(
        "--enforce-eager",
        action="store_true",
        help="on a GPU, launch decode steps kernel by kernel instead of as CUDA graphs: it starts sooner, "
        "takes less memory, and is slower",
    )
    model.add_argument(
        "--tensor-parallel-size",
        type=_count(1),
        default=1,
        metavar="N",
        help="split the model between N processes, on a GPU each where there are any; memory settings are "
        "each one's (default: 1)",
    )
    model.add_argument(
        "--max-model-len",
        type=_count(2),
        metavar="TOKENS",
        help="longest prompt plus answer (default: what the model was made for)",
    )


def _add_memory_arguments(memory: argparse._ArgumentGroup) -> None:
    memory.add_argument(
        "--page-size",
        type=int,
        choices=PAGE_SIZES,
        default=64,
        help="tokens in a page of the KV cache (default: 64)",
    )
    memory.add_argument(
        "--gpu-memory-utilization",
        type=_share,
        default=0.9,
        metavar="SHARE",
        help="share of the GPU's memory for everything: weights, the largest step, graphs, and what is left "
        "for the KV cache (default: 0.9)",
    )
    memory.add_argument(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="on a GPU, fp8 keeps keys and values in 8 bits: twice the tokens (default: auto, as computed)",
    )
    memory.add_argument(
        "--kv-cache-memory",
        type=_byte_count,
        metavar="BYTES",
        help="memory for the KV cache, as 512MiB or 2GiB (default: from what is free)",
    )
    memory.add_argument(
        "--swap-memory",
        type=_byte_count_or_0,
        metavar="BYTES",
        help="host memory that pages of preempted sequences are copied to where that is cheaper than "
        "computing them again, which it nearly always is, on a CPU too; 0: never (default: up to 4GiB, and a "
        "quarter of what is free; taken as it is used)",
    )


def _add_scheduling_arguments(scheduling: argparse._ArgumentGroup) -> None:
    scheduling.add_argument(
        "--max-num-seqs",
        type=_count(1),
        default=64,
        metavar="N",
        help="sequences that run at once (default: 64)",
    )
    scheduling.add_argument(
        "--max-step-tokens",
        type=_count(1),
        default=2048,
        metavar="TOKENS",
        help="token budget of one step; at least --max-num-seqs (default: 2048)",
    )
    scheduling.add_argument(
        "--step-time-target-ms",
        type=_milliseconds,
        default=100.0,
        metavar="MS",
        help="how long prompts may make one step, the longest gap that running streams see. One prompt never "
        "doubles theirs, and two may always make it 2.6 times as long. inf: as long as --max-step-tokens "
        "takes (default: 100)",
    )
    scheduling.add_argument(
        "--max-queue-len",
        type=_count(1),
        default=256,
        metavar="N",
        help="sequences that may wait; beyond it requests get 503 at once (default: 256)",
    )
    scheduling.add_argument(
        "--max-queue-tokens",
        type=_count(1),
        default=1 << 20,
        metavar="TOKENS",
        help="prompt tokens that may wait; the same beyond it, though one request may always wait alone "
        "(default: 1048576)",
    )
    scheduling.add_argument(
        "--discipline",
        choices=DISCIPLINES,
        default="response-ratio",
        help="who of those who wait goes first: by class, tenant, length and waiting, or first come first "
        "served (default: response-ratio)",
    )
    scheduling.add_argument(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_false",
        help="compute every prompt from its first token",
    )
    scheduling.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        help="plan the next step while one is computed (default: on a GPU; a CPU gains nothing)",
    )
    scheduling.add_argument(
        "--threads", type=_count(1), metavar="N", help="compute threads on CPU (default: one per core)"
    )
    scheduling.add_argument(
        "--tokenizer-threads",
        type=_count(1),
        default=2,
        metavar="N",
        help="threads that tokenize (default: 2)",
    )


def _add_http_arguments(http: argparse._ArgumentGroup) -> None:
    http.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    http.add_argument("--port", type=port, default=8001, help="port, 0 for any free one (default: 8001)")
    http.add_argument("--tls-cert", metavar="FILE", help="certificate chain, PEM: serve TLS, HTTP/2 by ALPN")
    http.add_argument("--tls-key", metavar="FILE", help="its private key, PEM")
    http.add_argument(
        "--tls-client-ca",
        metavar="FILE",
        help="PEM: let only clients in that have a certificate of this authority (mTLS), probes too",
    )
    http.add_argument(
        "--startup-timeout-s",
        type=_seconds,
        default=900.0,
        metavar="S",
        help="loading and warming up may take this long (default: 900)",
    )
    http.add_argument(
        "--rank-timeout-s",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="with --tensor-parallel-size: the engine fails when one of its processes has not done its part "
        "of a step after so many seconds (default: 60)",
    )
    http.add_argument(
        "--body-timeout-s",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="a request body must have arrived after so many seconds (default: 30)",
    )
    http.add_argument(
        "--keepalive-timeout-s",
        type=_seconds,
        default=75.0,
        metavar="S",
        help="an idle connection is closed after so many seconds (default: 75)",
    )
    http.add_argument(
        "--stall-deadline-s",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="a stream that its client does not read ends after so many seconds (default: 60)",
    )
    http.add_argument(
        "--drain-timeout-s",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="after SIGTERM open answers may finish for so long (default: 30)",
    )
    http.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="lowest level that is logged (default: info)",
    )


def build_parser(prog: str = "penstock engine") -> argparse.ArgumentParser:
    parser = Parser(
        prog=prog,
        description="Serve one model over OpenAI's HTTP API.",
        epilog=f"Every option can be set in the environment: --max-model-len as {ENV_PREFIX}MAX_MODEL_LEN.",
    )
    add_arguments(parser)
    return parser


def from_args(
    argv: Sequence[str], env: Mapping[str, str], parser: argparse.ArgumentParser | None = None
) -> EngineConfig:
    """Parse; on a wrong value print what is right and leave with status 2, as argparse does."""
    parser = parser or build_parser()
    _apply_environment(parser, env)
    return from_namespace(parser, parser.parse_args(argv))


def from_namespace(parser: argparse.ArgumentParser, args: argparse.Namespace) -> EngineConfig:
    if args.max_step_tokens < args.max_num_seqs:
        parser.error(
            f"--max-step-tokens ({args.max_step_tokens}) must be at least --max-num-seqs "
            f"({args.max_num_seqs}): each running sequence takes one token of every step"
        )
    if (args.tls_cert is None) != (args.tls_key is None):
        parser.error("--tls-cert and --tls-key belong together")
    if args.tls_client_ca is not None and args.tls_cert is None:
        parser.error("--tls-client-ca needs --tls-cert and --tls-key")
    args.served_model_name = args.served_model_name or Path(args.model).name
    return EngineConfig(**{field.name: getattr(args, field.name) for field in fields(EngineConfig)})


def _apply_environment(parser: argparse.ArgumentParser, env: Mapping[str, str]) -> None:
    """argparse converts and checks string defaults as it does arguments, so the messages are the same."""
    for action in parser._actions:
        value = env.get(ENV_PREFIX + action.dest.upper())
        if value is None:
            continue
        if action.nargs == 0:  # a switch
            if value.lower() not in ("true", "false", "1", "0"):
                parser.error(f"{ENV_PREFIX}{action.dest.upper()} must be true or false, got {value!r}")
            action.default = value.lower() in ("true", "1")
            continue
        if action.choices is not None and value not in map(str, action.choices):
            parser.error(
                f"{ENV_PREFIX}{action.dest.upper()} must be one of "
                f"{', '.join(map(str, action.choices))}, got {value!r}"
            )
        action.default, action.required = value, False


class _count:  # noqa: N801  argparse prints a type by its name
    """An integer of at least `least`."""

    def __init__(self, least: int) -> None:
        self._least = least

    def __call__(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = self._least - 1
        if value < self._least:
            raise argparse.ArgumentTypeError(f"must be a whole number from {self._least} up, got {text!r}")
        return value


class _number:  # noqa: N801  as above
    """A number of which something holds, which nothing does of what is none."""

    def __init__(self, what: str, holds: Callable[[float], bool]) -> None:
        self._what = what
        self._holds = holds

    def __call__(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not self._holds(value):
            raise argparse.ArgumentTypeError(f"must be a number {self._what}, got {text!r}")
        return value


_seconds: Final = _number("of seconds above 0", lambda value: 0.0 < value < 1e6)
_share: Final = _number("above 0 and at most 1", lambda value: 0.0 < value <= 1.0)
_milliseconds: Final = _number("of milliseconds above 0, or inf", lambda value: value > 0.0)


def _byte_count_or_0(text: str) -> int:
    return 0 if text.strip() == "0" else _byte_count(text)


def _byte_count(text: str) -> int:
    """`512MiB`, `2GB`, `1.5g`: with an `i`, or without a `b`, units are powers of 1024, else of 1000."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a size such as 512MiB, 2GiB or 4GB, got {text!r}")
    number, unit, binary = match.groups()
    decimal = unit and not binary and text.strip().lower().endswith("b")
    size = int(float(number) * (1000 if decimal else 1024) ** _POWERS[unit.lower()])
    if size < 1 << 20:
        raise argparse.ArgumentTypeError(f"must be at least 1MiB, got {text!r}")
    return size
