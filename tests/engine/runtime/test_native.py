"""The C++ decoder beside its twin in torch: the same weights, the same steps, a cache each, full of NaN."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from engine.contract.messages import Plan, SamplingParams, SlotAssignment, Want
from engine.runtime.collective.collective import ALONE
from engine.runtime.host import host_shard as loading
from engine.runtime.host.exact_attention import ExactAttention
from engine.runtime.host.model import PagedModel, TorchModel
from engine.runtime.host.torch_paged import PagedAttention, Workspace
from engine.runtime.load import load_runner
from engine.runtime.models.spec import DecoderSpec, DeltaNet, Rope, Tempering, Yarn
from engine.runtime.native import build
from engine.runtime.native.decoder import NativeDecoder, Shape, Step, built_isas, misfit
from engine.runtime.reference.torch_decoder import TorchDecoder
from engine.runtime.setup.model_errors import BadRunnerConfig
from engine.runtime.setup.runner_config import RunnerConfig
from engine.runtime.step.batch import PackedBatch
from engine.runtime.step.kv_cache import KVCache, KVGeometry
from engine.runtime.step.protocols import AttentionSpec
from engine.runtime.step.seats import HostSlots
from engine.runtime.step.states import StateGeometry, States
from engine.runtime.weights.checkpoint import ALL, TensorPart
from tests.engine.decoders import dense, like, with_deltas
from tests.engine.runtime.conftest import MakeModel, load

PAGE_SIZE, MAX_LEN, VOCAB = 16, 256, 100
ISAS = built_isas()
Rows = Sequence[tuple[int, int]]

RAGGED: dict[str, Rows] = {
    # (start, length) per row, decodes first
    "one decode": [(0, 1)],
    "decodes": [(3, 1), (0, 1), (70, 1), (15, 1), (16, 1), (7, 1), (200, 1)],
    "whole prompts": [(0, 9), (0, 2), (0, 33), (0, 130)],
    "chunks": [(5, 6), (8, 1), (8, 8), (37, 103)],
    "mixed": [(11, 1), (64, 1), (0, 17), (13, 20), (4, 4), (0, 1)],
}
PLAIN = dense(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=80,
    heads=4,
    kv_heads=2,
    head_dim=32,
    norm_eps=1e-5,
    context_len=MAX_LEN,
    rope=Rope(10_000.0),
    windows=(None, None),
    tied_embeddings=True,
)
YARN = Yarn(4.0, 64, 32.0, 1.0, 1.2, truncate=True)
GATED = like(PLAIN, output_gate=True, qk_norm="heads", rope=Rope(500.0, part=0.25))
TWO_ROPES = (None, Rope(500.0, YARN, 0.5, interleaved=True))
SHAPES: dict[str, DecoderSpec] = {
    "plain": PLAIN,
    "group of 1, norms": like(PLAIN, heads=2, qk_norm="heads"),
    "group of 4, biases": like(PLAIN, kv_heads=1, bias=True, out_bias=True, mlp_bias=True),
    "group of 7, untied": like(PLAIN, heads=7, kv_heads=1, hidden_size=112, tied_embeddings=False),
    "heads of 64, window": like(PLAIN, head_dim=64, windows=(24, None)),
    "heads of 128, tiny window": like(PLAIN, head_dim=128, windows=(1, 24)),
    "heads of 256": like(PLAIN, heads=2, head_dim=256, hidden_size=48),
    "heads of 16": like(PLAIN, head_dim=16),
    "norms on both sides, GeGLU, scales": like(
        PLAIN, norms="both", act="gelu_tanh", norm_offset=1.0, embed_scale=8.3, logit_softcap=3.0, scale=0.3
    ),
    "norms behind, two ropes": like(
        PLAIN,
        norms="behind",
        qk_norm="width",
        ropes=TWO_ROPES,
        residual_scale=0.3,
    ),
    "side by side, centred norms": like(PLAIN, norms="parallel", norm_kind="layer", qk_norm="heads"),
    "no gate, untied, scaled logits": like(
        PLAIN,
        act="relu2",
        gated=False,
        qk_norm="rotated heads",
        tempering=Tempering(0.5, 16),
        mlp_bias=True,
        logit_scale=0.25,
        tied_embeddings=False,
        embed_scale=3.0,
    ),
    "output gates": like(GATED, kv_heads=1, head_dim=256, heads=2),
    "delta nets": with_deltas(GATED, DeltaNet(2, 4, 32, 64, kernel=4)),
    "delta nets, heads of 128": with_deltas(GATED, DeltaNet(1, 1, 128, 128, kernel=4)),
    "delta nets, odd heads": with_deltas(GATED, DeltaNet(1, 3, 16, 48, kernel=3)),
}


class Weights:
    """A source that makes up every tensor from its name, whole."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def stack(
        self, names: Sequence[str], rows: Sequence[int], *columns: int, part: TensorPart = ALL
    ) -> Tensor:
        parts = []
        for name, count, (first, last) in zip(names, rows, part.row_spans(rows), strict=True):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            own = torch.randn(count, *columns, generator=generator)
            own = 1 + own / 5 if "norm" in name else own / (columns[0] ** 0.5 if columns else 2)
            parts.append(own[first:last] if part.columns is None else own[first:last, slice(*part.columns)])
        return torch.cat(parts).bfloat16().to(self._dtype)


