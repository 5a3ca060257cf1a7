"""Installs what `.ci/wheels` made, and starts it: `python -m tests.ship.wheels DIST`.

Each has an environment of its own. The whole wheel has an engine with its kernels, and a gateway before it
gives a first token. The wheel of a gateway alone has neither engine nor kernels nor the demo model, and gives
a token before the same engine. The source is installed where there is no compiler. It needs pip and an index
of packages, and nothing of this checkout but constraints.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent.parent
PATIENCE_S: Final = 600.0
AGAIN_S: Final = 0.2
STRANGERS: Final = ("engine", "torch", "triton", "safetensors", "numpy")


def say(line: str) -> None:
    sys.stdout.write(f"  {line}\n")
    sys.stdout.flush()


def run(*words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """A command's output. Raises SystemExit with what it said where it fails."""
    environment = {**os.environ, **(env or {}), "PYTHONPATH": ""}
    done = subprocess.run(
        words, env=environment, cwd=cwd, capture_output=True, text=True, timeout=3 * PATIENCE_S
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}:\n{done.stdout}{done.stderr}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Installed:
    """An environment with one distribution."""

    folder: Path

    @staticmethod
    def of(what: str, folder: Path, env: Mapping[str, str] | None = None) -> Installed:
        """The distribution with all that it requires, in the versions of constraints.txt."""
        run(sys.executable, "-m", "venv", str(folder))
        pip = (str(folder / "bin/pip"), "install", "-q", "--disable-pip-version-check")
        run(*pip, "-c", str(ROOT / "constraints.txt"), what, env=env)
        return Installed(folder)

    @property
    def penstock(self) -> str:
        return str(self.folder / "bin/penstock")

    @property
    def site(self) -> Path:
        [found] = self.folder.glob("lib/python3*/site-packages")
        return found

    @contextmanager
    def service(self, *words: str, url: str, cwd: Path) -> Iterator[None]:
        """`penstock WORDS`, once it is ready. It ends with the block, cleanly."""
        log = cwd / f"{words[0]}.log"
        with log.open("w") as stream:
            process = subprocess.Popen(
                [self.penstock, *words], cwd=cwd, stdout=stream, stderr=stream,
                env={**os.environ, "PYTHONPATH": ""},
            )  # fmt: skip
        try:
            deadline_s = time.monotonic() + PATIENCE_S
            while not is_ready(url):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise SystemExit(f"{self.penstock} {' '.join(words)}:\n{log.read_text()}")
                time.sleep(AGAIN_S)
            yield
        finally:
            process.terminate()
            code = process.wait(PATIENCE_S)
        if code != 0:
            raise SystemExit(f"{words[0]} ended with {code}:\n{log.read_text()}")


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5):
            return True
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def ask(url: str, key: str) -> int:
    """The number of events of a stream, which is whole."""
    body = {"model": "demo", "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
    head = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        events = [line for line in answer if line.startswith(b"data: ")]
    assert events[-1].strip() == b"data: [DONE]", events[-1]
    assert len(events) > 3, events
    return len(events)


def first_token(gateway: Installed, engine_url: str, folder: Path) -> None:
    """A gateway of this environment before an engine, by what `penstock init` writes."""
    port = free_port()
    told = run(gateway.penstock, "init", "--engine-url", engine_url, "--keys", "keys.env", cwd=folder)
    assert "gateway.toml" in told
    file = folder / "gateway.toml"
    text = file.read_text().replace("port = 8000", f"port = {port}")
    file.write_text(text.replace("port = 9090", f"port = {free_port()}"))
    run(gateway.penstock, "gateway", "--check", "gateway.toml", cwd=folder)
    [key, *_] = (line.partition("=")[2] for line in (folder / "keys.env").read_text().splitlines())
    url = f"http://127.0.0.1:{port}"
    with gateway.service("gateway", "--config", "gateway.toml", url=url, cwd=folder):
        say(f"{gateway.folder.name}: a gateway starts, and streams {ask(url, key)} events")


def check_alone(gateway: Installed) -> None:
    """What a gateway by itself does not have."""
    there = [name for name in STRANGERS if (gateway.site / name).exists()]
    assert not there, there
    [record] = gateway.site.glob("penstock_llm_gateway-*.dist-info/RECORD")
    files = [line.split(",")[0] for line in record.read_text().splitlines()]
    assert not [name for name in files if name.endswith((".so", ".safetensors"))]
    size = sum(path.stat().st_size for path in gateway.site.rglob("*") if path.is_file())
    say(f"gateway: {len(files)} files, no kernels and no demo model; with all it requires {size >> 20} MiB")


def check_kernels(whole: Installed, log: str) -> None:
    kernels = sorted(path.name for path in (whole.site / "engine/runtime/native/lib").glob("*.so"))
    assert kernels, "the wheel has no kernels"
    assert "torch kernels" not in log, log
    say(f"whole: kernels for {', '.join(name.split('-')[1] for name in kernels)}")


def check_source(file: Path, folder: Path) -> None:
    """The source, where nothing compiles: its engine computes in torch, and says so."""
    without = {"CXX": "/bin/false", "PATH": f"{Path(sys.executable).parent}:/bin"}
    run(sys.executable, "-m", "venv", str(folder))
    pip = (str(folder / "bin/pip"), "install", "-q", "--disable-pip-version-check", "--no-deps")
    run(*pip, str(file), env=without)
    source = Installed(folder)
    assert (source.site / "engine/demo/model/model.safetensors").exists()
    assert (source.site / "shared/py.typed").exists()
    assert not list((source.site / "engine/runtime/native/lib").glob("*.so"))
    say("source: installed without a compiler")


def main() -> None:
    """Try everything of a folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dist", type=Path)
    dist: Path = parser.parse_args().dist.resolve()
    [wheel] = dist.glob("penstock_llm-*.whl")
    [gateway_wheel] = dist.glob("penstock_llm_gateway-*.whl")
    [source] = dist.glob("penstock_llm-*.tar.gz")
    assert "manylinux" in wheel.name, "PyPI refuses a tag of one machine"
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        for one in ("a", "b", "engine"):
            (folder / one).mkdir()
        check_source(source, folder / "source")
        whole = Installed.of(f"{wheel}[all]", folder / "whole")
        alone = Installed.of(str(gateway_wheel), folder / "gateway")
        check_alone(alone)
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        engine = ("engine", "--model", "demo", "--port", str(port))
        stack.enter_context(whole.service(*engine, url=url, cwd=folder / "engine"))
        check_kernels(whole, (folder / "engine/engine.log").read_text())
        first_token(whole, url, folder / "a")
        first_token(alone, url, folder / "b")
    say("each distribution was installed, and starts")


if __name__ == "__main__":
    main()
