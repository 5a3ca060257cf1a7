"""From a model directory to a runner that is warm."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import torch

from engine.core.messages import Plan, RunnerInfo, RunResult, SamplingParams, SlotStart
from engine.runtime.attention import AttentionSpec
from engine.runtime.attention.torch_paged import TorchDecode, TorchPrefill
from engine.runtime.config import RunnerConfig
from engine.runtime.errors import BadRunnerConfig
from engine.runtime.hardware import available_memory_bytes, multiplies_bf16, usable_cores
from engine.runtime.kv_cache import HostPages, KVCache, KVGeometry, host_page_count, page_count
from engine.runtime.model import Model, TorchModel
from engine.runtime.model_runner import ModelRunner
from engine.runtime.models.config import ModelConfig, read_model_config
from engine.runtime.models.decoder import Decoder
from engine.runtime.models.parameters import EMBEDDING, LM_HEAD
from engine.runtime.models.registry import DECODERS
from engine.runtime.native.decoder import NativeDecoder, misfit
from engine.runtime.native.library import built_isas
from engine.runtime.sampler import DrawPlain
from engine.runtime.slots import Slots
from engine.runtime.weights import Checkpoint, Inspection, checkpoint_files

if TYPE_CHECKING:
    from engine.runtime.device.runner import DeviceRunner

Progress = Callable[[str], None]
WARMUP_PREFILL_TOKENS: Final = 64


def load_runner(config: RunnerConfig, progress: Progress) -> ModelRunner | DeviceRunner:
    """Load, size, warm up. `progress` hears of each stage. Raises ModelError with a message for the operator.

    Sets torch's thread counts, which belong to the process: one runner per process.
    """
    device = choose_device(config)
    progress(f"device {device.type}, {'chosen by auto' if config.device == 'auto' else 'as asked for'}")
    if device.type == "cpu":
        return _load_on_host(config, progress)
    from engine.runtime.device.card import CudaCard
    from engine.runtime.device.load import load_on_card

    return load_on_card(config, CudaCard(device), progress)


@torch.inference_mode()
def _load_on_host(config: RunnerConfig, progress: Progress) -> ModelRunner:
    started_s = time.monotonic()
    threads = config.threads or usable_cores()
    set_threads(threads)
    model = read_model(config, progress)
    dtype = choose_dtype(config.dtype)
    max_model_len = choose_max_model_len(config, model)
    stored = "" if model.fp8 is None else f", multiplied out of {model.fp8}"
    progress(f"loading {model.architecture} in {dtype_name(dtype)}{stored}")
    model, checkpoint = checked_checkpoint(config, model, dtype, progress)
    network = host_network(config, model, checkpoint, dtype, max_model_len)
    progress(f"computing with {network.name}")
    if network.draw_plain is not None:
        # What is left to torch is small, and its threads would fight the network's own for the cores.
        torch.set_num_threads(1)
    geometry = KVGeometry(model.layers, model.kv_heads, config.page_size, model.head_dim, dtype)
    available_bytes = available_memory_bytes()
    pages = page_count(config, model, geometry, max_model_len, available_bytes)
    progress(f"allocating {pages} KV pages of {config.page_size} tokens")
    loaded_s = time.monotonic()
    info = msgspec.structs.replace(
        untimed_info(config, model, geometry, dtype, max_model_len, pages),
        load_s=loaded_s - started_s,
        host_pages=host_page_count(config, geometry, max_model_len, available_bytes),
    )
    cache = KVCache(geometry, pages)
    runner = ModelRunner(
        info=info,
        model=network.attach(cache),
        cache=cache,
        host=HostPages(cache, info.host_pages),
        slots=Slots(info.slots, info.max_model_len, info.page_size, info.vocab_size),
        draw_plain=network.draw_plain,
    )
    progress("warming up")
    warm_up(runner)
    page_copy_s, warmup_s = runner.host.measure(), time.monotonic() - loaded_s
    runner.info = msgspec.structs.replace(info, warmup_s=warmup_s, page_copy_s=page_copy_s)
    return runner


def untimed_info(
    config: RunnerConfig,
    model: ModelConfig,
    geometry: KVGeometry,
    dtype: torch.dtype,
    max_model_len: int,
    pages: int,
) -> RunnerInfo:
    """What a runner of these sizes says of itself, but for times and host memory."""
    return RunnerInfo(
        pages=pages,
        page_size=config.page_size,
        slots=config.max_num_seqs,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        dtype=dtype_name(dtype),
        load_s=0.0,
        warmup_s=0.0,
        page_bytes=geometry.page_bytes,
    )


class Warmable(Protocol):
    info: RunnerInfo

    def run(self, plan: Plan) -> RunResult: ...


def warm_up(runner: Warmable) -> None:
    """Run each family of shapes once: a prefill, a chunk over cached context, a decode; nucleus sampling."""
    info = runner.info
    room = min(WARMUP_PREFILL_TOKENS, info.max_model_len - 2, info.pages * info.page_size - 2)
    if room < 2:
        return
    half = room // 2
    pages = list(range(-(-(room + 2) // info.page_size)))
    sampling = SamplingParams(seed=0, max_tokens=2, top_p=0.9, logprobs=1)
    start = SlotStart(0, [0] * room, room, sampling)
    runner.run(Plan(0, [], [start], [(0, pages)], [0], [0], [half], [False]))
    runner.run(Plan(1, [], [], [], [0], [half], [room - half], [True]))
    runner.run(Plan(2, [], [], [], [0], [room], [1], [True]))
    runner.run(Plan(3, [0], [], [], [], [], [], []))


class Network(Protocol):
    """Loaded weights, before there is a cache."""

    @property
    def name(self) -> str:
        """What computes, for the log."""
        ...

    @property
    def draw_plain(self) -> DrawPlain | None:
        """None: torch draws those rows like any other."""
        ...

    def attach(self, cache: KVCache) -> Model: ...


def host_network(
    config: RunnerConfig,
    model: ModelConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    max_model_len: int,
) -> Network:
    hindrance = _hindrance(config, model)
    if hindrance is not None:
        return TorchNetwork(DECODERS[model.architecture](model, checkpoint), model, hindrance)
    return NativeDecoder(
        built_isas()[0],
        model,
        checkpoint,
        dtype=dtype,
        page_size=config.page_size,
        max_model_len=max_model_len,
        threads=config.threads or usable_cores(),
        int8=config.weights == "int8",
    )


def read_model(config: RunnerConfig, progress: Progress) -> ModelConfig:
    """The directory's config.json. `progress` hears which of its keys are ignored. Raises ModelError."""
    model = read_model_config(Path(config.model))
    if model.unread:
        progress(f"ignoring keys of config.json that mean nothing here: {', '.join(model.unread)}")
    return model


