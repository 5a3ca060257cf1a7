"""The commands of the pages by task (`gateway/docs`, `engine/docs`), run as they stand.

A page is one script of its `bash` blocks, in their order; a block below `<!-- file: NAME -->` is written
there first, one below `<!-- append: NAME -->` added. Every command has to succeed. What runs in a terminal
of its own runs beside, and the next line waits until it is ready; ports are free ones. `helm install` and
`upgrade` render the chart, `kubectl` reads the key of the page's own gateway. Blocks in `sh` need a network,
and are not run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml

from tests.services import PATIENCE_S
from tests.ship import tools

ROOT: Final = Path(__file__).parent.parent
NO_TASKS: Final = {"settings.md", "api.md", "evidence.md", "threat-model.md", "walk.md"}
PAGES: Final = sorted(
    path
    for folder in ("gateway/docs", "engine/docs")
    for path in (ROOT / folder).glob("*.md")
    if path.name not in NO_TASKS
)
FIRST: Final = ROOT / "gateway/docs/first-hour.md"
PORTS: Final = ("8000", "8001", "8002", "8003", "8004", "8010", "8011", "9090")
OF_A_CLUSTER: Final = {"helm.md", "upgrade.md"}
_BLOCK: Final = re.compile(r"(?:<!-- (file|append): (\S+) -->\n)?```(\w+)\n(.*?)```", re.DOTALL)

PENSTOCK: Final = """\
#!/bin/bash
run=({python} -P -m shared.cli)
is_service=
case "$1" in engine|gateway|up) is_service=yes;; esac
case " $* " in *" --check "*|*" --help "*) is_service=;; esac
if [ -z "$is_service" ]; then
    "${{run[@]}}" "$@" || exit
    [ "$1" != init ] || sed -i {renumbered} gateway.toml
    exit
fi
port=$(grep -oP '(?<=--port )\\d+' <<<"$*")
[ "$1" != gateway ] || port=$(grep -oPm1 '^port = \\K\\d+' "$3")
[ -n "$port" ] || {{ port={engine_port}; set -- "$@" --port $port; }}
"${{run[@]}}" "$@" >"$1-$port.log" 2>&1 &
pid=$!
echo $pid >>pids
until [ $SECONDS -gt {patience_s} ]; do
    curl -q -sf -o /dev/null "http://127.0.0.1:$port/readyz" && exit
    kill -0 $pid 2>/dev/null || break
    sleep 0.1
done
cat "$1-$port.log" >&2
exit 1
"""
HELM: Final = """\
#!/bin/bash
[ "$1" != -n ] || shift 2
case "$1" in install|upgrade) ;; *) exit 0;; esac
args=()
for word in "${@:4}"; do
    case "$word" in --wait|--create-namespace|--timeout|90m) ;; *) args+=("$word");; esac
