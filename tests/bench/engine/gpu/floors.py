"""The best rates of the card: read-only bandwidth, and that of a large bf16 product of random numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.bench.engine.gpu.measuring import graph_ms, span_ms
from tests.bench.engine.gpu.results import write

READ_BYTES = 8 << 30
SIDE = 8192
BLOCK = 16384


@triton.jit
def sum_kernel(source, out, blocks, BLOCK: tl.constexpr):
    """Read 32-bit words, and keep one sum per program."""
    total = tl.zeros([BLOCK], tl.int32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        total ^= tl.load(source + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))  # type: ignore[attr-defined]
    tl.store(out + tl.program_id(0), tl.sum(total))


def read_bytes_per_s() -> float:
    """The rate of the faster of two ways to read a buffer once: torch's sum, and a kernel that only reads."""
    words = torch.randint(1 << 30, (READ_BYTES // 4,), dtype=torch.int32, device="cuda")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.empty(processors * 8, dtype=torch.int32, device="cuda")
    blocks = words.numel() // BLOCK
    own = span_ms(lambda: sum_kernel[(processors * 8,)](words, out, blocks, BLOCK=BLOCK, num_warps=8), 5)
    library = span_ms(lambda: words.view(torch.float32).amax(), 5)
    write("floors", "read", kernel_ms=own, library_ms=library, bytes=READ_BYTES)
    return READ_BYTES / min(own, library) * 1e3


def bf16_flops() -> float:
    a, b = torch.randn(2, SIDE, SIDE, dtype=torch.bfloat16, device="cuda")
    return 2 * SIDE**3 / graph_ms(lambda: a @ b, 10) * 1e3


def main() -> int:
    read, flops = read_bytes_per_s(), bf16_flops()
    card = torch.cuda.get_device_properties(0)
    write(
        "floors",
        "card",
        name=card.name,
        multiprocessors=card.multi_processor_count,
        memory_bytes=card.total_memory,
        torch=torch.__version__,
        triton=triton.__version__,
        read_bytes_per_s=read,
        bf16_flops=flops,
    )
    return 0
