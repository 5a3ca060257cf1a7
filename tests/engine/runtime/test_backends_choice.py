"""Which back end is chosen, and that what cannot be had is refused with the reason."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from engine.runtime.setup import backends
from engine.runtime.setup.backends import AttentionPhase, Backend, Find, FoundLibrary, Need, choose, parse
from engine.runtime.setup.model_errors import BadRunnerConfig
from engine.runtime.setup.runner_config import RunnerConfig
from shared.process.setting_values import ConfigError

HOPPER = Need(32, 8, 128, 64, "bfloat16", "bfloat16", (9, 0))
EVERY_LIBRARY = tuple(backends.FUNCTIONS)


def installed(*which: Backend) -> Find:
    def find(backend: Backend) -> FoundLibrary:
        there = backend in which
        return FoundLibrary(ModuleType("library"), "1.2.3") if there else FoundLibrary(None, "not installed")

    return find


@pytest.mark.parametrize("which", [(), EVERY_LIBRARY])
def test_auto_is_cudnn_and_our_kernels_whatever_is_installed(which: tuple[Backend, ...]) -> None:
    choice = choose("auto", HOPPER, installed(*which))
    assert (choice.prefill.backend, choice.decode.backend) == (Backend.CUDNN, Backend.TRITON)
    assert str(choice) == "attention: prefill by cudnn, decode by triton"


def test_auto_takes_what_has_run_on_a_card() -> None:
    """The benches' results tell what has."""
    results = Path(__file__).parents[2] / "bench" / "results"
    rows = [
        json.loads(line) for path in results.glob("gpu-*.jsonl") for line in path.read_text().splitlines()
    ]
    ran = {row["back_end"] for row in rows if "back_end" in row and row.get("ok")}
    taken = {backend for order in backends.ORDER.values() for backend in order}
    assert {backend.value for backend in taken} <= ran
    assert taken == set(Backend) - backends.UNTRIED


def test_what_was_passed_over_is_told() -> None:
    said = str(choose("auto", replace(HOPPER, head_dim=256), installed()))
    assert said == (
        "attention: prefill by triton, decode by triton (cudnn takes head sizes up to 128, not 256)"
    )


def test_a_library_by_name_is_said_to_be_untried() -> None:
    choice = choose("flashinfer", HOPPER, installed(*EVERY_LIBRARY))
    assert choice.decode.backend is Backend.FLASHINFER
    assert choice.decode.module is not None
    assert str(choice.decode) == "flashinfer (1.2.3, untried on a card)"


def test_who_reads_whole_pages_wants_them_clean() -> None:
    find = installed(*EVERY_LIBRARY)
    wanting = {
        name: choose(f"decode={name},prefill=triton", HOPPER, find) for name in ("flash-attn", "triton")
    }
    assert [choice.reads_whole_pages for choice in wanting.values()] == [True, False]


def test_each_phase_by_name() -> None:
    find = installed(*EVERY_LIBRARY)
    choice = choose("prefill=cudnn,decode=triton", HOPPER, find)
    assert (choice.prefill.backend, choice.decode.backend) == (Backend.CUDNN, Backend.TRITON)
    choice = choose("decode=flashinfer-trtllm", HOPPER, find)
    assert (choice.prefill.backend, choice.decode.backend) == (Backend.CUDNN, Backend.FLASHINFER_TRTLLM)
    both = choose("flash-attn", HOPPER, find)
    assert both.prefill.backend is both.decode.backend is Backend.FLASH_ATTN_3


def test_version_two_of_flash_attn_serves_where_its_pages_fit() -> None:
    find = installed(Backend.FLASH_ATTN_2)
    wide = replace(HOPPER, page_size=256)
    assert choose("flash-attn", wide, find).decode.backend is Backend.FLASH_ATTN_2
    assert choose("triton", wide, find).prefill.backend is Backend.TRITON
    with pytest.raises(BadRunnerConfig, match="multiple of 256 tokens"):
        choose("flash-attn", HOPPER, find)