done
exec HELM template penstock "ROOT/$3" "${args[@]}" >/dev/null
"""
CURL: Final = """\
fail-with-body
silent
show-error
retry = 20
retry-delay = 1
retry-all-errors
"""
"""What somebody sees as a failure is one here; a change that counts within a second is waited for."""
KUBECTL: Final = """\
#!/bin/bash
case "$*" in *"get secret"*) printf %s "$KEY" | base64 -w0;; esac
"""


def script_of(page: Path) -> str:
    """The page as a script."""
    parts = []
    for how, name, language, text in _BLOCK.findall(page.read_text()):
        if how:
            parts.append(
                f"cat {'>' if how == 'file' else '>>'} {name} <<'END_OF_BLOCK'\n{text}END_OF_BLOCK\n"
            )
        elif language == "bash":
            parts.append(text)
    return "".join(parts)


def _free_ports() -> dict[str, str]:
    """A free port for each of those that pages name."""
    with contextlib.ExitStack() as held:
        found = {}
        for port in PORTS:
            one = held.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            found[port] = str(one.getsockname()[1])
        return found


def _renumbered(text: str, ports: dict[str, str]) -> str:
    return re.sub(rf"\b({'|'.join(ports)})\b", lambda one: ports[one[1]], text)


class Terminal:
    """A folder in which pages are followed, with the commands that they use."""

    def __init__(self, folder: Path, ports: dict[str, str]) -> None:
        self._folder = folder
        self._ports = ports
        own = folder / "bin"
        own.mkdir()
        renumbered = " ".join(f"-e 's/\\b{port}\\b/{free}/'" for port, free in ports.items())
        commands = {
            "penstock": PENSTOCK.format(
                python=sys.executable,
                renumbered=renumbered,
                engine_port=ports["8001"],
                patience_s=int(5 * PATIENCE_S),
            ),
            "kubectl": KUBECTL,
        }
        for name, text in commands.items():
            self._install(name, text)
        (folder / ".curlrc").write_text(CURL)
        (folder / "values.yaml").write_text("{}\n")

    def _install(self, name: str, text: str) -> None:
        path = self._folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def has_helm(self) -> None:
        """Have helm, which may be fetched first."""
        self._install("helm", HELM.replace("HELM", str(tools.helm())).replace("ROOT", str(ROOT)))

    def follow(self, script: str) -> None:
        """Run a script as it stands, but for its ports."""
        environment = {
            "PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self._folder),
            "PYTHONPATH": str(ROOT),
            "PENSTOCK_ADMIN_URL": f"http://127.0.0.1:{self._ports['9090']}",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": "/tmp",
        }
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", _renumbered(script, self._ports)],
            cwd=self._folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=20 * PATIENCE_S,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"

    def stop(self) -> None:
        """End the services that were started."""
        pids = self._folder / "pids"
        for pid in pids.read_text().split() if pids.exists() else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@pytest.fixture(scope="module")
def engine_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine with the demo model, which the pages' gateways stand before."""
    ports = _free_ports()
    terminal = Terminal(tmp_path_factory.mktemp("engine"), ports)
    try:
        terminal.follow("penstock engine --model demo")
        yield ports["8001"]
    finally:
        terminal.stop()


def marks_of(page: Path) -> list[pytest.MarkDecorator]:
    """Every run follows the first hour and every third page; `.ci/nightly` follows all."""
    marks = [pytest.mark.network] if page.name in OF_A_CLUSTER else []
    return marks if page == FIRST or PAGES.index(page) % 3 == 2 else [*marks, pytest.mark.nightly]


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(one, marks=marks_of(one), id=one.stem) for one in PAGES])
def test_every_command_of_a_page_works(page: Path, engine_port: str, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, _free_ports() | ({} if page == FIRST else {"8001": engine_port}))
    script = script_of(page)
    if page != FIRST:
        begun = (
            script_of(FIRST)
            .replace("penstock up --port 8010\n", "")
            .replace("penstock engine --model demo\n", "")
        )
        script = begun + script
    if page.name in OF_A_CLUSTER:
        terminal.has_helm()
    try:
        terminal.follow(script)
    finally:
        terminal.stop()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_pages_blocks_can_be_read(page: Path) -> None:
    text = page.read_text()
    readers = {"toml": tomllib.loads, "json": json.loads, "yaml": yaml.safe_load}
    for _, _, language, block in _BLOCK.findall(text):
        assert language in (*readers, "bash", "sh")
        if language in readers:
            assert readers[language](block)


def test_the_lines_of_agents_are_those_that_sessions_are_tried_with(tmp_path: Path) -> None:
    """`python -m tests.agents` runs the agents by what the page says."""
    from tests.agents.catalogue import BY_NAME, Place
    from tests.services import KEY, MODEL

    place = Place(tmp_path / "home", tmp_path, "http://127.0.0.1:1")
    place.home.mkdir()
    for name in ("codex", "opencode"):
        BY_NAME[name].settle(place)
    codex = tomllib.loads((place.home / ".codex/config.toml").read_text())
    provider = codex["model_providers"][codex["model_provider"]]
    assert (codex["model"], provider["base_url"]) == (MODEL, place.url)
    assert BY_NAME["codex"].environment(place)[provider["env_key"]] == KEY
    opencode = json.loads((tmp_path / "opencode.json").read_text())
    [(name, provider)] = opencode["provider"].items()
    assert opencode["model"] == f"{name}/{MODEL}"
    assert (provider["options"]["baseURL"], [*provider["models"]]) == (place.url, [MODEL])
    claude = BY_NAME["claude-code"].environment(place)
    assert (claude["ANTHROPIC_BASE_URL"], claude["ANTHROPIC_AUTH_TOKEN"]) == (place.origin, KEY)


def test_the_reference_pages_are_those_of_the_code() -> None:
    from tests import reference

    for path, text in reference.contents().items():
        assert path.read_text() == text, f"{path.relative_to(ROOT)}: run python -m tests.reference"
