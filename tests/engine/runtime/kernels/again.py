"""What `ahead.py` compiled, looked for by another process whose own cache is empty: `again FOLDER`.

Prints how many kernels were found among those in FOLDER, and how many were compiled.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from triton import knobs
from triton.runtime import driver

from engine.runtime.device.shipping import KernelCount
from engine.runtime.kernels import shipped
from engine.runtime.kernels.absent_card import AbsentCard
from engine.runtime.kernels.launching import compiling_in
from tests.engine.runtime.kernels.ahead import walk


def main() -> int:
    setattr(shipped, "SHIPPED", Path(sys.argv[1]))  # noqa: B010  # for this process alone
    knobs.cache.manager_class = shipped.ShippedCache
    driver.set_active(AbsentCard((9, 0)))
    count = KernelCount()
    knobs.compilation.listener = count.listen
    with ThreadPoolExecutor(1) as threads, compiling_in(threads, torch.device("meta")):
        walk()
    print(json.dumps({"compiled": count.compiled, "found": count.found}))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
