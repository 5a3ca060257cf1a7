"""Compiles kernels for sm_90 on a machine without a GPU, exactly as they would be launched.

A kernel is replaced by something that records its launch; the product's own function is called with tensors
that have no memory; and what was recorded is compiled. Run as a program (the interpreter of the other tests
cannot be switched off in their process): prints one JSON line per launch. Every run compiles a tile of each
kind; by command, every tile that a start may choose, and what differs in a condition alone.
"""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.runtime.device import device_sampling
from engine.runtime.device.device_sampling import DeviceSampling
from engine.runtime.kernels import (
    begin,
    decode_attention,
    delta_net,
    fused,
    matmul,
    prefill_attention,
    restoring,
    split_matmul,
)
from engine.runtime.kernels.dependent_launch import dependent_launches
from engine.runtime.models.spec import DeltaNet
from engine.runtime.step.protocols import Ahead
from engine.runtime.weights.fp8 import Fp8Weight
from engine.runtime.weights.parameters import DeltaWeights
from tests.effort import IS_WHOLE, some

HOPPER = GPUTarget("cuda", 90, 32)
INSTRUCTIONS = (
    "wgmma.mma_async",
    "mma.sync",
    "cp.async.cg",
    "cp.async.bulk",
    "st.local",
    "ld.global",
    "cvt.bf16.f16",
    "atom.global.gpu.acq_rel",
)
TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Recorder:
    """Stands where a kernel stands, and keeps what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launches.append((self._kernel, args, kwargs))


@contextmanager
def recorded(module: ModuleType, name: str) -> Iterator[Recorder]:
    """One that is recorded already stays so."""
    kernel = getattr(module, name)
    recorder = kernel if isinstance(kernel, Recorder) else Recorder(kernel)
    setattr(module, name, recorder)
    try:
        yield recorder
    finally:
        setattr(module, name, kernel)


def compile_launch(kernel: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """With Triton's own specialisation: aligned pointers, integers that are 1 or divisible by 16, but for
    those that a kernel exempts."""
    names: list[str] = kernel.arg_names
    options = {k: v for k, v in kwargs.items() if k not in names}
    given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        special = type(value) is int and not parameter.do_not_specialize
        exempt = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        aligned = (isinstance(value, Tensor) and not exempt) or (special and value % 16 == 0)
        if parameter.is_constexpr or value is None or (special and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = TYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        if aligned and signature[parameter.name] != "constexpr":
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=HOPPER, options=options)


def report(
    name: str, module: ModuleType, kernel: str, launch: Callable[[], object], *, dependently: bool = False
) -> None:
    with recorded(module, kernel) as recorder, dependent_launches(dependently):
        launch()
    for recorded_kernel, args, kwargs in recorder.launches:
        compiled = compile_launch(recorded_kernel, args, kwargs)
        ptx = compiled.asm["ptx"]
        print(  # noqa: T201
            json.dumps(
                {"name": name, "shared_bytes": compiled.metadata.shared}
                | {word: len(re.findall(re.escape(word), ptx)) for word in INSTRUCTIONS}
                | assembled(compiled.asm["cubin"])
                | (before_the_wait(ptx) if dependently else {})
            ),
            flush=True,
        )


def assembled(cubin: bytes) -> dict[str, int]:
    """What the machine code takes: registers per thread, bytes of stack (registers spill to it), and how many
    instructions use the stack within loops, and within loops that have no other in them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        found = re.search(r"REG:(\d+) STACK:(\d+)", disassembled(file.name, "-res-usage"))
        assert found
        registers, stack_bytes = map(int, found.groups())
        looped, innermost = uses_in_loops(disassembled(file.name, "-sass")) if stack_bytes else (0, 0)
    return {
        "registers": registers,
        "stack_bytes": stack_bytes,
        "looped_spills": looped,
        "innermost_spills": innermost,
    }


