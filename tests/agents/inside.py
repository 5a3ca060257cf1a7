"""`python -m tests.agents.inside SCENE TEMPLATE KEPT AGENT...`, in a network namespace of its own: play a
scene, write what was recorded below the folder KEPT, and print an outcome to each line."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from tests.agents.catalogue import BY_NAME
from tests.agents.scenes import SCENES
from tests.agents.shapes import shape
from tests.agents.stage import Guest


def keep(kept: Path, own: Guest) -> None:
    """Write each exchange of a session whole, and its shape without anybody's text."""
    folder = kept / f"{own.agent.name}-{own.agent.version}"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    exchanges = own.recorder.exchanges
    for number, each in enumerate(exchanges):
        told = {
            "method": each.method,
            "path": each.path,
            "headers": each.headers,
            "body": each.json,
            "status": each.status,
            "answer_headers": each.answer_headers,
            "answer": each.answer.decode(errors="replace"),
        }
        (folder / f"{number:03}.json").write_text(json.dumps(told, indent=1))
    private = {str(own.place.folder): "/work/folder", str(own.place.home): "/home/agent"}
    made = shape([each for each in exchanges if each.method == "POST"], private)
    named = {"agent": own.agent.name, "version": own.agent.version, **made}
    (folder / "shape.json").write_text(json.dumps(named, indent=0))


def main(argv: list[str]) -> None:
    scene, template, kept, *names = argv
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.TemporaryDirectory(prefix="agents-") as folder:
        agents = [BY_NAME[name] for name in names]
        for made in SCENES[scene](agents, Path(folder), template, lambda own: keep(Path(kept), own)):
            sys.stdout.write(msgspec.json.encode(made).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
