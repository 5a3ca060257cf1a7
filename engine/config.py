"""What an engine can be told: one frozen value, and the command line that makes it.

Every option can also be set in the environment, as `PENSTOCK_ENGINE_` and the option's name in
capitals (`PENSTOCK_ENGINE_MAX_MODEL_LEN=4096`); the command line wins. A variable with this prefix
that is no option is a mistake, as a misspelt option is (`shared.environment`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

import msgspec

from engine.runtime.config import (
    DEVICES,
    DTYPES,
    KERNELS,
    KV_CACHE_DTYPES,
    RANKS_MAX,
    SLOTS_MAX,
    STEP_TOKENS_MAX,
    THREADS_MAX,
    WEIGHTS,
)
from shared.arguments import Parser, byte_count, byte_count_or_0, count, model_name, nonempty, number, port
from shared.environment import apply_environment
from shared.holding import memory_max
from shared.openai import BODY_LEN_MAX

ENV_PREFIX: Final = "PENSTOCK_ENGINE_"
DISCIPLINES: Final = ("response-ratio", "fifo")
PAGE_SIZES: Final = (16, 32, 64, 128, 256)

TOKENIZER_THREADS_MAX: Final = 64
SECONDS: Final = number("of seconds above 0", lambda value: 0.0 < value < 1e6)
SHARE: Final = number("above 0 and at most 1", lambda value: 0.0 < value <= 1.0)
MILLISECONDS: Final = number("of milliseconds above 0, or inf", lambda value: value > 0.0)


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
    core_timeout_s: float = 30.0
    """A core that has not answered for so long is not ready: a step of it hangs, or takes as long."""
    request_memory: int = 1 << 30
    """Bytes for bodies, prompts and answers of requests, in the API process."""
    body_timeout_s: float = 30.0
    keepalive_timeout_s: float = 75.0
    stall_deadline_s: float = 60.0
    drain_timeout_s: float = 30.0
    exit_on_failure: bool = False
    """End the process when the core has died. False: it stays, and says so on /livez."""
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
    """What the core process reads from its standard input."""

    config: EngineConfig
    inbox: str
    """ZeroMQ endpoint the core reads `CoreInput` from."""
    outbox: str
    """ZeroMQ endpoint the core writes `CoreOutput` to."""
    parent_pid: int
    """The API process: the core ends when it does."""

    def encode(self) -> bytes:
        """MessagePack, because JSON has no infinity, which `step_time_target_ms` may be."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> CoreStart:
        """The inverse of `encode`."""
        return msgspec.msgpack.decode(data, type=CoreStart)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's options, for `python -m engine serve` and for `penstock engine` alike."""
    _add_model_arguments(parser.add_argument_group("model"))
    _add_memory_arguments(parser.add_argument_group("memory"))
    _add_scheduling_arguments(parser.add_argument_group("scheduling and threads"))
    _add_http_arguments(parser.add_argument_group("network"))
    _add_process_arguments(parser.add_argument_group("start, end and log"))


def _add_model_arguments(model: argparse._ArgumentGroup) -> None:
    model.add_argument(
        "--model",
        required=True,
        type=nonempty,
        metavar="DIR|ID",
        help="model directory in Hugging Face layout, or a hub id to download",
    )
    model.add_argument(
        "--served-model-name",
        type=model_name,
        metavar="NAME",
        help="the name clients use (default: the last part of --model)",
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
        type=nonempty,
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
        type=count(1, RANKS_MAX),
        default=1,
        metavar="N",
        help="split the model between N processes, on a GPU each where there are any; memory settings are "
        "each one's (default: 1)",
    )
    model.add_argument(
        "--max-model-len",
        type=count(2),
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
        type=SHARE,
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
        type=byte_count,
        metavar="BYTES",
        help="memory for the KV cache, as 512MiB or 2GiB (default: from what is free)",
    )
    memory.add_argument(
        "--swap-memory",
        type=byte_count_or_0,
        metavar="BYTES",
        help="host memory that pages of preempted sequences are copied to where that is cheaper than "
        "computing them again, which it nearly always is, on a CPU too; 0: never (default: up to 4GiB, and a "
        "quarter of what is free; taken as it is used)",
    )
    memory.add_argument(
        "--request-memory",
        type=_request_memory,
        default=1 << 30,
        metavar="BYTES",
        help="memory of the API process for bodies, prompts and answers of requests; a tenant has three "
        "quarters of it at most, and beyond it requests get 503 (default: 1GiB)",
    )