def disassembled(path: str, option: str) -> str:
    command = [knobs.nvidia.cuobjdump.path, option, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def uses_in_loops(sass: str) -> tuple[int, int]:
    """How often the stack is written to or read from in all loops, and in the innermost ones.

    A loop is what lies between a branch backwards and where it leads: at least those of all loops."""
    instructions = {
        int(address, 16): text for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", sass)
    }
    assert instructions
    branches = (
        (int(target[1], 16), address)
        for address, text in instructions.items()
        if (target := re.search(r"\bBRA\b.*\b(0x[0-9a-f]+)", text))
    )
    loops = {(begin, end) for begin, end in branches if begin < end}
    innermost = {
        (begin, end)
        for begin, end in loops
        if not any(begin <= b and e <= end for b, e in loops - {(begin, end)})
    }
    uses = [address for address, text in instructions.items() if re.search(r"\b(?:STL|LDL)\b", text)]
    return within(uses, loops), within(uses, innermost)


def within(addresses: Iterable[int], loops: Iterable[tuple[int, int]]) -> int:
    return sum(any(begin <= address <= end for begin, end in loops) for address in addresses)


def before_the_wait(ptx: str) -> dict[str, int]:
    """How often a kernel waits for the one before, and what it touches until then."""
    body = ptx[ptx.index(".entry") :]
    before, _, after = body.partition("griddepcontrol.wait")
    return {
        "waits": body.count("griddepcontrol.wait"),
        "lets_start": after.count("griddepcontrol.launch_dependents"),
        "touched": len(re.findall(r"\b(?:ld|st|red|atom|cp\.async)\b[.\w]*(?:global|bulk)", before)),
        "prefetched": before.count("prefetch.global.L2"),
    }


def report_dependent() -> None:
    """All that a decode step launches. But for those that read weights ahead, and the store, they are
    compiled so by command alone."""
    norm = fused.Norm(meta(1024, dtype=torch.float32), 1e-6)
    stream, weight = fused.ResidualStream(meta(1, 1024), meta(1, 1024)), matrix(6144, 1024, torch.bfloat16)
    gated = partial(matmul.normed_matmul, stream, norm, weight, gated=True)
    few, tile = meta(64, 4096), split_matmul.split_tiles_for(4096, 4096, 64)[0]
    wide, fp8 = matrix(4096, 4096, torch.bfloat16), matrix(4096, 4096, torch.float8_e4m3fn)
    assert isinstance(fp8, Fp8Weight)
    row = meta(32, 4096)
    launches: list[tuple[str, ModuleType, str, Callable[[], object]]] = [
        ("gated", matmul, "skinny_kernel", partial(gated, matmul.TILES_ALONE[1])),
        ("matmul", matmul, "skinny_kernel", partial(matmul.skinny_matmul, row[:1], wide, matmul.TILES[0])),
        ("split", split_matmul, "split_kernel", partial(split_matmul.split_matmul, few, wide, tile)),
        ("store", fused, "norm_rotate_store_kernel", store_launch),
        ("decode", decode_attention, "decode_kernel", decode_launch(32, 8, 128)),
        *(("gated", matmul, "skinny_kernel", partial(gated, tile)) for tile in matmul.TILES[:2]),
        ("restore", restoring, "restore_kernel", partial(restoring.restored, fp8, torch.bfloat16)),
        ("begin", begin, "begin_step_kernel", begin_launch),
        ("list_work", decode_attention, "list_work_kernel", list_launch),
        ("delta step", delta_net, "delta_step_kernel", delta_step_launch),
        ("norm", fused, "rms_norm_kernel", partial(fused.rms_norm, row, meta(4096), 1e-6, row)),
        ("gates", fused, "sigmoid_mul_kernel", partial(fused.sigmoid_mul, meta(32, 2048), meta(32, 5120))),
        ("squares", fused, "mean_squares_kernel", wide_squares_launch),
        ("silu", fused, "silu_mul_kernel", partial(fused.silu_mul, meta(32, 28_672))),
        *(("sampling", device_sampling, name, sample_launch) for name in SAMPLING),
    ]
    for number, (name, module, kernel, launch) in enumerate(some(launches, usual=4)):
        report(f"dependent {name} {number}", module, kernel, launch, dependently=True)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def decode_launch(
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None = None,
    page_size: int = 64,
    queries: int = 1,
    **kv: Any,
) -> Callable[[], object]:
    """Batch 32 of an 8B model. `queries`: the tokens of a row for which a tile has room."""
    rows, programs, device = 32, 264, torch.device("meta")

    def launch() -> Tensor:
        cache = meta(1000, kv_heads, page_size, head_dim, **kv)
        return decode_attention.paged_decode(
            meta(rows, heads, head_dim),
            cache,
            cache,
            meta(rows, 128, dtype=torch.int32),
            meta(rows, dtype=torch.int32),
            decode_attention.DecodeWork.empty(programs, device),
            decode_attention.DecodeScratch.empty(programs, rows, heads, kv_heads, head_dim, device, queries),
            scale=0.1,
            window=window,
            programs=programs,
            behind=meta(rows, dtype=torch.int32) if queries > 1 else None,
            queries=queries,
        )

    return launch


def report_largest_pages() -> None:
    """Of a prefill, the largest tiles; of decode, pages that are read in parts."""
    for dim in (256, 128, 64):
        page: dict[str, Any] = {"page_size": 32_768 // dim}
        decode, prefill = decode_launch(8, 2, dim, **page), prefill_launch(8, 2, dim, **page)
        report(f"parts decode {dim}", decode_attention, "decode_kernel", decode)
        report(f"largest prefill {dim}", prefill_attention, "prefill_kernel", prefill)


def list_launch(behind: Tensor | None = None) -> None:
    work = decode_attention.DecodeWork.empty(264, torch.device("meta"))
    lengths = meta(256, dtype=torch.int32)
    decode_attention.list_work(lengths, 8, None, 64, work, programs=264, behind=behind)


def report_decode() -> None:
    module = decode_attention
    report("list_work", module, "list_work_kernel", list_launch)
    report("decode 8B", module, "decode_kernel", decode_launch(32, 8, 128))
    report("decode fp8 cache", module, "decode_kernel", decode_launch(32, 8, 128, dtype=torch.float8_e4m3fn))
    own = meta(256, dtype=torch.int32)
    report("list_work drafts", module, "list_work_kernel", partial(list_launch, own))
    fp8: dict[str, Any] = {"dtype": torch.float8_e4m3fn}
    drafted = [("fp8 cache wide", decode_launch(32, 8, 128, queries=16, **fp8))]
    if IS_WHOLE:
        report("decode window", module, "decode_kernel", decode_launch(28, 4, 128, 4096))
        report("decode Qwen3.5", module, "decode_kernel", decode_launch(8, 2, 256))
        drafted += [
            ("8B", decode_launch(32, 8, 128, queries=4)),
            ("8B wide", decode_launch(32, 8, 128, queries=16)),
            ("window wide", decode_launch(28, 4, 128, 4096, queries=8)),
            ("large heads wide", decode_launch(8, 2, 256, queries=8)),
            ("fp8 cache", decode_launch(32, 8, 128, queries=4, **fp8)),
        ]
    for name, launch in drafted:
        report(f"decode drafts {name}", module, "decode_kernel", launch)


def prefill_launch(
    heads: int, kv_heads: int, head_dim: int, window: int | None = None, page_size: int = 64, **kv: Any
) -> Callable[[], object]:
    """2k tokens of an 8B model."""

    def launch() -> Tensor:
        cache = meta(1000, kv_heads, page_size, head_dim, **kv)
        return prefill_attention.paged_prefill(
            meta(2048, heads, head_dim),
            cache,
            cache,
            meta(2, 128, dtype=torch.int32),
            meta(2, 3, dtype=torch.int32),
            meta(64, 2, dtype=torch.int32),
            scale=0.1,
            window=window,
        )

    return launch


def report_prefill() -> None:
    module = prefill_attention
    report("prefill 8B", module, "prefill_kernel", prefill_launch(32, 8, 128))
    fp8 = prefill_launch(32, 8, 128, dtype=torch.float8_e4m3fn)
    report("prefill fp8 cache", module, "prefill_kernel", fp8)
    if IS_WHOLE:
        report("prefill window", module, "prefill_kernel", prefill_launch(28, 4, 128, 4096))
        report("prefill Qwen3.5", module, "prefill_kernel", prefill_launch(8, 2, 256))


def gated_store_launch() -> Tensor:
    """32 tokens of a Qwen3.5-0.8B."""
    cache, place = meta(1000, 2, 64, 256), meta(32, dtype=torch.int64)
    norm = fused.QKNorm(meta(256), meta(256), 1e-6)
    angles = meta(32, 128), meta(32, 128)
    qkv = meta(32, 20 * 256)
    return fused.norm_rotate_store(qkv, angles, norm, cache, cache, place, place, gated=True)


def wide_store_launch() -> Tensor:
    """32 tokens of an OLMo-3-7B, whose heads are normed as one."""
    cache, place, qkv = meta(1000, 32, 64, 128), meta(32, dtype=torch.int64), meta(32, 96 * 128)
    norm = fused.QKNorm(meta(4096), meta(4096), 1e-6, squares=fused.mean_squares(qkv, 32, 32, 128))
    angles = meta(32, 64), meta(32, 64)
    return fused.norm_rotate_store(qkv, angles, norm, cache, cache, place, place)


def wide_squares_launch() -> None:
    """The norm of these heads alone."""
    with recorded(fused, "norm_rotate_store_kernel"):
        wide_store_launch()


def store_launch(clear_tails: bool = False, **kv: Any) -> Tensor:
    """32 tokens of a Qwen3-8B."""
    cache, place = meta(1000, 8, 64, 128, **kv), meta(32, dtype=torch.int64)
    norm = fused.QKNorm(meta(128), meta(128), 1e-6)
    qkv, angles = meta(32, 48 * 128), (meta(32, 64), meta(32, 64))
    return fused.norm_rotate_store(qkv, angles, norm, cache, cache, place, place, clear_tails=clear_tails)


def report_fused() -> None:
    x, weight = meta(32, 4096), meta(4096)
    report("begin", begin, "begin_step_kernel", begin_launch)
    report("rms_norm", fused, "rms_norm_kernel", lambda: fused.rms_norm(x, weight, 1e-6, x))
    fp8 = torch.float8_e4m3fn
    report("norm_rotate_store fp8", fused, "norm_rotate_store_kernel", lambda: store_launch(dtype=fp8))
    with recorded(fused, "mean_squares_kernel"):
        report("norm_rotate_store wide", fused, "norm_rotate_store_kernel", wide_store_launch)
    report("silu_mul", fused, "silu_mul_kernel", lambda: fused.silu_mul(meta(32, 2 * 14336)))
    if IS_WHOLE:
        report("norm_rotate_store gated", fused, "norm_rotate_store_kernel", gated_store_launch)
        report("mean_squares", fused, "mean_squares_kernel", wide_squares_launch)
        report("norm_rotate_store clear", fused, "norm_rotate_store_kernel", lambda: store_launch(True))
        gelu = partial(fused.silu_mul, meta(32, 2 * 6912), gelu=True)
        report("gelu_mul", fused, "silu_mul_kernel", gelu)


SAMPLING = ("measure_kernel", "weigh_kernel", "order_kernel", "choose_kernel", "settle_kernel")


def sample_launch(*, verifies: bool = False) -> object:
    """A batch of 32 over Qwen3's vocabulary."""
    rows, vocab, device = 32, 151_936, torch.device("meta")
    columns = DeviceSampling.empty(64, vocab, device)
    scratch = device_sampling.SamplingScratch.empty(rows, vocab, torch.bfloat16, device)
    row = meta(rows, dtype=torch.int32)
    ahead = Ahead(row, row, row, 4, row) if verifies else None
    known = meta(64, 4097, dtype=torch.int32)
    with ExitStack() as stack:
        for kernel in SAMPLING:
            stack.enter_context(recorded(device_sampling, kernel))
        return device_sampling.sample(meta(rows, vocab), row, row, columns, scratch, known, ahead)


def begin_launch() -> object:
    """A batch of 32 of a Qwen3-8B."""
    row, table = meta(32, dtype=torch.int32), meta(64, 641, dtype=torch.int32)
    known, frequencies = meta(64, 40_961, dtype=torch.int32), meta(1, 2, 64, dtype=torch.float32)
    return begin.begin_step(row, row, known, table, meta(151_936, 4096), frequencies, 64)


QWEN3_5 = DeltaNet(16, 16, 128, 128, 4)
"""Of 0.8B and 2B."""


def delta_layer(net: DeltaNet) -> tuple[delta_net.DeltaLayer, Tensor, Tensor]:
    """One, and the states of 64 slots."""
    conv, norm = meta(net.kernel, net.channels, dtype=torch.float32), meta(net.value_dim, dtype=torch.float32)
    of_heads = meta(net.value_heads, dtype=torch.float32)
    weights = DeltaWeights(conv, of_heads, of_heads, norm)
    states = meta(64, net.value_heads, net.key_dim, net.value_dim, dtype=torch.float32)
    return delta_net.DeltaLayer(net, weights, 1e-6), meta(64, net.kernel - 1, net.channels), states


def delta_step_launch(net: DeltaNet = QWEN3_5) -> None:
    """A batch of 32."""
    layer, inputs, heads = delta_layer(net)
    x, row = meta(32, net.channels + net.values + 2 * net.value_heads), meta(32, dtype=torch.int32)
    delta_net.delta_step(x, row, row, layer, inputs, heads, meta(32, net.values))


def delta_verify_launch(net: DeltaNet = QWEN3_5) -> None:
    """32 tokens, of which some are drafts."""
    layer, inputs, heads = delta_layer(net)
    x, row = meta(32, net.channels + net.values + 2 * net.value_heads), meta(32, dtype=torch.int32)
    cells = delta_net.Cells(meta(64, dtype=torch.int32), 33)
    ahead, out = Ahead(row, row, row, 4, row), meta(32, net.values)
    delta_net.delta_step(x, row, row, layer, inputs, heads, out, cells)
    delta_net.delta_step(x, row, row, layer, inputs, heads, out, cells, ahead)
    delta_net.turn_windows(row, ahead, row, cells)


def delta_chunks_launch(net: DeltaNet = QWEN3_5) -> None:
    """A prompt of 2k tokens."""
    layer, inputs, heads = delta_layer(net)
    tables = meta(1, 5, dtype=torch.int32), meta(32, 2, dtype=torch.int32)
    x, out = meta(2048, net.channels + net.values + 2 * net.value_heads), meta(2048, net.values)
    with ExitStack() as stack:
        for kernel in DELTA_CHUNKS:
            stack.enter_context(recorded(delta_net, kernel))
        delta_net.delta_chunks(x, delta_net.DeltaRows(*tables), layer, inputs, heads, out)


DELTA_CHUNKS = tuple(f"{name}_kernel" for name in ("convolve", "keep_inputs", "prepare", "carry", "gate"))


def report_delta() -> None:
    report("delta step", delta_net, "delta_step_kernel", delta_step_launch)
    if IS_WHOLE:
        shared = partial(delta_step_launch, DeltaNet(16, 48, 128, 128, 4))
        report("delta step of shared keys", delta_net, "delta_step_kernel", shared)
    for kernel, name in (("delta_step", "step in cells"), ("delta_verify", "drafts"), ("turn", "turn")):
        verify = partial(delta_verify_launch, DeltaNet(16, 48, 128, 128, 4) if kernel == "turn" else QWEN3_5)
        with ExitStack() as stack:
            for other in ("delta_step_kernel", "delta_verify_kernel", "turn_kernel"):
                stack.enter_context(recorded(delta_net, other))
            report(f"delta {name}", delta_net, f"{kernel}_kernel", verify)
    for kernel in DELTA_CHUNKS:
        report(f"delta {kernel.removesuffix('_kernel')}", delta_net, kernel, delta_chunks_launch)


def report_sampling() -> None:
    for kernel in some(("weigh_kernel", "measure_kernel", "choose_kernel"), usual=1):
        report(kernel.removesuffix("_kernel"), device_sampling, kernel, sample_launch)
    for kernel in ("measure_kernel", "choose_kernel", "settle_kernel"):
        launch = partial(sample_launch, verifies=True)
        report(f"{kernel.removesuffix('_kernel')} drafts", device_sampling, kernel, launch)


def matrix(height: int, width: int, dtype: torch.dtype, group: int = 0) -> matmul.Weight:
    """`group`: of an fp8 one."""
    weight = meta(height, width, dtype=dtype)
    if dtype != torch.float8_e4m3fn:
        return weight
    scales = meta(*((width // group, height) if group else (height,)), dtype=torch.float32)
    return Fp8Weight(weight, scales, group)


def report_fused_matmul() -> None:
    """Qwen3-0.6B's gate-up and QKV, a row, by every tile; and 8B's gate-up in fp8."""
    norm = fused.Norm(meta(1024, dtype=torch.float32), 1e-6)
    stream = fused.ResidualStream(meta(1, 1024), meta(1, 1024))
    weight = matrix(6144, 1024, torch.bfloat16)
    for tile in some(matmul.TILES, usual=1):
        for name, gated in (("normed", False), ("gated", True)):
            launch = partial(matmul.normed_matmul, stream, norm, weight, tile, gated=gated)
            report(f"matmul {name} {tile.n}x{tile.k}", matmul, "skinny_kernel", launch)
    if IS_WHOLE:
        gelu = partial(matmul.normed_matmul, stream, norm, weight, matmul.TILES[1])
        report("matmul gated gelu", matmul, "skinny_kernel", partial(gelu, gated=True, gelu=True))
        begun = fused.ResidualStream(stream.residual)
        launch = partial(
            matmul.normed_matmul, begun, norm, matrix(4096, 1024, torch.bfloat16), matmul.TILES[1]
        )
        report("matmul first", matmul, "skinny_kernel", launch)
    norm = fused.Norm(meta(4096, dtype=torch.float32), 1e-6)
    stream = fused.ResidualStream(meta(16, 4096), meta(16, 4096))
    lone = fused.ResidualStream(meta(1, 4096), meta(1, 4096))
    for tile in some(matmul.TILES_ALONE, usual=1):
        for name, dtype in (("", torch.bfloat16), (" fp8", torch.float8_e4m3fn)):
            launch = partial(
                matmul.normed_matmul, lone, norm, matrix(2 * 14_336, 4096, dtype), tile, gated=True
            )
            report(f"matmul alone {tile.n}x{tile.k}{name}", matmul, "skinny_kernel", launch)
    for name, group in some((("fp8 blocks", 128), ("fp8", 0)), usual=1):
        weight = matrix(2 * 14_336, 4096, torch.float8_e4m3fn, group)
        launch = partial(matmul.normed_matmul, stream, norm, weight, matmul.TILES[1], gated=True)
        report(f"matmul gated {name}", matmul, "skinny_kernel", launch)


def report_matmul() -> None:
    """8B's output projection."""

    def launch(rows: int, tile: matmul.Tile, dtype: torch.dtype, group: int = 0) -> Callable[[], object]:
        weight = matrix(4096, 4096, dtype, group)
        return lambda: matmul.skinny_matmul(meta(rows, 4096), weight, tile)

    tile = matmul.TILES[1]
    report("matmul", matmul, "skinny_kernel", launch(8, tile, torch.bfloat16))
    report("matmul narrow", matmul, "skinny_kernel", launch(8, matmul.NARROW, torch.bfloat16))
    report("matmul 64 rows", matmul, "skinny_kernel", launch(64, tile, torch.bfloat16))
    report("matmul fp8", matmul, "skinny_kernel", launch(8, tile, torch.float8_e4m3fn))
    report("matmul fp8 blocks", matmul, "skinny_kernel", launch(8, tile, torch.float8_e4m3fn, 128))
    for tile in some(matmul.TILES_MANY, usual=1):
        for rows in some((256, 128), usual=1):
            name = f"matmul fp8 {rows} rows {tile.n}x{tile.k}"
            report(name, matmul, "skinny_kernel", launch(rows, tile, torch.float8_e4m3fn))
    weight = matrix(4096, 4096, torch.bfloat16)
    for rows in some((256, 64), usual=1):
        for tile in split_tiles(rows):
            product = partial(split_matmul.split_matmul, meta(rows, 4096), weight, tile)
            report(f"split {rows} rows {tile.n}x{tile.k}", split_matmul, "split_kernel", product)
    for group in (0, 128):
        weight = matrix(28_672, 4096, torch.float8_e4m3fn, group)
        assert isinstance(weight, Fp8Weight)
        restore = partial(restoring.restored, weight, torch.bfloat16)
        report(f"restore {group}", restoring, "restore_kernel", restore)


def split_tiles(rows: int) -> Sequence[matmul.Tile]:
    """One of each width that 8B's output projection may be given."""
    tiles = {tile.n: tile for tile in split_matmul.split_tiles_for(4096, 4096, rows)}
    return some(list(tiles.values()), usual=1)


if __name__ == "__main__":
    gc.disable()  # a tenth of the work
    report_fused()
    report_decode()
    report_prefill()
    report_delta()
    if IS_WHOLE:
        report_largest_pages()
    report_sampling()
    report_matmul()
    report_fused_matmul()
    report_dependent()
    sys.exit(0)
