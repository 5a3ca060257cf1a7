"""How a runner is set up: plain values, so that they travel as JSON. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from engine.runtime.errors import BadRunnerConfig

DTYPES: Final = ("auto", "float32", "bfloat16")
KERNELS: Final = ("auto", "native", "torch")
WEIGHTS: Final = ("plain", "int8")
PAGE_SIZE_MAX: Final = 1024
SLOTS_MAX: Final = 4096
STEP_TOKENS_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Raises BadRunnerConfig, naming every setting that is out of range."""

    model_dir: str
    """A Hugging Face model directory: config.json and safetensors."""
    dtype: str = "auto"
    """`auto` is bfloat16 where the processor multiplies it natively, else float32."""
    weights: str = "plain"
    """`int8` stores matrices with a scale per output, half of bfloat16's bytes. Native kernels only."""
    kernels: str = "auto"
    """`auto` is native where they are built and take the model, else torch."""
    max_model_len: int | None = None
    """Prompt and output together. None: what the model was made for."""
    page_size: int = 64
    """Tokens per KV page."""
    kv_cache_bytes: int | None = None
    """None: `memory_fraction` of what is free once the weights are loaded, capped by what the slots
    could ever use."""
    memory_fraction: float = 0.5
    swap_bytes: int | None = None
    """Host memory for the pages of preempted sequences; 0: they are recomputed, always. None: up to 4 GiB,
    and a quarter of what is free. It is taken from the system as it is first used."""
    max_num_seqs: int = 64
    """Slots: sequences that hold KV at the same time."""
    step_tokens_max: int = 2048
    """The largest plan, in tokens."""
    threads: int | None = None
    """None: one per physical core that this process may use."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise BadRunnerConfig("; ".join(problems))

    def _problems(self) -> Iterator[str]:
        if self.dtype not in DTYPES:
            yield f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}"
        if self.kernels not in KERNELS:
            yield f"kernels must be one of {', '.join(KERNELS)}, not {self.kernels!r}"
        if self.weights not in WEIGHTS:
            yield f"weights must be one of {', '.join(WEIGHTS)}, not {self.weights!r}"
        if not 1 <= self.page_size <= PAGE_SIZE_MAX or self.page_size & (self.page_size - 1):
            yield f"page_size must be a power of two up to {PAGE_SIZE_MAX}, not {self.page_size}"
        if not 0.0 < self.memory_fraction <= 1.0:
            yield f"memory_fraction must be above 0 and at most 1, not {self.memory_fraction}"
        if not 1 <= self.max_num_seqs <= SLOTS_MAX:
            yield f"max_num_seqs must be 1 to {SLOTS_MAX}, not {self.max_num_seqs}"
        if not self.max_num_seqs <= self.step_tokens_max <= STEP_TOKENS_MAX:
            yield (
                f"step_tokens_max must be at least max_num_seqs ({self.max_num_seqs}), so that all running "
                f"sequences can decode in a step, and at most {STEP_TOKENS_MAX}; it is {self.step_tokens_max}"
            )
        if self.swap_bytes is not None and self.swap_bytes < 0:
            yield f"swap_bytes must be at least 0, not {self.swap_bytes}"
        for name in ("max_model_len", "kv_cache_bytes", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f"{name} must be at least 1, not {value}"
