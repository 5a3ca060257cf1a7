"""`python -m tests.gpu.part NAME LIMIT_S SHARES MODULE [ARGUMENT...]`: one part of run.sh, supervised."""

from __future__ import annotations

import asyncio
import sys

from tests.bench.engine.gpu.results import path
from tests.bench.engine.gpu.supervise import Part, run_part


def main(argv: list[str]) -> int:
    name, limit_s, shares, *command = argv
    return abs(asyncio.run(run_part(Part(name, command, float(limit_s), int(shares)), path())))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