def checked_checkpoint(
    config: RunnerConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    progress: Progress,
    device: torch.device | None = None,
) -> tuple[ModelConfig, Checkpoint]:
    """The model as its checkpoint has it, and the checkpoint. Raises ModelError.

    Checked against the files' headers first: nothing is read of a checkpoint that does not match. A head of
    its own beside `tie_word_embeddings` is used unless it equals the embedding, as in transformers 5.
    """
    files = checkpoint_files(Path(config.model))
    has_head = model.tied_embeddings and LM_HEAD in files
    untied = replace(model, tied_embeddings=False) if has_head else model
    inspection = Inspection(files, dtype, model.fp8)
    DECODERS[model.architecture](untied, inspection)
    inspection.verify()
    in_memory = Checkpoint(files, dtype, model.fp8)
    if has_head and not in_memory.are_equal(LM_HEAD, EMBEDDING, model.vocab_size, model.hidden_size):
        progress(
            "the checkpoint has a head that is not the embedding: it is used, despite tie_word_embeddings"
        )
        model = untied
    return model, Checkpoint(files, dtype, model.fp8, device)


def _hindrance(config: RunnerConfig, model: ModelConfig) -> str | None:
    """Why torch computes; None where the native kernels do. Raises BadRunnerConfig if that was ruled out."""
    hindrance: str | None
    if config.kernels == "torch":
        hindrance = "asked for"
    elif not built_isas():
        hindrance = "native kernels are not built"
    else:
        hindrance = misfit(model, config.page_size)
    if hindrance is not None and (config.kernels == "native" or config.weights == "int8"):
        what = "int8 weights need" if config.weights == "int8" else "kernels=native needs"
        raise BadRunnerConfig(f"{what} the native kernels: {hindrance}")
    return hindrance


@dataclass(frozen=True, slots=True)
class TorchNetwork:
    decoder: Decoder
    config: ModelConfig
    reason: str

    @property
    def name(self) -> str:
        return f"torch kernels ({self.reason})"

    @property
    def draw_plain(self) -> None:
        return None

    def attach(self, cache: KVCache) -> Model:
        config = self.config
        spec = AttentionSpec(config.heads, config.kv_heads, config.head_dim, config.windows)
        return TorchModel(self.decoder, cache, TorchDecode(cache, spec), TorchPrefill(cache, spec))


def choose_device(config: RunnerConfig) -> torch.device:
    """`auto` is the CPU where a setting is for CPUs only, and else a GPU if there is one. Raises
    BadRunnerConfig where settings contradict each other, or there is no GPU."""
    for_cpu = _those_set(config, weights=("int8",), kernels=("native", "torch"))
    for_gpu = _those_set(config, weights=("fp8",), kv_cache_dtype=("fp8",))
    if config.attention_backend not in ("auto", "torch"):
        for_gpu.append(f"attention_backend={config.attention_backend}")
    has_gpu = torch.cuda.is_available()
    is_gpu = has_gpu and not for_cpu if config.device == "auto" else config.device == "cuda"
    if is_gpu and not has_gpu:
        raise BadRunnerConfig(
            f"device=cuda, but this torch ({torch.__version__}) finds no GPU: is it a build for CUDA, and "
            "does nvidia-smi list a card? device=cpu runs without"
        )
    if misplaced := for_cpu if is_gpu else for_gpu:
        here, there = ("GPU", "CPUs") if is_gpu else ("CPU", "GPUs")
        raise BadRunnerConfig(f"{', '.join(misplaced)}: only for {there}, and this runs on a {here}")
    return torch.device("cuda" if is_gpu else "cpu")


def _those_set(config: RunnerConfig, **values: tuple[object, ...]) -> list[str]:
    """Which settings have one of these values."""
    return [f"{name}={getattr(config, name)}" for name in values if getattr(config, name) in values[name]]


def choose_dtype(name: str) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if multiplies_bf16() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def choose_max_model_len(config: RunnerConfig, model: ModelConfig) -> int:
    if config.max_model_len is not None and config.max_model_len > model.context_len:
        raise BadRunnerConfig(
            f"--max-model-len {config.max_model_len} is beyond this model's {model.context_len} positions"
        )
    return config.max_model_len or model.context_len


def set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    with contextlib.suppress(RuntimeError):  # fixed once anything ran in parallel; it is a hint, nothing more
        torch.set_num_interop_threads(1)
