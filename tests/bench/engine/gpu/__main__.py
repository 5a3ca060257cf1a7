"""`python -m tests.bench.engine.gpu PART`: measure one part; rows go to the file that the environment
names."""

from __future__ import annotations

import sys

import torch

from tests.bench.engine.gpu import LIMITS_S
from tests.bench.engine.gpu.supervise import NO_GPU


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0] not in LIMITS_S:
        sys.stderr.write(f"usage: python -m tests.bench.engine.gpu {'|'.join(LIMITS_S)}\n")
        return 2
    if not torch.cuda.is_available():
        return NO_GPU
    from tests.bench.engine.gpu import attention, floors, matmul, profile, steps

    parts = {"floors": floors, "attention": attention, "matmul": matmul, "profile": profile, "steps": steps}
    with torch.inference_mode():
        return int(parts[argv[0]].main())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
