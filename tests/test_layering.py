"""The walls of the house: who may import whom.

Imports are read from the source with `ast`, lazy ones inside functions too, so that a rule cannot be
stepped around by importing late.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement

from shared import cli
from shared.cli import service
from shared.process.build import DISTRIBUTION
from shared.wire import errors
from tests.bench import __main__ as bench

ROOT = Path(__file__).parent.parent
FLOORS = (
    "shared",
    "gateway",
    "engine.contract",
    "engine.api",
    "engine.core",
    "engine.runtime",
    "engine.demo.train",
    "engine.demo",
    "engine",
    "tests.bench.gateway",
    "tests.bench.engine.gpu",
    "tests.bench.engine",
    "tests.bench",
    "tests",
)
"""Most specific first: the floor of `engine.core.loop` is `engine.core`."""

MAY_IMPORT = {
    "shared": {"shared"},
    "gateway": {"gateway", "shared"},
    "engine.contract": {"engine.contract", "shared"},
    "engine.api": {"engine.api", "engine.contract", "engine", "shared"},
    "engine.core": {"engine.core", "engine.contract", "shared"},
    "engine.runtime": {"engine.runtime", "engine.contract", "shared"},
    "engine.demo.train": {"engine.demo.train", "engine.demo"},
    "engine.demo": {"engine.demo"},
    "engine": {
        *("engine", "engine.api", "engine.core", "engine.runtime", "engine.contract", "engine.demo"),
        "shared",
    },
    "tests.bench.gateway": {"tests.bench.gateway", "tests.bench", "gateway", "shared", "engine.api"},
    "tests.bench.engine.gpu": {
        *("tests.bench.engine.gpu", "tests.bench", "engine.contract", "engine.runtime", "shared"),
    },
    "tests.bench.engine": {
        *("tests.bench.engine", "tests.bench", "engine.api", "engine.core", "engine.contract", "shared"),
    },
    "tests.bench": {"tests.bench", "shared"},
}
FORBIDDEN_PACKAGES = {
    "shared": {"torch", "aiohttp", "transformers"},
    "gateway": {"torch", "numpy", "transformers", "zmq"},
    "engine.contract": {"torch", "numpy", "transformers", "aiohttp", "httpx", "zmq"},
    "engine.api": {"torch", "numpy", "transformers"},
    "engine.core": {"torch", "numpy", "transformers", "aiohttp", "httpx"},
    "engine.runtime": {"transformers", "aiohttp", "httpx", "zmq"},
    "engine.demo.train": {"numpy", "transformers", "aiohttp", "httpx", "zmq"},
    "engine.demo": {"torch", "numpy", "transformers", "aiohttp", "httpx", "zmq"},
    "engine": {"torch", "transformers"},
    "tests.bench.gateway": {"torch", "numpy", "transformers", "zmq"},
    "tests.bench.engine.gpu": {"transformers", "aiohttp", "httpx", "zmq"},
    "tests.bench.engine": {"torch", "numpy", "transformers", "aiohttp", "httpx", "zmq"},
    "tests.bench": {"torch", "aiohttp", "transformers"},
}
"""Of the product, the runtime alone knows torch. What trains the demo model is no part of it: it is not in
the wheel, and no floor may import it."""
NEVER = {"pickle", "cPickle", "dill", "marshal", "shelve", "multiprocessing"}

SOURCES = sorted(path for top in ("shared", "gateway", "engine") for path in (ROOT / top).rglob("*.py"))


BENCHES = sorted(
    [
        *(ROOT / "tests/bench/gateway").rglob("*.py"),
        *(ROOT / "tests/bench/engine").rglob("*.py"),
        *(ROOT / f"tests/bench/{name}.py" for name in ("client", "cpu", "figures", "services", "streams")),
    ]
)
"""The benches of `python -m tests.bench`, which keep to floors of their own; scripts beside them do not."""


HTTP2_SERVER: Final = ("engine.api.http.http2_server", "engine.api.http.sniff")
"""The server's end of the hop, with which the gateway's benches stand in for an engine."""


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> str | None:
    return next((floor for floor in FLOORS if module == floor or module.startswith(floor + ".")), None)


@cache
def imports(path: Path) -> tuple[str, ...]:
    """All that a module imports, wherever in it."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the floor they reach"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def trespasses(path: Path) -> Iterator[str]:
    """The imports of a module that its floor does not admit, each with the reason."""
    floor = floor_of(module_name(path))
    assert floor is not None, path
    for name in imports(path):
        package = name.split(".")[0]
        target = floor_of(name)
        if package in FORBIDDEN_PACKAGES[floor]:
            yield f"{floor} must not import {package}"
        elif package in NEVER:
            yield f"{package} is never used here"
        elif target is not None and target not in MAY_IMPORT[floor]:
            yield f"{floor} must not import {name}"
        elif (
            (floor, target) == ("tests.bench.gateway", "engine.api")
            and name != "engine.api.http"
            and not name.startswith(HTTP2_SERVER)
        ):
            yield f"{floor} knows the engine's HTTP/2 server alone"


