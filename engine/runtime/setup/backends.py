"""The choice of attention back ends: one for prefill and one for decode, made before anything is loaded.

    auto                          the first of a phase's order that takes the model; libraries that were never
                                  run on a card are not among them
    NAME                          that one, for both phases
    prefill=NAME,decode=NAME      each phase its own; one that is left out is `auto`

The models, caches and GPUs that a library takes are written down here as rules, with the source that each was
read in. A back end that is asked for and cannot do the work is refused in words, not by a kernel's assertion
an hour later. No torch here.

A library is installed if it can be imported and has the functions that are called here. It is imported only
where there is a GPU, and only when it could be chosen.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Final

from engine.runtime.setup.model_errors import BadRunnerConfig

AUTO: Final = "auto"


class AttentionPhase(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class Backend(Enum):
    """A back end, by its name in the log."""

    TRITON = "triton"
    CUDNN = "cudnn"
    """cuDNN for whole prompts without a cached past, the Triton kernel for other rows."""
    FLASH_ATTN_2 = "flash-attn 2"
    FLASH_ATTN_3 = "flash-attn 3"
    FLASHINFER = "flashinfer"
    FLASHINFER_TRTLLM = "flashinfer's TensorRT-LLM kernels"
    TORCH = "torch"
    """The reference in torch: correct everywhere, and slow."""


NAMES: Final[Mapping[str, tuple[Backend, ...]]] = {
    "triton": (Backend.TRITON,),
    "cudnn": (Backend.CUDNN,),
    "flash-attn": (Backend.FLASH_ATTN_3, Backend.FLASH_ATTN_2),
    "flashinfer": (Backend.FLASHINFER,),
    "flashinfer-trtllm": (Backend.FLASHINFER_TRTLLM,),
    "torch": (Backend.TORCH,),
}
"""The back ends that each name of the setting stands for: the first that fits is taken."""

ORDER: Final[Mapping[AttentionPhase, tuple[Backend, ...]]] = {
    AttentionPhase.PREFILL: (Backend.CUDNN, Backend.TRITON, Backend.TORCH),
    AttentionPhase.DECODE: (Backend.TRITON, Backend.TORCH),
}
"""The back ends that `auto` may take, the fastest first. Only what this project has measured on a card is
here."""

UNTRIED: Final = frozenset(
    {Backend.FLASH_ATTN_2, Backend.FLASH_ATTN_3, Backend.FLASHINFER, Backend.FLASHINFER_TRTLLM}
)
"""The back ends that have run on no card yet, against stand-ins for their libraries alone. They are taken by
name, and the log says so."""

READS_WHOLE_PAGES: Final = frozenset({Backend.FLASH_ATTN_3, Backend.FLASHINFER_TRTLLM})
"""These may multiply what lies behind a row's last token by a weight of zero, so it must not be NaN:
FlashAttention 3 does where pages are whole tiles, and TensorRT-LLM's kernels promise nothing else."""

FUNCTIONS: Final[Mapping[Backend, tuple[str, tuple[str, ...]]]] = {
    Backend.FLASH_ATTN_2: ("flash_attn", ("flash_attn_varlen_func", "flash_attn_with_kvcache")),
    Backend.FLASH_ATTN_3: ("flash_attn_interface", ("flash_attn_with_kvcache",)),
    Backend.FLASHINFER: (
        "flashinfer",
        ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"),
    ),
    Backend.FLASHINFER_TRTLLM: ("flashinfer.decode", ("trtllm_batch_decode_with_kv_cache",)),
}
"""The module of each library, and the functions that are called in it."""


@dataclass(frozen=True, slots=True)
class Need:
    """The properties of a model, its cache and the device that a back end has to support."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    """The type of queries, by torch's name."""
    kv_dtype: str
    """The type of stored keys and values, by torch's name."""
    capability: tuple[int, int] | None
    """The GPU's compute capability; None without a GPU."""


@dataclass(frozen=True, slots=True)
class FoundLibrary:
    """An optional library: its module, or the reason why it cannot be used."""

    module: ModuleType | None
    said: str
    """The version of a module that was found, else the reason why there is none."""


Find = Callable[[Backend], FoundLibrary]


@dataclass(frozen=True, slots=True)
class Chosen:
    backend: Backend
    module: ModuleType | None = None
    """The library's module; None for a back end of the engine's own."""
    version: str = ""

    def __str__(self) -> str:
        notes = [self.version] if self.version else []
        if self.backend in UNTRIED:
            notes.append("untried on a card")
        return f"{self.backend.value} ({', '.join(notes)})" if notes else self.backend.value


