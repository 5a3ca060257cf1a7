"""Ctrl-C or SIGTERM at any moment of a start: nothing is shown that is no log line, and no process is left.

The moment is not waited for: one of the processes presses the keys itself, as it boots or as it comes to
import a certain module. The signal goes where a terminal would send it, to the group of the process that was
started.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services import MODEL_DIR, PATIENCE_S, ROOT, service, until

pytestmark = pytest.mark.slow

PRESSES = """
import os, signal, sys

job = int(os.environ.setdefault("JOB", str(os.getpgrp())))
role = next((word for word in ("core", "serve", "shared.cli") if word in sys.orig_argv), "gateway")
whose, _, module = os.environ["MOMENT"].partition(" ")

def press():
    open(os.environ["PRESSED"], "x").close()
    if "STOPS" in os.environ:
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        os.killpg(job, signal.SIGINT)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            press()

if role == whose:
    press() if module == "boot" else sys.meta_path.insert(0, Finder())
"""
ENGINE = ["--model", str(MODEL_DIR), "--port", "0", "--threads", "1"]
UP = ["shared.cli", "up", "--port", "0", "--threads", "1", "--data-dir", "LOGS"]
ENDED_ITSELF = 0
"""Its loop was running already: as after any Ctrl-C that comes later."""
INTERRUPTED = 130


def processes_of(mark: Path) -> list[Path]:
    """Those that were started with this in their environment, by anyone."""
    return [process for process in Path("/proc").glob("[0-9]*") if str(mark).encode() in environment(process)]


def environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:  # it has gone, or is not ours
        return b""


@pytest.mark.parametrize(
    ("argv", "moment", "status"),
    [
        (["engine", "serve", *ENGINE], "serve engine.config", INTERRUPTED),
        (["engine", "serve", *ENGINE], "serve engine.api.http.server", INTERRUPTED),
        (["engine", "serve", *ENGINE], "core boot", ENDED_ITSELF),
        (["engine", "serve", *ENGINE], "core engine.config", ENDED_ITSELF),
        (["engine", "serve", *ENGINE], "core torch", ENDED_ITSELF),
        (["shared.cli", "engine", *ENGINE], "serve boot", INTERRUPTED),
        (["shared.cli", "gateway", "--config", "none"], "gateway boot", INTERRUPTED),
        (["gateway", "--config", "none"], "gateway gateway.app", INTERRUPTED),
        (UP, "shared.cli shared.cli.up", INTERRUPTED),
        (UP, "shared.cli engine.config", INTERRUPTED),
        (UP, "serve engine.config", ENDED_ITSELF),
        (UP, "core torch", ENDED_ITSELF),
    ],
)
def test_an_interrupted_start_ends_quietly_and_whole(
    tmp_path: Path, short_tmp: Path, argv: list[str], moment: str, status: int
) -> None:
    (tmp_path / "sitecustomize.py").write_text(PRESSES)
    pressed, logs = tmp_path / "pressed", tmp_path / "logs"
    argv = [str(logs) if word == "LOGS" else word for word in argv]
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "MOMENT": moment, "PRESSED": str(pressed)}
    with service(argv, TMPDIR=str(short_tmp), XDG_CACHE_HOME=str(tmp_path), **environment) as process:
        assert process.wait() == status
        assert pressed.exists(), "the moment never came"
        until(lambda: not processes_of(pressed))
        written = [process.text, *(log.read_text() for log in logs.glob("*.log"))]
    lines = [json.loads(line) for text in written for line in text.splitlines()]
    assert not [line for line in lines if line["level"] not in ("debug", "info")]
    assert not [line for line in lines if line["event"] == "engine.ready"]
    assert list(short_tmp.iterdir()) == []


SCRIPT = ["-c", "from shared.entry import main; main()"]
"""The console script `penstock`."""
ALONE = ["unshare", "--pid", "--fork", "--mount-proc"]


@pytest.mark.parametrize(
    ("argv", "moment"),
    [
        (["engine", "serve", *ENGINE], "serve engine.config"),
        (["shared.cli", "engine", *ENGINE], "serve boot"),
        (["gateway", "--config", "none"], "gateway gateway.config.whole"),
        (["shared.cli", "gateway", "--config", "none"], "gateway boot"),
        ([*SCRIPT, "gateway", "--config", "none"], "gateway shared.cli"),
        (UP, "shared.cli shared.cli.up"),
    ],
)
@pytest.mark.parametrize("is_first", [False, True], ids=["with a parent", "first of its container"])
def test_a_start_that_is_stopped_ends(tmp_path: Path, argv: list[str], moment: str, is_first: bool) -> None:
    """The kernel drops a SIGTERM for the first process of a container, where it has no handler."""
    if is_first and subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespace of processes can be made here")
    (tmp_path / "sitecustomize.py").write_text(PRESSES)
    pressed = tmp_path / "pressed"
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "MOMENT": moment, "PRESSED": str(pressed), "STOPS": ""}
    argv = [str(tmp_path / "logs") if word == "LOGS" else word for word in argv]
    started = subprocess.run(
        [*(ALONE if is_first else []), sys.executable, *([] if argv[0] == "-c" else ["-m"]), *argv],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert pressed.exists(), "the moment never came"
    assert (started.returncode, started.stderr) == (0, b"")
