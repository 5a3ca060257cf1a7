"""The one way a runner starts, whatever computes: load, size, build, warm up.

    load       the weights become a `LoadedShard`: `host.host_shard` on a CPU, `device.device_shard` on a GPU
    size       the number of pages for which every rank has room, and the other sizes (`RunnerInfo`)
    build      the cache, the slots' tables, graphs
    warm up    one plan of each kind, run by the runner that is handed out
    time       steps of a few shapes (`engine.runtime.start.step_timing`), and a page's copy

Tensor-parallel ranks start the same way. Rank 0 calls `start` with an `Others` that keeps the other ranks in
step (`parallel.leader`); those load and build as they are told (`parallel.rank`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec
import torch

from engine.contract.embedders import Embedder, read_embedder
from engine.contract.messages import (
    Pending,
    Plan,
    RunnerInfo,
    RunResult,
    SamplingParams,
    SlotAssignment,
    Want,
)
from engine.runtime.models.decoder_config import read_model_config
from engine.runtime.models.spec import DecoderSpec, Longrope
from engine.runtime.setup.hardware import available_memory_bytes, multiplies_bf16, usable_cores
from engine.runtime.setup.model_errors import BadRunnerConfig, UnsupportedModel
from engine.runtime.setup.runner_config import RunnerConfig
from engine.runtime.start.step_timing import Timed, time_guesses, time_steps
from engine.runtime.step.kv_cache import HostPages, KVGeometry, host_page_count, state_place_count
from engine.runtime.step.pooling import Pooler
from engine.runtime.step.states import States
from engine.runtime.weights.checkpoint import Checkpoint, Inspection, checkpoint_files
from engine.runtime.weights.parameters import read_all
from shared.text.model_files import BadModelFile

Progress = Callable[[str], None]
"""Called with each stage of a start, in words for the operator."""
WARMUP_PREFILL_TOKENS: Final = 64


class ShardRunner(Protocol):
    """A rank's own runner: executes plans with its part of the model."""

    info: RunnerInfo

    @property
    def host(self) -> HostPages: ...

    @property
    def states(self) -> States | None: ...

    def run(self, plan: Plan) -> RunResult: ...

    def launch(self, plan: Plan) -> Pending: ...


Own = TypeVar("Own", bound=ShardRunner)
Built = TypeVar("Built", bound=ShardRunner, covariant=True)
Whole = TypeVar("Whole", bound=Timed)


class LoadedShard(Protocol[Built]):
    """A rank's weights, before there is a cache."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def geometry(self) -> KVGeometry:
        """The shape of a page that holds this rank's heads."""
        ...

    def page_count(self) -> int:
        """How many pages this rank has room for. Raises DoesNotFit. The steps that are run to find out are
        the same on every rank."""
        ...

    def info(self, pages: int) -> RunnerInfo:
        """The runner's sizes and type, with times and host memory left at 0."""
        ...

    def build(self, info: RunnerInfo, progress: Progress) -> Built:
        """A runner of the sizes in `info`. Raises DoesNotFit."""
        ...


class Others(Protocol):
    """The other ranks, as rank 0's start needs them."""

    @property
    def neighbours(self) -> int:
        """The ranks that share rank 0's machine, itself included."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Encloses what every rank does at the same time. Raises RankLost."""
        ...

    def fewest_pages(self, own: int) -> int:
        """The least number of pages that any rank has room for, rank 0's `own` included."""
        ...

    def build(self, info: RunnerInfo) -> None:
        """Have the other ranks build runners of these sizes."""
        ...


