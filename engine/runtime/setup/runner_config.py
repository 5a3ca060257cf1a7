"""How a runner is set up: plain values, so that they travel as JSON. No torch here.

The settings are the engine's own, with the names of its options: `engine.config.EngineConfig` has them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from msgspec import Meta

from engine.contract.embedders import EmbeddingsSetting
from engine.runtime.setup.backends import misnamed
from shared.process.setting_values import ConfigError
from shared.process.settings import Rule, Text, Unit, problems_of

PAGE_SIZE_MAX: Final = 1024
CONTEXT_LEN_MAX: Final = 1 << 30
SLOTS_MAX: Final = 4096
STEP_TOKENS_MAX: Final = 1 << 20
THREADS_MAX: Final = 1024
RANKS_MAX: Final = 64

Dtype = Literal["auto", "float32", "bfloat16"]
Kernels = Literal["auto", "native", "torch"]
Weights = Literal["plain", "int8", "fp8"]
KVCacheDtype = Literal["auto", "fp8"]
Device = Literal["auto", "cpu", "cuda"]
PageSize = Annotated[
    int,
    Unit("tokens"),
    Rule(f"be a power of two up to {PAGE_SIZE_MAX}", lambda n: 1 <= n <= PAGE_SIZE_MAX and n & (n - 1) == 0),
]
Memory = Annotated[int, Meta(ge=0, le=1 << 50)]
Seconds = Annotated[float, Meta(gt=0.0, le=1e6)]


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """A runner's settings; its `model` is a directory. Raises ConfigError, which names every setting that
    is out of range."""

    model: Text
    """Model directory in Hugging Face layout (config.json and safetensors), or a hub id to download. demo is
    the built-in model."""
    device: Device = "auto"
    """The device that computes: an NVIDIA GPU, or the CPU. auto: cuda where torch finds a GPU."""
    dtype: Dtype = "auto"
    """Type of the weights. auto: bfloat16 on a GPU and where the CPU multiplies it natively, else float32."""
    weights: Weights = "plain"
    """int8 (on a CPU, by the native kernels) and fp8 (on a GPU) keep matrices in 8 bits with a scale per
    output: half the memory of bfloat16, and up to twice its tokens per second for a few streams, at some
    accuracy."""
    kernels: Kernels = "auto"
    """The kernels that compute on a CPU. auto: native where a compiler was there at installation and they
    implement the model, else torch."""
    attention_backend: Text = "auto"
    """The library for attention on a GPU: triton, cudnn, flash-attn, flashinfer, flashinfer-trtllm or torch,
    or one for each phase, as prefill=cudnn,decode=triton. auto: cudnn and triton, which have been measured on
    a card; flash-attn and flashinfer have not."""
    enforce_eager: bool = False
    """On a GPU, launch steps kernel by kernel instead of as CUDA graphs: it starts sooner, takes less
    memory, and is slower."""
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=RANKS_MAX)] = 1
    """Processes (ranks) that the model is split between, on a GPU each where there are any. Memory settings
    are for each of them."""
    rank_timeout_s: Seconds = 60.0
    """The time after which a process that has not done its part of a step fails the engine, with tensor
    parallelism."""
    threads: Annotated[int, Meta(ge=1, le=THREADS_MAX)] | None = None
    """Compute threads on a CPU, which ranks share. Unset: one per physical core that affinity and control
    groups allow."""
    max_model_len: Annotated[int, Meta(ge=1, le=CONTEXT_LEN_MAX), Unit("tokens")] | None = None
    """Longest prompt plus answer. Unset: what the model was made for."""
    revision: Text | None = None
    """Commit, tag or branch of a hub id; a commit pins it. Unset: the newest."""
    page_size: PageSize = 64
    """Tokens in a page of the KV cache."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.9
    """Share of a GPU's memory for everything: weights, the largest step, graphs, and the rest for the KV
    cache."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """On a GPU, fp8 keeps keys and values as e4m3, with the checkpoint's scales where it has them: twice the
    tokens. auto: the type that is computed in."""
    kv_cache_memory: Memory | None = None
    """Memory for the KV cache, as 512MiB or 2GiB. Unset: half of what is free on a CPU once the weights are
    loaded, what gpu_memory_utilization leaves on a GPU, and never more than the sequences can use."""
    swap_memory: Memory | None = None
    """Host memory that keeps prefixes that the KV cache has no room for, those of preempted sequences too,
    and from which they are copied back, where that is cheaper than computing them again, which it nearly
    always is, on a CPU too. 0: never. Unset: up to 4GiB, a quarter of what is free, and what the sequences
    can use. On a GPU it is pinned and taken at the start, on a CPU as it is first used."""
    kv_disk_dir: Text | None = None
    """Directory that also keeps these prefixes, over restarts. It belongs to one engine, and its files may be
    deleted at any time. What users wrote can be learned from them, so one that is there must have mode 0700.
    Unset: none."""
    kv_disk_bytes: Annotated[int, Meta(ge=1, le=1 << 60)] = 16 << 30
    """Size of all files in kv_disk_dir, as 100GiB: those that were used longest ago make room."""
    max_num_seqs: Annotated[int, Meta(ge=1, le=SLOTS_MAX)] = 64
    """Sequences that run at once. CUDA graphs go up to 512."""
    max_step_tokens: Annotated[int, Meta(ge=1, le=STEP_TOKENS_MAX)] = 2048
    """Token budget of one step; at least max_num_seqs."""
    embeddings: EmbeddingsSetting = "auto"
    """Says that the model makes vectors of texts. auto: one with a modules.json does, as that says, and
    nothing else; mean: a model that answers does so, too, by the mean of its last hidden states,
    normalized."""
    prefix_cache: bool = True
    """Keep the KV cache of ended sequences, so that a prompt is not computed again where it begins as another
    did. On unless --no-prefix-cache is given."""
    max_drafts: Annotated[int, Meta(ge=0, le=15), Unit("tokens")] = 15
    """The most tokens that are guessed for a stream, from what its prompt and answer hold already or by
    the model's own MTP layer, and verified in one step with its next one. The tokens are the same; a
    step guesses as many as pay by its learned cost. Torch's operations have none on a GPU where the model has
    states, and on a CPU where it has none. On a GPU graphs and memory for it are set aside at the start. 0:
    none."""

    def __post_init__(self) -> None:
        if problems := problems_of(self) or list(self.contradictions()):
            raise ConfigError(problems)

    def contradictions(self) -> Iterator[str]:
        """The problems that no single setting shows."""
        yield from misnamed(self.attention_backend)
        if self.max_step_tokens < self.max_num_seqs:
            yield (
                f"--max-step-tokens ({self.max_step_tokens}) must be at least --max-num-seqs "
                f"({self.max_num_seqs}): each running sequence takes one token of every step"
            )
        if self.kv_disk_dir is not None:
            if self.tensor_parallel_size > 1:
                yield "--kv-disk-dir needs --tensor-parallel-size 1"
            if self.swap_memory == 0:
                yield "--kv-disk-dir needs a --swap-memory above 0"
