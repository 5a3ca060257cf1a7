"""What the engine's image for CUDA does on a machine without a GPU: `tests/ship/run.sh --cuda` builds it and
starts this. Each line that is printed is something that was seen.

No GPU is needed for any of it: that the image says so where it has none, serves on the CPU, finds the kernels
that it brings along, and can compile what Triton compiles at its first start on a GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from typing import Final

import httpx

from tests.ship.containers import (
    BODY,
    CONFINED,
    NETWORK,
    PATIENCE_S,
    Container,
    confined,
    container,
    podman,
    said,
    until,
)

IMAGE: Final = "localhost/penstock-engine:cuda"
CACHE: Final = ("--tmpfs", "/var/cache/penstock:size=256m,mode=1777,exec")
"""Triton loads what it has compiled from there."""
LIMITS: Final = ("--memory", "6g", "--cpus", "2")
COMPILE: Final = """
import subprocess, tempfile
from pathlib import Path
from triton.backends.nvidia import driver
from triton.runtime import build
with tempfile.TemporaryDirectory() as where:
    library, source = Path(where, "libcuda.so.1"), Path(where, "empty.c")
    source.touch()  # a driver without functions, to link with
    subprocess.check_call(["gcc", "-shared", "-o", library, source])
    file = f"{driver.dirname}/driver.c"
    print(build._build("cuda_utils", file, where, [where], driver.include_dirs, driver.libraries, []))
"""
"""Triton's own library, compiled as its first use of a GPU compiles it."""
COUNT: Final = "import engine.runtime.kernels.shipped as s; print(len(list(s.SHIPPED.glob('*/*.cubin'))))"


def sizes(base: str) -> None:
    """The image, and the part of it that is not the base."""
    image, below = (int(podman("image", "inspect", "--format", "{{.Size}}", one)) for one in (IMAGE, base))
    said(f"{IMAGE}: {image / 1e6:.0f} MB, {(image - below) / 1e6:.0f} MB of them over its base")


def refused() -> None:
    """A GPU that is asked for and not there ends the start, with words that say what to do."""
    began_s = time.monotonic()
    command = ["podman", "run", "--rm", "--network", "none", *CONFINED, *CACHE, *LIMITS, IMAGE]
    done = subprocess.run(
        [*command, "--model", "demo", "--device", "cuda"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    told = done.stdout + done.stderr
    assert done.returncode != 0
    assert "finds no GPU" in told, told
    assert "device=cpu runs without" in told
    assert "Traceback" not in told
    said(f"--device cuda without a GPU: exit {done.returncode} after {time.monotonic() - began_s:.1f} s")


def served(engine: Container) -> None:
    """By itself it computes on the CPU."""
    until(engine.is_ready, "the engine ready")
    url = f"http://{engine.address}:8001/v1/chat/completions"
    with httpx.stream("POST", url, json=BODY, timeout=PATIENCE_S, trust_env=False) as answer:
        text = "".join(answer.iter_text())
    assert text.count("data: [DONE]") == 1
    said(f"without a GPU it serves on the CPU: a stream of {text.count('data: ') - 1} events")


def kernels(engine: Container, cards: str) -> None:
    """A start on a card that the image has kernels for compiles nothing, and what it does compile, it can."""
    count = int(engine.exec("python", "-c", COUNT).stdout)
    walk = ("python", "-m", "engine.runtime.device.shipping", "/tmp/compiled")
    for card in cards.split(","):
        done = engine.exec(*walk, "--cards", card, "--models", "qwen3-8b", "--threads", "1")
        found = re.fullmatch(rf"{card}: (\d+) kernels compiled, (\d+) there already", done.stdout.strip())
        assert found is not None, done.stdout + done.stderr
        compiled, ready = int(found[1]), int(found[2])
        assert compiled == 0, done.stdout
        assert ready > 40, done.stdout
        said(f"{count} kernels are shipped; a start of Qwen3 8B on {card} finds {ready} and compiles none")
    done = engine.exec("python", "-c", COMPILE)
    assert done.returncode == 0, done.stderr
    said("what Triton compiles at its first use of a GPU can be compiled in it")


def main() -> None:
    base, cards = sys.argv[1:]
    podman("network", "rm", "-f", NETWORK, check=False)
    podman("network", "create", NETWORK)
    try:
        sizes(base)
        refused()
        with container("ship-cuda", IMAGE, (*CACHE, *LIMITS)) as engine:
            served(engine)
            confined(engine)
            kernels(engine, cards)
    finally:
        podman("network", "rm", "-f", NETWORK, check=False)
    said("all was as it should be; no GPU was there")


if __name__ == "__main__":
    main()