def test_imports_keep_to_their_floor() -> None:
    paths = [*SOURCES, *BENCHES]
    assert [f"{path.relative_to(ROOT)}: {why}" for path in paths for why in trespasses(path)] == []


STAGES = ("gateway.identity", "gateway.admission", "gateway.routing", "gateway.relay")
PIPELINE = "gateway.request.pipeline"


def test_only_the_pipeline_knows_the_order_of_stages() -> None:
    """No stage of a request knows another, each module of the gateway stands above all that it imports, and
    what stands above the pipeline is the edge and the gateway as a whole."""
    modules = {module_name(path): path for path in (ROOT / "gateway").rglob("*.py")}
    graph = {module: {name for name in imports(path) if name in modules} for module, path in modules.items()}
    for module, names in graph.items():
        own = next((stage for stage in STAGES if module.startswith(stage)), None)
        others = tuple(stage for stage in STAGES if own is not None and stage != own)
        assert not [name for name in names if name.startswith(others)], module
    assert set(TopologicalSorter(graph).static_order()) == graph.keys()
    assert {module for module, names in graph.items() if PIPELINE in names} == {
        *("gateway.app", "gateway.request.edge")
    }


HOUSES = ("shared", "gateway", "engine", "engine.api", "engine.core", "engine.runtime")


def room_of(module: str, house: str) -> str | None:
    """The folder, or the module, right within a house. A `__main__` stands above its folder."""
    if not module.startswith(house + "."):
        return None
    if module.endswith(".__main__"):
        return module
    parts = module.split(".")[: house.count(".") + 2]
    return ".".join(parts)


@pytest.mark.parametrize("house", HOUSES)
def test_there_is_no_circle_among_rooms(house: str) -> None:
    """A room stands above all that it imports."""
    modules = {module_name(path): path for path in SOURCES}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        own = room_of(module, house)
        if own is not None:
            reached = {room_of(name, house) for name in imports(path) if name in modules}
            graph.setdefault(own, set()).update(room for room in reached if room not in (None, own))
    assert set(TopologicalSorter(graph).static_order()) == graph.keys()


AIOHTTP_IN_THE_GATEWAY = {
    "client": "the client's end of a request",
    "edge": "what the public listener hands on",
    "listen": "the listeners' sockets",
    **dict.fromkeys(("operators", "workers"), "what operators ask"),
    "discovery": "a client of Kubernetes",
}
"""The rooms of the gateway that know of aiohttp, and the edge in `gateway.request`. No stage of a request is
among them, so that a caller needs no socket."""
CLIENT_FOR_STAGES = {"blocked", "body", "deadlines", "interface"}
"""The modules of `gateway.client` by which the others know the client's end of a request."""


def test_a_requests_stages_know_nothing_of_aiohttp() -> None:
    knowing = set()
    for path in (ROOT / "gateway").rglob("*.py"):
        parts = path.relative_to(ROOT / "gateway").with_suffix("").parts
        own = parts[1] if parts[0] == "request" and len(parts) > 1 else parts[0]
        names = set(imports(path))
        if any(name.split(".")[0] == "aiohttp" for name in names):
            knowing.add(own)
        if own in AIOHTTP_IN_THE_GATEWAY:
            continue
        ends = {name.split(".")[2] for name in names if name.startswith("gateway.client.")}
        assert ends <= CLIENT_FOR_STAGES, f"{path.name} imports {sorted(ends - CLIENT_FOR_STAGES)}"
    assert knowing == AIOHTTP_IN_THE_GATEWAY.keys()


def test_no_unsafe_loading_in_the_source() -> None:
    unsafe = re.compile(
        r"torch\.load\(|trust_remote_code|jinja2\.Environment\(|yaml\.load\(|(?<![.\w])(eval|exec)\("
    )
    for path in [*SOURCES, *BENCHES]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not unsafe.search(line), f"{path}:{number}: {line.strip()}"


def requirements(name: str, extras: frozenset[str]) -> Iterator[Requirement]:
    for text in importlib.metadata.requires(name) or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
            yield requirement


def closure(name: str, extras: frozenset[str]) -> set[str]:
    """Every distribution that installing `name[extras]` brings."""
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [(name, extras)]
    while todo:
        item = todo.pop()
        if item in seen:
            continue
        seen.add(item)
        todo += [(req.name.lower(), frozenset(req.extras)) for req in requirements(*item)]
    return {dist for dist, _ in seen}