@dataclass
class Stage:
    """One model, and sequences whose tokens and pages depend on their number alone."""

    model: PagedModel
    slots: HostSlots

    @staticmethod
    def of(
        config: DecoderSpec,
        dtype: torch.dtype = torch.float32,
        isa: str | None = None,
        page_size: int = PAGE_SIZE,
        source: Weights | None = None,
        **native: Any,
    ) -> Stage:
        """In torch, unless `isa` names a library."""
        pages = 10 * MAX_LEN // page_size
        own = native.get("ranks", ALONE).shard.of(config)
        geometry = KVGeometry(len(own.attentions), own.kv_heads, page_size, own.head_dim, dtype)
        cache = KVCache(geometry, pages)
        for tensor in (*cache.keys, *cache.values):
            tensor.fill_(torch.nan)
        model: PagedModel
        if isa is None:
            spec = AttentionSpec.of(config)
            decoder = TorchDecoder(config, Weights(dtype))
            attend = partial(PagedAttention, cache, spec=spec, workspace=Workspace(dtype))
            model = TorchModel(decoder, attend)
            if config.deltas:
                states = States(StateGeometry.of(config, dtype), 10)
                model = TorchModel(decoder, partial(ExactAttention, cache, spec=spec), states)
        else:
            settings = {"dtype": dtype, "page_size": page_size, "threads": 1}
            network = NativeDecoder(isa, config, source or Weights(dtype), **(settings | native))  # type: ignore[arg-type]
            model = network.attach(cache, slots=10)
        return Stage(model, HostSlots(10, MAX_LEN, page_size, VOCAB))

    def seat(self, ends: Sequence[int], seed: int = 0) -> None:
        """Sequence i in slot i, on pages shuffled by the seed."""
        size = self.slots.page_size
        free = random.Random(seed).sample(range(10 * MAX_LEN // size), 10 * MAX_LEN // size)
        greedy = SamplingParams(seed=0, max_tokens=1)
        tokens = [[(7 * i + 13 * j + j * j) % VOCAB for j in range(end)] for i, end in enumerate(ends)]
        seated = [SlotAssignment.of(i, ids, len(ids), greedy) for i, ids in enumerate(tokens)]
        grown = [(i, [free.pop() for _ in range(-(-end // size))]) for i, end in enumerate(ends)]
        self.slots.apply(Plan(0, [], seated, grown, [], [], [], []))

    def step(self, rows: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """(slot, start, length) -> hidden states [length, hidden] of each row."""
        slots, starts, lengths = (list(column) for column in zip(*rows, strict=True))
        batch = PackedBatch.of(
            Plan(0, [], [], [], slots, starts, lengths, [Want.NOTHING] * len(rows)), self.slots
        )
        hidden = self.model.forward(batch)
        return list(hidden.split([length for _, _, length in rows]))

    def run(self, rows: Rows, seed: int = 0) -> Tensor:
        """The past of each row in one chunk, then the rows together."""
        self.seat([start + length for start, length in rows], seed)
        for slot, (start, _) in enumerate(rows):
            if start:
                self.step([(slot, 0, start)])
        return torch.cat(self.step([(slot, *row) for slot, row in enumerate(rows)]))


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("rows", RAGGED.values(), ids=RAGGED.keys())
def test_equals_torch_in_float32(rows: Rows, config: DecoderSpec) -> None:
    """In two threads with the best library alone: threads that wait for each other take the cores from other
    tests."""
    torchs = Stage.of(config)
    expected = torchs.run(rows)
    for isa in ISAS:
        ours = Stage.of(config, isa=isa, threads=2 if isa == ISAS[0] else 1)
        hidden = ours.run(rows)
        assert_close(hidden, expected, atol=2e-5, rtol=1e-4, msg=f"{isa}: {{}}".format)
        logits, own = torchs.model.logits(hidden), ours.model.logits(hidden)
        assert_close(own, logits, atol=1e-4, rtol=1e-4, msg=f"{isa}: {{}}".format)


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_bfloat16_is_no_further_from_float32_than_torch_is(config: DecoderSpec) -> None:
    rows = [row for kind in ("decodes", "mixed") for row in RAGGED[kind][:4]]
    exact = Stage.of(config).run(rows)
    torchs = Stage.of(config, torch.bfloat16).run(rows).float()
    for isa in ISAS:
        ours = Stage.of(config, torch.bfloat16, isa).run(rows).float()
        assert (ours - exact).norm() <= 1.1 * (torchs - exact).norm(), isa
        assert (ours - exact).norm() < (0.03 if config.deltas else 0.02) * exact.norm(), isa


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", ISAS)
def test_company_chunks_pages_and_threads_change_nothing(isa: str, dtype: torch.dtype) -> None:
    company(like(PLAIN, windows=(None, 24), qk_norm="heads"), dtype, isa)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", ISAS)
def test_company_chunks_slots_and_threads_change_no_state(isa: str, dtype: torch.dtype) -> None:
    company(SHAPES["delta nets, odd heads"], dtype, isa)
    company(SHAPES["delta nets, heads of 128"], dtype, isa)


def company(config: DecoderSpec, dtype: torch.dtype, isa: str, **native: Any) -> None:
    """To the bit, in bfloat16 too: every sum is taken in one order."""
    ends = [130, 1, 33, 77, 16, 15, 90, 64]
    alone = Stage.of(config, dtype, isa, **native)
    alone.seat(ends)
    expected = [alone.step([(slot, 0, end)])[0] for slot, end in enumerate(ends)]

    crowd = Stage.of(config, dtype, isa, threads=3, **native)
    crowd.seat(ends, seed=5)
    computed = [0] * len(ends)
    found: list[list[Tensor]] = [[] for _ in ends]
    rng = random.Random(1)
    while any(done < end for done, end in zip(computed, ends, strict=True)):
        unfinished = [slot for slot, end in enumerate(ends) if computed[slot] < end]
        lengths = {
            slot: min(rng.choice([1, 1, 1, 2, 7, 50]), ends[slot] - computed[slot]) for slot in unfinished
        }
        rows = sorted(((slot, computed[slot], lengths[slot]) for slot in unfinished), key=lambda row: row[2])
        for (slot, _, length), hidden in zip(rows, crowd.step(rows), strict=True):
            found[slot].append(hidden)
            computed[slot] += length
    for parts, whole in zip(found, expected, strict=True):
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", ISAS)
def test_a_step_may_have_any_number_of_tokens(isa: str, dtype: torch.dtype) -> None:
    """They are cut into blocks of some 96 rows, which a matrix unit wants in multiples of 32."""
    ends = [130, 130, 130]
    alone, stage = Stage.of(PLAIN, dtype, isa), Stage.of(PLAIN, dtype, isa)
    alone.seat(ends)
    expected = torch.cat([alone.step([(slot, 0, end)])[0] for slot, end in enumerate(ends)])
    stage.seat(ends)
    for tokens in (*range(95, 391, 31), *range(96, 391, 32), 97, 161, 192, 257, 390):
        rows = [(slot, 0, min(tokens - 130 * slot, 130)) for slot in range(-(-tokens // 130))]
        assert torch.equal(torch.cat(stage.step(rows)), expected[:tokens]), tokens


@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_page_sizes(page_size: int) -> None:
    rows = RAGGED["mixed"]
    found = Stage.of(PLAIN, isa=ISAS[0], page_size=page_size).run(rows)
    assert_close(found, Stage.of(PLAIN).run(rows), atol=2e-5, rtol=1e-4)


def test_logits_take_no_fresh_memory_in_every_step() -> None:
    stage = Stage.of(PLAIN, isa=ISAS[0])
    hidden = torch.randn(7, PLAIN.hidden_size)
    widest = stage.model.logits(hidden)
    expected = widest[2:5].clone()
    fewer = stage.model.logits(hidden[2:5])
    assert fewer.data_ptr() == stage.model.logits(hidden).data_ptr() == widest.data_ptr()
    assert torch.equal(stage.model.logits(hidden[2:5]), expected)


def test_what_is_not_finite_shows() -> None:
    """A NaN in one row reaches that row's logits, and nobody else's."""
    stage = Stage.of(PLAIN, isa=ISAS[0])
    stage.seat([4, 4])
    stage.step([(0, 0, 3), (1, 0, 3)])
    assert isinstance(stage.model, NativeDecoder)
    page = int(stage.slots.page_table[0, 0])
    stage.model._pages[0][page] = torch.nan
    bad, good = stage.model.logits(torch.cat(stage.step([(0, 3, 1), (1, 3, 1)])))
    assert bad.isnan().all()
    assert good.isfinite().all()


@pytest.mark.parametrize("isa", ISAS)
def test_libraries_share_nothing_in_one_process(isa: str) -> None:
    """What the linker calls unique is one for all libraries of a process, whichever was loaded first."""
    [library] = build.LIBRARIES.glob(f"penstock-{isa}-*.so")
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, check=True, text=True
    )
    symbols = [line.split()[-2:] for line in listed.stdout.splitlines()]
    assert ["T", "penstock_forward"] in symbols
    assert not [name for kind, name in symbols if kind == "u" and "penstock" in name]


@pytest.mark.parametrize("isa", ISAS)
def test_memory_that_is_not_to_be_had_is_an_error_and_not_the_end(isa: str) -> None:
    """No more than the address space could hold is asked for, which no system grants."""
    model = Stage.of(PLAIN, isa=isa).model
    assert isinstance(model, NativeDecoder)
    column, native = ctypes.c_int64 * 1, model._library
    nothing = torch.zeros(1, dtype=torch.int32)
    step = Step(1, column(0), column(0), column(1 << 59), 0, 0, nothing.data_ptr(), nothing.data_ptr())
    with pytest.raises(MemoryError, match="no more memory"):
        native.penstock_forward(model._model, ctypes.byref(step), None)
    with pytest.raises(MemoryError, match="no more memory"):
        native.penstock_set_vector(model._model, 0, 0, None, 1 << 60)
    with pytest.raises(MemoryError, match="no more memory"):
        native.penstock_new(ctypes.byref(Shape(layers=1 << 50)), 2)


def test_the_best_library_for_a_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = "avx2 bmi1 bmi2 f16c fma movbe"
    new = f"{old} avx512f avx512bw avx512cd avx512dq avx512vl"
    flags = {
        f"{new} avx512_bf16 avx512_vnni amx_bf16 amx_tile": "amx_bf16",
        f"{new} avx512_bf16 avx512_vnni": "avx512_bf16",
        f"{new} avx512_vnni": "avx512_vnni",
        new: "avx512",
        f"{old} avx512f avx512_bf16": "avx2",
        "fpu sse2": "portable",
    }
    assert built_isas() == ISAS
    monkeypatch.setattr("engine.runtime.native.decoder.may_use_tiles", lambda: True)
    for line, isa in flags.items():
        (tmp_path / "cpuinfo").write_text(f"flags : {line}\n")
        assert built_isas(tmp_path)[0] == isa
    monkeypatch.setattr("engine.runtime.native.decoder.may_use_tiles", lambda: False)
    (tmp_path / "cpuinfo").write_text(f"flags : {next(iter(flags))}\n")
    assert built_isas(tmp_path)[0] == "avx512_bf16", "the system keeps the matrix unit for itself"


def test_a_library_older_than_its_sources_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert built_isas()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DNEWER"))
    assert not built_isas()


def test_without_a_compiler_nothing_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "LIBRARIES", tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(build.BuildFailed, match="no C\\+\\+ compiler"):
        build.build()


def test_a_compiler_that_refuses_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "LIBRARIES", tmp_path)
    monkeypatch.setattr(build, "ISAS", {"avx2": ("-march=abacus",)})
    with pytest.raises(build.BuildFailed, match="abacus"):
        build.build()
    assert not list(tmp_path.iterdir())


def test_a_model_that_does_not_fit_the_vectors_goes_to_torch(tiny_model: MakeModel) -> None:
    odd = tiny_model("llama", intermediate_size=90)
    said: list[str] = []
    config = RunnerConfig(str(odd), dtype="float32", max_num_seqs=2, threads=1)
    load_runner(config, said.append)
    assert "computing with torch kernels (intermediate_size 90 cannot be divided by 16)" in said
    assert misfit(PLAIN, 8) == "page_size 8 cannot be divided by 16"
    small, wide = DeltaNet(1, 1, 24, 8, kernel=4), DeltaNet(1, 1, 16, 16, kernel=17)
    said_of = misfit(with_deltas(PLAIN, small), 16)
    assert said_of == "linear_key_head_dim 24, linear_value_head_dim 8 cannot be divided by 16"
    assert misfit(with_deltas(PLAIN, wide), 16) == "linear_conv_kernel_dim 17 is more than 16"
    with pytest.raises(
        BadRunnerConfig, match="kernels=native needs the native kernels: intermediate_size 90"
    ):
        load(odd, kernels="native")


def test_without_libraries_torch_computes_and_int8_is_refused(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "built_isas", list)
    assert isinstance(load(tiny_model("llama")).model, TorchModel)
    with pytest.raises(BadRunnerConfig, match=r"int8 weights need the native kernels: .* not built"):
        load(tiny_model("llama"), weights="int8")


def test_int8_beside_torchs_kernels_is_refused_by_their_setting(tiny_model: MakeModel) -> None:
    with pytest.raises(BadRunnerConfig, match="int8 weights need the native kernels: kernels=torch"):
        load(tiny_model("llama"), weights="int8", kernels="torch")


def test_the_log_says_what_computes(tiny_model: MakeModel) -> None:
    said: list[str] = []
    config = RunnerConfig(str(tiny_model("llama")), max_num_seqs=2, threads=1, weights="int8")
    load_runner(config, said.append)
    assert f"computing with native kernels ({ISAS[0]}, int8 weights, 1 threads)" in said
