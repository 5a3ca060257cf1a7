"""How a runner is set up: plain values, so that they travel as JSON. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from engine.runtime.backends import misnamed
from engine.runtime.errors import BadRunnerConfig

DTYPES: Final = ("auto", "float32", "bfloat16")
KERNELS: Final = ("auto", "native", "torch")
WEIGHTS: Final = ("plain", "int8", "fp8")
KV_CACHE_DTYPES: Final = ("auto", "fp8")
DEVICES: Final = ("auto", "cpu", "cuda")
_CHOICES: Final = {
    "dtype": DTYPES,
    "kernels": KERNELS,
    "weights": WEIGHTS,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "device": DEVICES,
}
PAGE_SIZE_MAX: Final = 1024
SLOTS_MAX: Final = 4096
STEP_TOKENS_MAX: Final = 1 << 20
THREADS_MAX: Final = 1024
RANKS_MAX: Final = 64
_MOST: Final = {
    "max_num_seqs": SLOTS_MAX,
    "max_model_len": 1 << 30,
    "kv_cache_bytes": 1 << 50,
    "threads": THREADS_MAX,
    "tensor_parallel": RANKS_MAX,
}
"""Settings that are at least 1, and what each is at most."""


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Raises BadRunnerConfig, naming every setting that is out of range."""

    model_dir: str
    """A Hugging Face model directory: config.json and safetensors."""
    device: str = "auto"
    """`auto` is `cuda` where torch sees a GPU, else `cpu`."""
    dtype: str = "auto"
    """`auto` is bfloat16 on a GPU and where the processor multiplies it natively, else float32."""
    weights: str = "plain"
    """`int8` (native kernels on a CPU) and `fp8` (on a GPU) store matrices with a scale per output, half of
    bfloat16's bytes."""
    kernels: str = "auto"
    """On a CPU. `auto` is native where they are built and take the model, else torch."""
    attention_backend: str = "auto"
    """On a GPU: as at the head of `engine.runtime.backends`."""
    kv_cache_dtype: str = "auto"
    """On a GPU: `fp8` stores keys and values as e4m3, with the checkpoint's scales where it has them. `auto`
    is the type that is computed in."""
    enforce_eager: bool = False
    """On a GPU: launch decode steps kernel by kernel instead of as CUDA graphs."""
    max_model_len: int | None = None
    """Prompt and output together. None: what the model was made for."""
    page_size: int = 64
    """Tokens per KV page."""
    kv_cache_bytes: int | None = None
    """None: on a CPU `memory_fraction` of what is free once the weights are loaded; on a GPU what
    `gpu_memory_utilization` leaves. Capped by what the slots could ever use."""
    memory_fraction: float = 0.5
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's whole memory for everything: weights, a step, graphs, KV."""
    swap_bytes: int | None = None
    """Host memory for the pages of preempted sequences; 0: they are recomputed, always. None: up to 4 GiB,
    and a quarter of what is free. It is taken from the system as it is first used."""
    max_num_seqs: int = 64
    """Slots: sequences that hold KV at the same time."""
    step_tokens_max: int = 2048
    """The largest plan, in tokens."""
    threads: int | None = None
    """None: one per physical core that this process may use. Ranks share them."""
    tensor_parallel: int = 1
    """Ranks: processes that hold a part of the model each. Memory settings are each rank's own."""
    rank_timeout_s: float = 60.0
    """A rank that has not done its part of a step by then is lost, and the engine with it."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise BadRunnerConfig("; ".join(problems))

    def _problems(self) -> Iterator[str]:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                yield f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}"
        yield from misnamed(self.attention_backend)
        if not 1 <= self.page_size <= PAGE_SIZE_MAX or self.page_size & (self.page_size - 1):
            yield f"page_size must be a power of two up to {PAGE_SIZE_MAX}, not {self.page_size}"
        for name in ("memory_fraction", "gpu_memory_utilization"):
            if not 0.0 < getattr(self, name) <= 1.0:
                yield f"{name} must be above 0 and at most 1, not {getattr(self, name)}"
        if not self.max_num_seqs <= self.step_tokens_max <= STEP_TOKENS_MAX:
            yield (
                f"step_tokens_max must be at least max_num_seqs ({self.max_num_seqs}), so that all running "
                f"sequences can decode in a step, and at most {STEP_TOKENS_MAX}; it is {self.step_tokens_max}"
            )
        if self.swap_bytes is not None and self.swap_bytes < 0:
            yield f"swap_bytes must be at least 0, not {self.swap_bytes}"
        if not self.rank_timeout_s > 0.0:
            yield f"rank_timeout_s must be above 0, not {self.rank_timeout_s}"
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                yield f"{name} must be 1 to {most}, not {value}"