def _request_memory(text: str) -> int:
    value, least = byte_count(text), -(-memory_max(BODY_LEN_MAX) * 4 // 3)
    if value < least:
        raise argparse.ArgumentTypeError(
            f"must be at least {least} bytes, for the largest body, got {text!r}"
        )
    return value


def _add_scheduling_arguments(scheduling: argparse._ArgumentGroup) -> None:
    scheduling.add_argument(
        "--max-num-seqs",
        type=count(1, SLOTS_MAX),
        default=64,
        metavar="N",
        help="sequences that run at once (default: 64)",
    )
    scheduling.add_argument(
        "--max-step-tokens",
        type=count(1, STEP_TOKENS_MAX),
        default=2048,
        metavar="TOKENS",
        help="token budget of one step; at least --max-num-seqs (default: 2048)",
    )
    scheduling.add_argument(
        "--step-time-target-ms",
        type=MILLISECONDS,
        default=100.0,
        metavar="MS",
        help="how long prompts may make one step, the longest gap that running streams see. One prompt never "
        "doubles theirs, and two may always make it 2.6 times as long. inf: as long as --max-step-tokens "
        "takes (default: 100)",
    )
    scheduling.add_argument(
        "--max-queue-len",
        type=count(1),
        default=256,
        metavar="N",
        help="sequences that may wait; beyond it requests get 503 at once (default: 256)",
    )
    scheduling.add_argument(
        "--max-queue-tokens",
        type=count(1),
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
        "--threads",
        type=count(1, THREADS_MAX),
        metavar="N",
        help="compute threads on CPU (default: one per core)",
    )
    scheduling.add_argument(
        "--tokenizer-threads",
        type=count(1, TOKENIZER_THREADS_MAX),
        default=2,
        metavar="N",
        help="threads that tokenize (default: 2)",
    )
    scheduling.add_argument(
        "--core-timeout-s",
        type=SECONDS,
        default=30.0,
        metavar="S",
        help="a core that has not answered for so long takes no requests until it answers again; more than "
        "the longest step takes (default: 30)",
    )


def _add_http_arguments(http: argparse._ArgumentGroup) -> None:
    http.add_argument(
        "--host", type=nonempty, default="127.0.0.1", help="address to listen on (default: 127.0.0.1)"
    )
    http.add_argument("--port", type=port, default=8001, help="port, 0 for any free one (default: 8001)")
    http.add_argument(
        "--tls-cert", type=nonempty, metavar="FILE", help="certificate chain, PEM: serve TLS, HTTP/2 by ALPN"
    )
    http.add_argument("--tls-key", type=nonempty, metavar="FILE", help="its private key, PEM")
    http.add_argument(
        "--tls-client-ca",
        type=nonempty,
        metavar="FILE",
        help="PEM: let only clients in that have a certificate of this authority (mTLS), probes too",
    )
    http.add_argument(
        "--body-timeout-s",
        type=SECONDS,
        default=30.0,
        metavar="S",
        help="a request body must have arrived after so many seconds (default: 30)",
    )
    http.add_argument(
        "--keepalive-timeout-s",
        type=SECONDS,
        default=75.0,
        metavar="S",
        help="an idle connection is closed after so many seconds (default: 75)",
    )
    http.add_argument(
        "--stall-deadline-s",
        type=SECONDS,
        default=60.0,
        metavar="S",
        help="a stream that its client does not read ends after so many seconds (default: 60)",
    )


def _add_process_arguments(process: argparse._ArgumentGroup) -> None:
    process.add_argument(
        "--startup-timeout-s",
        type=SECONDS,
        default=900.0,
        metavar="S",
        help="loading and warming up may take this long (default: 900)",
    )
    process.add_argument(
        "--rank-timeout-s",
        type=SECONDS,
        default=60.0,
        metavar="S",
        help="with --tensor-parallel-size: the engine fails when one of its processes has not done its part "
        "of a step after so many seconds (default: 60)",
    )
    process.add_argument(
        "--drain-timeout-s",
        type=SECONDS,
        default=30.0,
        metavar="S",
        help="after SIGTERM open answers may finish for so long (default: 30)",
    )
    process.add_argument(
        "--exit-on-failure",
        action="store_true",
        help="when the process that computes has died, tell the open requests and exit with status 1, for "
        "systemd's Restart=on-failure (default: stay and answer 500 to /livez, for a liveness probe)",
    )
    process.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="lowest level that is logged (default: info)",
    )


def build_parser(prog: str = "penstock engine") -> Parser:
    parser = Parser(
        prog=prog,
        description="Serve one model over OpenAI's HTTP API.",
        epilog="Every option can be set in the environment, --max-model-len as "
        f"{ENV_PREFIX}MAX_MODEL_LEN; a variable that is empty counts as unset.",
    )
    add_arguments(parser)
    return parser


def from_args(argv: Sequence[str], env: Mapping[str, str]) -> EngineConfig:
    """Parse; on a wrong value print what is right and leave with status 2, as argparse does."""
    parser = build_parser()
    apply_environment(parser, env, ENV_PREFIX)
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
    args.served_model_name = args.served_model_name or served_name(args.model)
    return EngineConfig(**{field.name: getattr(args, field.name) for field in fields(EngineConfig)})


def served_name(model: str) -> str:
    """What clients call a model that is given no name: the last part of its hub id, or of its directory's
    whole path, so that `.` has one too."""
    return Path(os.path.abspath(os.path.expanduser(model))).name or "model"