@dataclass(frozen=True, slots=True)
class BackendChoice:
    prefill: Chosen
    decode: Chosen
    passed_over: tuple[str, ...] = ()
    """The back ends that come earlier in the order, each with the reason why it was not taken."""

    @property
    def reads_whole_pages(self) -> bool:
        return not READS_WHOLE_PAGES.isdisjoint({self.prefill.backend, self.decode.backend})

    @property
    def arithmetic(self) -> str:
        """Both back ends and their versions, whatever the setting was and whatever was passed over."""
        chosen = (self.prefill, self.decode)
        return ", ".join(f"{each.backend.value} {each.version}".rstrip() for each in chosen)

    def __str__(self) -> str:
        """Both back ends and those passed over, for the log."""
        text = f"attention: prefill by {self.prefill}, decode by {self.decode}"
        return text + (f" ({'; '.join(self.passed_over)})" if self.passed_over else "")


def parse(asked: str) -> Mapping[AttentionPhase, str]:
    """The back end's name for each phase, from a setting in the form that the module describes. Raises
    BadRunnerConfig."""
    if "=" not in asked:
        return dict.fromkeys(AttentionPhase, _known(asked))
    found = dict.fromkeys(AttentionPhase, AUTO)
    for part in asked.split(","):
        phase, _, name = part.partition("=")
        if phase not in {p.value for p in AttentionPhase}:
            raise BadRunnerConfig(f"attention_backend {asked!r}: a phase is prefill or decode, not {phase!r}")
        found[AttentionPhase(phase)] = _known(name)
    return found


def misnamed(asked: str) -> Iterator[str]:
    """The reason why a setting cannot be parsed, if it cannot."""
    try:
        parse(asked)
    except BadRunnerConfig as error:
        yield str(error)


def _known(name: str) -> str:
    if name != AUTO and name not in NAMES:
        raise BadRunnerConfig(f"attention_backend must be one of {AUTO}, {', '.join(NAMES)}, not {name!r}")
    return name


def find(backend: Backend) -> FoundLibrary:
    """Import a back end's library, if it is installed."""
    name, functions = FUNCTIONS[backend]
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        return FoundLibrary(None, "not installed")
    except (ImportError, OSError, RuntimeError) as error:
        # A wheel for another torch or CUDA is present, and cannot be used.
        return FoundLibrary(None, f"installed, but cannot be imported: {str(error).splitlines()[0]}")
    absent = [function for function in functions if not hasattr(module, function)]
    if absent:
        return FoundLibrary(None, f"installed, but has no {', '.join(absent)}")
    return FoundLibrary(module, _version(name.partition(".")[0]))


def _version(package: str) -> str:
    distributions = importlib.metadata.packages_distributions().get(package, [])
    return importlib.metadata.version(distributions[0]) if distributions else "version unknown"


def choose(asked: str, need: Need, find: Find = find) -> BackendChoice:
    """The back ends for `asked`, a setting. Raises BadRunnerConfig, with the reason, where one that is asked
    for by name is not installed or does not fit."""
    names = parse(asked)
    passed: list[str] = []
    chosen = {phase: _choose(phase, names[phase], need, find, passed) for phase in AttentionPhase}
    return BackendChoice(
        chosen[AttentionPhase.PREFILL], chosen[AttentionPhase.DECODE], tuple(dict.fromkeys(passed))
    )


def _choose(phase: AttentionPhase, name: str, need: Need, find: Find, passed: list[str]) -> Chosen:
    """The first back end that fits. The reasons against those before it are appended to `passed`."""
    candidates = ORDER[phase] if name == AUTO else NAMES[name]
    refused: list[str] = []
    for backend in candidates:
        problem = next(_misfits(backend, phase, need), None)
        library = find(backend) if problem is None and backend in FUNCTIONS else FoundLibrary(None, "")
        if problem is None and backend in FUNCTIONS and library.module is None:
            problem = library.said
        if problem is None:
            if need.capability is not None:
                passed += refused
            return Chosen(backend, library.module, library.said)
        refused.append(f"{backend.value} is {problem}" if library.said else f"{backend.value} {problem}")
    raise BadRunnerConfig(f"attention_backend {name} cannot be had for {phase.value}: {'; '.join(refused)}")