class NoOthers:
    """`Others` of a runner that is a single process."""

    neighbours: Final = 1

    def together(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def fewest_pages(self, own: int) -> int:
        return own

    def build(self, info: RunnerInfo) -> None:
        pass


@torch.inference_mode()
def start(
    config: RunnerConfig,
    load: Callable[[], LoadedShard[Own]],
    lead: Callable[[Own], Whole],
    others: Others,
    progress: Progress,
) -> Whole:
    """A warm runner. `lead` makes the runner that is handed out from rank 0's own. Raises ModelError."""
    began_s = time.monotonic()
    with others.together():
        shard = load()
        own_pages = shard.page_count()
    loaded_s = time.monotonic()
    pages = others.fewest_pages(own_pages)
    info = _sized(config, shard, pages, others.neighbours, load_s=loaded_s - began_s)
    ranks = f" on each of {config.tensor_parallel_size} ranks" if config.tensor_parallel_size > 1 else ""
    progress(f"allocating {info.pages} KV pages of {info.page_size} tokens{ranks}")
    others.build(info)
    with others.together():
        own = shard.build(info, progress)
    runner = lead(own)
    progress("warming up")
    warm_up(runner)
    timed_steps = time_steps(runner, config.max_step_tokens)
    guess_share = time_guesses(runner)
    page_copy_s, warmed_s = own.host.measure(), time.monotonic()
    runner.info = msgspec.structs.replace(
        info,
        warmup_s=warmed_s - loaded_s,
        page_copy_s=page_copy_s,
        timed_steps=timed_steps,
        guess_share=guess_share,
        state_copy_s=0.0 if own.states is None else own.states.measure(),
    )
    return runner


def start_alone(config: RunnerConfig, load: Callable[[], LoadedShard[Own]], progress: Progress) -> Own:
    """A warm runner that is a single process."""

    def itself(own: Own) -> Own:
        return own

    return start(config, load, itself, NoOthers(), progress)


def _sized(
    config: RunnerConfig, shard: LoadedShard[Own], pages: int, neighbours: int, *, load_s: float
) -> RunnerInfo:
    """The sizes that every rank builds. A page's bytes are those of all ranks together."""
    info = shard.info(pages)
    host_bytes = available_memory_bytes() // neighbours
    return msgspec.structs.replace(
        info,
        page_bytes=info.page_bytes * config.tensor_parallel_size,
        state_bytes=info.state_bytes * config.tensor_parallel_size,
        host_pages=0
        if info.state_bytes  # no state lies behind pages there (`engine.core.pages.state_pool`)
        else host_page_count(config, shard.geometry, shard.max_model_len, host_bytes),
        load_s=load_s,
    )


def untimed_info(
    config: RunnerConfig,
    model: DecoderSpec,
    geometry: KVGeometry,
    dtype: torch.dtype,
    max_model_len: int,
    pages: int,
    arithmetic: str,
    state_bytes: int,
    pooler: Pooler | None,
) -> RunnerInfo:
    """A runner's sizes and type, with times and host memory left at 0, and what drafts need."""
    longest = [rope.scaling for rope in model.ropes if rope and isinstance(rope.scaling, Longrope)]
    if longest:  # cached keys have its factors in them
        arithmetic += ", long ropes" if longest[0].is_long(model.context_len) else ", short ropes"
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
        arithmetic=arithmetic,
        state_bytes=state_bytes,
        state_places=state_place_count(config, geometry, max_model_len, pages, state_bytes),
        vector_len=0 if pooler is None else pooler.vector_len,
    )