def test_installing_the_gateway_pulls_no_torch() -> None:
    gateway = closure(DISTRIBUTION, frozenset({"gateway"}))
    assert "aiohttp" in gateway, "the walk over the requirements found nothing"
    assert not gateway & {"torch", "triton", "numpy", "pyzmq", "safetensors", "transformers"}
    assert "torch" in closure(DISTRIBUTION, frozenset({"engine"}))


BLOCKED_IMPORT = """
import importlib, pkgutil, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {blocked!r}:
            raise ImportError('blocked: ' + name)
sys.meta_path.insert(0, Block())
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(package.__path__, {package!r} + '.'):
    if not module.name.endswith(('__main__', 'hatch_hook')) and 'bench.engine.gpu.' not in module.name:
        importlib.import_module(module.name)
"""


@pytest.mark.parametrize(
    "package",
    [
        *("gateway", "shared", "engine.contract", "engine.api", "engine.core"),
        *("tests.bench.gateway", "tests.bench.engine"),
    ],
)
def test_importing_needs_no_torch(package: str) -> None:
    blocked = {"torch", "triton", "numpy", "safetensors", "transformers"}
    if package in ("gateway", "shared"):
        blocked |= {"zmq", "engine"}
    if package == "tests.bench.gateway":
        blocked |= {"zmq"}
    if package == "shared":
        blocked |= {"aiohttp", "gateway"}
    script = BLOCKED_IMPORT.format(blocked=blocked, package=package)
    argv = [sys.executable, "-c", script]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


API_ERRORS = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.ApiError)
}


def test_every_error_of_the_api_is_in_the_one_tree() -> None:
    """An engine's code is read back by it, so it must not depend on what was imported before."""
    outside = [
        path.name
        for package in ("gateway", "engine", "shared")
        for path in (ROOT / package).rglob("*.py")
        if any(name in (text := path.read_text()) for name in API_ERRORS)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
        and path != ROOT / "shared/wire/errors.py"
        and any(ast.unparse(base).rpartition(".")[2] in API_ERRORS for base in node.bases)
    ]
    assert outside == []


# -- modules that are reached by a name in a string -----------------------------------------------

REACHED_BY_NAME = {
    "engine/runtime/models/families/__init__.py": {
        "f'{__name__}.{found.name}'": "a module there is a family, and is listed nowhere else"
    },
    "engine/api/core/process.py": {"self._module": "the API process starts the core's, or a test's"},
    "tests/bench/engine/gpu/supervise.py": {
        "*self.part.argv": "each part of the bench is a process of its own"
    },
    "tests/bench/gateway/agents_live.py": {"'engine'": "the bench measures an engine that serves"},
    "tests/bench/engine/live.py": {"'engine'": "the bench measures an engine that serves"},
    "tests/bench/engine/plot.py": {"'matplotlib'": "a package that may be missing"},
    "tests/bench/engine/served.py": {"'engine'": "the bench measures an engine that serves"},
    "tests/bench/gateway/recording.py": {"'opentelemetry.sdk'": "a package that may be missing"},
    "tests/bench/engine/tiers.py": {"'engine'": "the bench measures an engine that serves"},
    "engine/runtime/setup/backends.py": {
        "name": "attention libraries that may be missing: FUNCTIONS names them"
    },
    "engine/runtime/device/shipping.py": {
        "'engine.runtime.device.shipping'": "each card is the work of a process of its own"
    },
    "engine/runtime/parallel/ranks.py": {"MODULE": "a rank is a process of its own"},
    "tests/bench/gateway/attackers.py": {
        "'tests.bench.gateway.attackers'": "attackers are a process of their own"
    },
    "tests/bench/gateway/faults.py": {
        "'tests.bench.gateway.faulty_engine'": "each engine is a process of its own"
    },
    "tests/bench/gateway/hop.py": {
        "'tests.bench.gateway.bare'": "the ends of a hop are processes of their own"
    },
    "tests/bench/gateway/neighbours.py": {
        "'engine'": "the bench attacks both services",
        "'gateway'": "the bench attacks both services",
    },
    "tests/bench/gateway/routing_live.py": {
        "'engine'": "the bench measures engines that serve",
        "'tests.bench.gateway.routing_live'": "each rule is tried in a gateway of its own",
    },
    "tests/bench/gateway/subjects.py": {
        "'gateway'": "the bench measures a gateway that serves",
        "'tests.bench.gateway.bare'": "the least that aiohttp needs to relay",
        "'tests.bench.gateway.paced_engine'": "an engine that answers at a given pace",
        "module": "the paced engine, wherever a version has it",
    },
    "gateway/workers/process.py": {"'gateway'": "a worker is a process of its own"},
    "tests/bench/services.py": {"'engine.demo'": "the demo model's directory"},
    "shared/cli/__init__.py": {"f'shared.cli.{name}'": "a command is imported when it is asked for"},
    "tests/bench/__main__.py": {"BENCHES[name][0]": "a bench is its service's own"},
    "shared/cli/init.py": {
        "'gateway.__main__'": "the gateway checks what was written for it",
        "'gateway.identity.keys'": "the gateway says what a new key is",
    },
    "shared/cli/keeper.py": {
        "'gateway.directory.local'": "the gateway changes its file, or what its Redis holds",
    },
    "shared/cli/keys.py": {
        "'gateway.identity.keys'": "the gateway says what a new key is",
    },
    "shared/cli/service.py": {
        "*MODULES[service]": "a command starts a service",
        "module": "`reach`, through which the launcher looks into a service",
        "package": "packages of a service's extra that may be missing",
    },
    "shared/cli/settings.py": {"CONFIGS[service].module": "a service declares its settings"},
    "gateway/relay/checked_bundles.py": {
        "'gateway.relay.tokenizer_child'": "what may crash or hang is loaded by a process first"
    },
    "shared/text/rendering.py": {
        "'shared.text.rendering_child'": "long chats are the work of a process of its own"
    },
    "shared/cli/up.py": {
        "'engine.config'": "`up` takes the engine's options, and asks for its drain",
        "'engine.demo'": "the model that `up` serves unless it is told",
        "'gateway.config.whole'": "`up` asks for the gateway's drain",
        "'gateway.directory.development'": "`up` asks the gateway for its configuration",
        "'gateway.config.edge'": "the gateway says which addresses are of this machine alone",
        "'gateway.identity.keys'": "the gateway says what a key must be",
        "'gateway.config.redis'": "the gateway says what Redis' URL must be",
    },
}
"""By file: each module that is imported, looked for or started by a string or an expression, and why."""
REACHES = {"import_module", "__import__", "reach", "find_spec", "files", "run_module", "walk_packages"}