def _misfits(backend: Backend, phase: AttentionPhase, need: Need) -> Iterator[str]:
    """The reasons why a back end cannot be used, the plainest first."""
    if backend is Backend.TORCH:
        return
    if need.capability is None:
        yield "needs a GPU"
        return
    if backend is Backend.CUDNN and phase is AttentionPhase.DECODE:
        yield "computes whole prompts only: it can be had as prefill=cudnn"
    if backend is Backend.FLASHINFER_TRTLLM and phase is AttentionPhase.PREFILL:
        yield "computes decode rows only: it can be had as decode=flashinfer-trtllm"
    if backend is not Backend.TRITON and need.dtype not in ("float16", "bfloat16"):
        yield f"computes in float16 or bfloat16, not {need.dtype}"
    yield from RULES[backend](need, need.capability)


def _triton(need: Need, capability: tuple[int, int]) -> Iterator[str]:
    yield from _at_least((8, 0), capability)
    if need.head_dim not in (16, 32, 64, 128, 256):
        yield f"takes head sizes 16, 32, 64, 128 and 256, not {need.head_dim}"
    if need.page_size < 16:
        yield f"takes pages of 16 tokens and more, not {need.page_size}"
    if need.kv_dtype.startswith("float8") and capability < (8, 9):
        yield f"reads fp8 from compute capability 8.9, this GPU has {_dotted(capability)}"


def _cudnn(need: Need, capability: tuple[int, int]) -> Iterator[str]:
    """cuDNN's rules, and Triton's, whose kernel takes the rows that cuDNN does not."""
    yield from _triton(need, capability)
    if need.head_dim > 128:
        yield f"takes head sizes up to 128, not {need.head_dim}"


def _flash_attn_2(need: Need, capability: tuple[int, int]) -> Iterator[str]:
    """The rules of flash-attn 2.8.4: csrc/flash_attn/flash_api.cpp."""
    yield from _flash_attn_3(need, capability)
    if need.page_size % 256:
        yield f"takes pages of a multiple of 256 tokens (page_size), not {need.page_size}"


def _flash_attn_3(need: Need, capability: tuple[int, int]) -> Iterator[str]:
    """The rules of flash-attn's hopper/flash_api.cpp: queries, keys and values are of one type."""
    yield from _at_least((8, 0), capability)
    if need.head_dim % 8 or need.head_dim > 256:
        yield f"takes head sizes that are multiples of 8 up to 256, not {need.head_dim}"
    if need.kv_dtype != need.dtype:
        yield f"reads keys and values in the type of the queries, not {need.kv_dtype} for {need.dtype}"


def _flashinfer(need: Need, capability: tuple[int, int]) -> Iterator[str]:
    """The rules of FlashInfer 0.6: include/flashinfer/utils.cuh and jit/attention."""
    yield from _at_least((8, 0), capability)
    if need.head_dim not in (64, 128, 256):
        yield f"takes head sizes 64, 128 and 256, not {need.head_dim}"
    yield from _own_or_fp8(need)


def _flashinfer_trtllm(need: Need, capability: tuple[int, int]) -> Iterator[str]:
    """The rules of FlashInfer 0.6's decode.py and jit/xqa.py: `xqa` on Hopper and consumer Blackwell,
    `trtllm-gen` on 10.x."""
    if capability[0] not in (9, 10, 12):
        yield f"needs compute capability 9.x, 10.x or 12.x, this GPU has {_dotted(capability)}"
    pages = (16, 32, 64) if capability[0] == 10 else (16, 32, 64, 128)
    if need.page_size not in pages:
        yield f"takes pages of {', '.join(map(str, pages))} tokens (page_size), not {need.page_size}"
    if need.head_dim not in (64, 128, 256):
        yield f"takes head sizes 64, 128 and 256, not {need.head_dim}"
    yield from _own_or_fp8(need)


def _own_or_fp8(need: Need) -> Iterator[str]:
    if need.kv_dtype not in (need.dtype, "float8_e4m3fn"):
        yield f"reads keys and values as {need.dtype} or float8_e4m3fn, not {need.kv_dtype}"


def _at_least(least: tuple[int, int], capability: tuple[int, int]) -> Iterator[str]:
    if capability < least:
        yield f"needs compute capability {_dotted(least)}, this GPU has {_dotted(capability)}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


RULES: Final[Mapping[Backend, Callable[[Need, tuple[int, int]], Iterator[str]]]] = {
    Backend.TRITON: _triton,
    Backend.CUDNN: _cudnn,
    Backend.FLASH_ATTN_2: _flash_attn_2,
    Backend.FLASH_ATTN_3: _flash_attn_3,
    Backend.FLASHINFER: _flashinfer,
    Backend.FLASHINFER_TRTLLM: _flashinfer_trtllm,
}