def warm_up(runner: Timed) -> None:
    """Run each family of shapes once: a prefill, a chunk over cached context, a decode; nucleus sampling."""
    info = runner.info
    room = min(WARMUP_PREFILL_TOKENS, info.max_model_len - 2, info.pages * info.page_size - 2)
    if room < 2:
        return
    half = room // 2
    pages = list(range(-(-(room + 2) // info.page_size)))
    sampling = SamplingParams(seed=0, max_tokens=2, top_p=0.9, logprobs=1)
    seated = SlotAssignment.of(0, [0] * room, room, sampling)
    runner.run(Plan(0, [], [seated], [(0, pages)], [0], [0], [half], [Want.NOTHING]))
    runner.run(Plan(1, [], [], [], [0], [half], [room - half], [Want.SAMPLE]))
    runner.run(Plan(2, [], [], [], [0], [room], [1], [Want.SAMPLE]))
    runner.run(Plan(3, [0], [], [], [], [], [], []))


def read_model(config: RunnerConfig, progress: Progress) -> DecoderSpec:
    """The directory's config.json. `progress` hears which of its keys are ignored. Raises ModelError."""
    model = read_model_config(Path(config.model))
    if model.unread:
        progress(f"ignoring keys of config.json that mean nothing here: {', '.join(model.unread)}")
    return model


def embedder_of(config: RunnerConfig) -> Embedder | None:
    """How the model makes vectors of prompts; None where it makes none. Raises UnsupportedModel."""
    try:
        return read_embedder(Path(config.model), config.embeddings)
    except BadModelFile as error:
        raise UnsupportedModel(str(error)) from error


def load_pooler(
    config: RunnerConfig, model: DecoderSpec, device: torch.device | None = None
) -> Pooler | None:
    """The pooler of a model that makes vectors of prompts; None of one that makes none. Raises ModelError."""
    embedder = embedder_of(config)
    return None if embedder is None else Pooler.load(embedder, Path(config.model), model.hidden_size, device)


def _headless(model: DecoderSpec, files: Mapping[str, Path]) -> DecoderSpec:
    """The model of an embedder, as its checkpoint names what it has. Its head is none, or is not read: no
    logits are computed, and where a head has to be, the embedding is one."""
    names = model.names
    if names.embedding not in files:
        names = names.moved("model.", "")
    names = replace(names, foreign=(*names.foreign, names.head))
    return replace(model, names=names, tied_embeddings=True)


def checked_checkpoint(
    config: RunnerConfig,
    model: DecoderSpec,
    dtype: torch.dtype,
    progress: Progress,
    device: torch.device | None = None,
) -> tuple[DecoderSpec, Checkpoint]:
    """The model with its checkpoint's head, and the checkpoint, whose tensors go to `device`. Raises
    ModelError.

    The files' headers are checked first: no tensor is read from a checkpoint that does not match. A head of
    its own beside `tie_word_embeddings` is used unless it equals the embedding, as in transformers 5. An MTP
    layer is left out where nothing is drafted, and where the files lack it, as many fine-tunes' do.
    """
    files = checkpoint_files(Path(config.model), progress)
    drafts_by_mtp = config.max_drafts > 0 and f"{model.names.mtp}.fc.weight" in files
    model = replace(model, mtp=model.mtp if drafts_by_mtp else None)
    embedder, head, embedding = embedder_of(config), model.names.head, model.names.embedding
    generates = embedder is None or embedder.generates
    model = model if generates else _headless(model, files)
    has_head = generates and model.tied_embeddings and head in files
    untied = replace(model, tied_embeddings=False) if has_head else model
    inspection = Inspection(files, dtype, model.fp8, model.names.foreign)
    read_all(untied, inspection)
    inspection.verify()
    in_memory = Checkpoint(files, dtype, model.fp8)
    if has_head and not in_memory.are_equal(head, embedding, model.vocab_size, model.hidden_size):
        progress(
            "the checkpoint has a head that is not the embedding: it is used, despite tie_word_embeddings"
        )
        model = untied
    return model, Checkpoint(files, dtype, model.fp8, device)


def choose_dtype(name: str) -> torch.dtype:
    """The type to compute in on a CPU, by the setting's `name`."""
    if name == "auto":
        return torch.bfloat16 if multiplies_bf16() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def choose_max_model_len(config: RunnerConfig, model: DecoderSpec) -> int:
    """The longest sequence that is served, in tokens: unless the settings say it, as long as the model was
    made for. Raises BadRunnerConfig beyond the model's positions."""
    if config.max_model_len is not None and config.max_model_len > model.context_len:
        raise BadRunnerConfig(
            f"--max-model-len {config.max_model_len} is beyond this model's {model.context_len} positions"
        )
    embedder = embedder_of(config)
    made_for = model.context_len if embedder is None else embedder.tokens_max or model.context_len
    return config.max_model_len or min(model.context_len, made_for)


def set_threads(config: RunnerConfig, neighbours: int) -> int:
    """The threads that one rank computes with, of those that all ranks of this machine share.

    torch's thread counts belong to the process: there is one runner per process.
    """
    threads = max(1, (config.threads or usable_cores()) // neighbours)
    torch.set_num_threads(threads)
    with contextlib.suppress(RuntimeError):  # fixed once anything ran in parallel; it is a hint, nothing more
        torch.set_num_interop_threads(1)
    return threads