@pytest.mark.parametrize(
    ("asked", "need", "find", "reason"),
    [
        ("flash-attn", HOPPER, installed(), "flash-attn 3 is not installed"),
        ("flashinfer", HOPPER, installed(), "flashinfer is not installed"),
        ("cudnn", HOPPER, installed(), "cannot be had for decode: cudnn computes whole prompts only"),
        ("flashinfer-trtllm", HOPPER, installed(*EVERY_LIBRARY), "for prefill: .* computes decode rows only"),
        ("flashinfer", replace(HOPPER, head_dim=96), installed(*EVERY_LIBRARY), "head sizes 64, 128 and 256"),
        ("triton", replace(HOPPER, head_dim=80), installed(), "head sizes 16, 32, 64, 128 and 256, not 80"),
        ("triton", replace(HOPPER, page_size=8), installed(), "pages of 16 tokens and more, not 8"),
        ("triton", replace(HOPPER, capability=(7, 5)), installed(), "capability 8.0, this GPU has 7.5"),
        (
            "triton",
            replace(HOPPER, capability=(8, 0), kv_dtype="float8_e4m3fn"),
            installed(),
            "reads fp8 from compute capability 8.9",
        ),
        (
            "flash-attn",
            replace(HOPPER, kv_dtype="float8_e4m3fn"),
            installed(*EVERY_LIBRARY),
            "in the type of the queries, not float8_e4m3fn for bfloat16",
        ),
        (
            "flashinfer",
            replace(HOPPER, dtype="float32", kv_dtype="float32"),
            installed(*EVERY_LIBRARY),
            "computes in float16 or bfloat16, not float32",
        ),
        (
            "decode=flashinfer-trtllm",
            replace(HOPPER, page_size=256),
            installed(*EVERY_LIBRARY),
            "takes pages of 16, 32, 64, 128 tokens",
        ),
        (
            "decode=flashinfer-trtllm",
            replace(HOPPER, capability=(8, 0)),
            installed(*EVERY_LIBRARY),
            "needs compute capability 9.x, 10.x or 12.x, this GPU has 8.0",
        ),
        ("triton", replace(HOPPER, capability=None), installed(), "triton needs a GPU"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(
    asked: str, need: Need, find: Find, reason: str
) -> None:
    with pytest.raises(BadRunnerConfig, match=reason):
        choose(asked, need, find)


@pytest.mark.parametrize("asked", ["fast", "prefill=fast", "later=triton", "triton,torch", ""])
def test_unknown_names_are_refused(asked: str) -> None:
    with pytest.raises(BadRunnerConfig):
        parse(asked)
    with pytest.raises(ConfigError):
        RunnerConfig("somewhere", attention_backend=asked)
    assert parse("decode=torch") == {AttentionPhase.PREFILL: "auto", AttentionPhase.DECODE: "torch"}


def test_a_machine_without_a_gpu_looks_for_no_library() -> None:
    def find(backend: Backend) -> FoundLibrary:
        raise AssertionError("imported for nothing")

    choice = choose("auto", replace(HOPPER, capability=None), find)
    assert (choice.prefill.backend, choice.decode.backend) == (Backend.TORCH, Backend.TORCH)
    assert str(choice) == "attention: prefill by torch, decode by torch"


def test_a_library_is_found_by_what_it_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not there; there without what we call; there with it; there and broken."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # as if it were not installed
    assert backends.find(Backend.FLASH_ATTN_3) == FoundLibrary(None, "not installed")
    module = ModuleType("flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    found = backends.find(Backend.FLASH_ATTN_3)
    assert found == FoundLibrary(None, "installed, but has no flash_attn_with_kvcache")
    module.flash_attn_with_kvcache = print  # type: ignore[attr-defined]
    assert backends.find(Backend.FLASH_ATTN_3) == FoundLibrary(module, "version unknown")

    def broken(name: str) -> ModuleType:
        raise ImportError("undefined symbol: _ZN3c10\nand more")

    monkeypatch.setattr(importlib, "import_module", broken)
    said = backends.find(Backend.FLASH_ATTN_3).said
    assert said == "installed, but cannot be imported: undefined symbol: _ZN3c10"