def reached_by_name(tree: ast.AST) -> Iterator[str]:
    """The arguments that name modules, as source: of `importlib`'s functions, and what follows `-m`."""
    for node in ast.walk(tree):
        words: list[ast.expr] = []
        if isinstance(node, ast.Call):
            words = node.args
            if getattr(node.func, "attr", getattr(node.func, "id", None)) in REACHES and words:
                yield ast.unparse(words[0])
        elif isinstance(node, ast.List | ast.Tuple):
            words = node.elts
        for word, module in pairwise(words):
            if isinstance(word, ast.Constant) and word.value == "-m":
                text = ast.unparse(module)
                if not text.startswith("'--"):  # an option of a command line
                    yield text


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("importlib.import_module('engine.config')", "'engine.config'"),
        ("from importlib.util import find_spec\nfind_spec(NAME)", "NAME"),
        ("run([sys.executable, '-m', 'tests.bench.hop', '--port'])", "'tests.bench.hop'"),
        ("exec(sys.executable, '-m', *argv)", "*argv"),
        ("reach(f'gateway.{name}')", "f'gateway.{name}'"),
        ("add_argument('-m', '--message')", None),
    ],
)
def test_a_module_that_is_reached_by_name_is_found(source: str, found: str | None) -> None:
    assert list(reached_by_name(ast.parse(source))) == ([] if found is None else [found])


def test_modules_are_reached_by_name_only_where_it_says_why() -> None:
    for path in [*SOURCES, *BENCHES, ROOT / "tests/bench/__main__.py"]:
        file = str(path.relative_to(ROOT))
        for module in reached_by_name(ast.parse(path.read_text())):
            assert module in REACHED_BY_NAME.get(file, {}), f"{file} reaches {module}: say why in the table"


def test_what_the_launcher_reaches_is_there_and_nothing_of_the_tests() -> None:
    launched = [config.module for config in service.CONFIGS.values()]
    launched += [module for module, *_ in service.MODULES.values()]
    launched += [f"shared.cli.{command}" for command in cli.COMMANDS]
    names = {module_name(path) for path in SOURCES}
    assert set(launched) <= names
    assert {module for module, _ in bench.BENCHES.values()} <= {module_name(path) for path in BENCHES}
    constants = {
        f"{path.relative_to(ROOT)}: {node.value}"
        for path in SOURCES
        if "tests" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"tests(\.\w+)*", node.value)
    }
    assert constants == set()
