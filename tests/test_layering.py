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
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement

from shared import cli, errors
from shared.build import DISTRIBUTION
from shared.cli import bench, service

ROOT = Path(__file__).parent.parent
FLOORS = (
    "shared",
    "gateway.bench",
    "gateway",
    "engine.api",
    "engine.bench.gpu",
    "engine.bench",
    "engine.core",
    "engine.runtime",
    "engine.demo",
    "engine",
)
"""Most specific first: the floor of `engine.core.loop` is `engine.core`."""

MAY_IMPORT = {
    "shared": {"shared"},
    "gateway.bench": {"gateway.bench", "gateway", "shared"},
    "gateway": {"gateway", "shared"},
    "engine.api": {"engine.api", "engine.core", "engine", "shared"},
    "engine.bench.gpu": {"engine.bench.gpu", "engine.core", "engine.runtime", "shared"},
    "engine.bench": {"engine.bench", "engine.api", "engine.core", "shared"},
    "engine.core": {"engine.core", "shared"},
    "engine.runtime": {"engine.runtime", "engine.core", "shared"},
    "engine.demo": {"engine.demo"},
    "engine": {"engine", "engine.api", "engine.core", "engine.runtime", "engine.demo", "shared"},
}
FORBIDDEN_PACKAGES = {
    "shared": {"torch", "aiohttp", "transformers"},
    "gateway.bench": {"torch", "numpy", "transformers", "zmq"},
    "gateway": {"torch", "numpy", "transformers", "zmq"},
    "engine.api": {"torch", "numpy", "transformers"},
    "engine.bench.gpu": {"transformers", "aiohttp", "httpx", "zmq"},
    "engine.bench": {"torch", "numpy", "transformers", "aiohttp", "httpx", "zmq"},
    "engine.core": {"torch", "numpy", "transformers", "aiohttp", "httpx"},
    "engine.runtime": {"transformers", "aiohttp", "httpx", "zmq"},
    "engine.demo": {"transformers", "aiohttp", "httpx", "zmq"},
    "engine": {"torch", "transformers"},
}
NEVER = {"pickle", "cPickle", "dill", "marshal", "shelve", "multiprocessing"}

SOURCES = sorted(path for top in ("shared", "gateway", "engine") for path in (ROOT / top).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> str | None:
    return next((floor for floor in FLOORS if module == floor or module.startswith(floor + ".")), None)


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the floor they reach"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


MESSAGES: Final = ("engine.core.messages", "engine.core.packing", "engine.core.records")
"""The messages that cross the core's walls, and what they are made of."""


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_keep_to_their_floor(path: Path) -> None:
    floor = floor_of(module_name(path))
    assert floor is not None
    for name in imports(path):
        package = name.split(".")[0]
        assert package not in FORBIDDEN_PACKAGES[floor], f"{floor} must not import {package}"
        assert package not in NEVER, f"{package} is never used here"
        target = floor_of(name)
        assert target is None or target in MAY_IMPORT[floor], f"{floor} must not import {name}"
        if floor in ("engine.api", "engine.runtime") and target == "engine.core" and name != "engine.core":
            assert name.startswith(MESSAGES), f"{floor} knows the core's messages alone"


GATEWAY_LEVELS = (
    {
        *("accounting_config", "edge_config", "quota_config", "directory_config", "endpoints"),
        *("redis_config", "certificate_names"),
    },
    {"timeout_config", "discovery_config", "holder_config", "ticks", "routes"},
    {"config", "secret", "hygiene", "background", "shield", "client", "recorder", "openapi_parts"},
    {"identity", "admission", "routing", "relay"},  # the stages: none knows another
    {
        "accounts",
        "operators",
        "billing",
        "listener_tls",
        "heads",
        "engines",
        "record",
        "development",
        "openapi",
        "hedging",
        "pace",
        "told_windows",
    },
    {"discovery", "foreign_loads", "foreign_fields", "salts", "admin_openapi"},
    {"exchange", "directory", "usage_api", "replica_api", "model_lists"},
    {"outbound", "requests_api", "limits_api", "console", "dispatch"},
    {"pipeline", "admin"},  # the only one that knows the order of the stages
    {"edge", "accepting"},
    {"listener"},
    {"admin_listener"},
    {"workers"},
    {"app"},
    {"service"},
    {"__main__"},
)
"""Each module and package of the gateway imports lower levels alone."""


def test_only_the_pipeline_knows_the_order_of_stages() -> None:
    level_of = {name: level for level, names in enumerate(GATEWAY_LEVELS) for name in names}
    for path in (ROOT / "gateway").rglob("*.py"):
        own = path.relative_to(ROOT / "gateway").with_suffix("").parts[0]
        if own in ("bench", "__init__"):
            continue
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "gateway" and len(parts) > 1 and parts[1] != own:
                assert level_of[parts[1]] < level_of[own], f"{path.name}: {own} imports {parts[1]}"


AIOHTTP_IN_THE_GATEWAY = {
    "client": "the client's end of a request",
    "edge": "what the public listener hands on",
    "hygiene": "a head's bytes, as aiohttp's parser leaves them",
    **dict.fromkeys(("listener", "heads"), "the listeners' sockets"),
    **dict.fromkeys(("operators", "admin", "console", "workers"), "what operators ask"),
    **dict.fromkeys(("limits_api", "replica_api", "requests_api", "usage_api"), "what operators ask"),
    "directory": "what operators ask",
    "discovery": "a client of Kubernetes",
}
"""The modules and packages of the gateway that know of aiohttp. No stage of a request is among them, so that
a caller needs no socket."""
CLIENT_FOR_STAGES = {"body", "deadlines", "interface"}
"""The modules of `gateway.client` by which the others know the client's end of a request."""


def test_a_requests_stages_know_nothing_of_aiohttp() -> None:
    knowing = set()
    for path in (ROOT / "gateway").rglob("*.py"):
        own = path.relative_to(ROOT / "gateway").with_suffix("").parts[0]
        names = set(imports(path))
        if own != "bench" and any(name.split(".")[0] == "aiohttp" for name in names):
            knowing.add(own)
        if own in ("bench", *AIOHTTP_IN_THE_GATEWAY):
            continue
        ends = {name.split(".")[2] for name in names if name.startswith("gateway.client.")}
        assert ends <= CLIENT_FOR_STAGES, f"{path.name} imports {sorted(ends - CLIENT_FOR_STAGES)}"
    assert knowing == AIOHTTP_IN_THE_GATEWAY.keys()


def test_no_unsafe_loading_in_the_source() -> None:
    unsafe = re.compile(
        r"torch\.load\(|trust_remote_code|jinja2\.Environment\(|yaml\.load\(|(?<![.\w])(eval|exec)\("
    )
    for path in SOURCES:
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
    if not module.name.endswith('__main__') and not module.name.startswith('engine.bench.gpu.'):
        importlib.import_module(module.name)
"""


@pytest.mark.parametrize("package", ["gateway", "shared", "engine.api", "engine.bench", "engine.core"])
def test_importing_needs_no_torch(package: str) -> None:
    blocked = {"torch", "triton", "numpy", "safetensors", "transformers"}
    if package in ("gateway", "shared"):
        blocked |= {"zmq", "engine"}
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
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and path != ROOT / "shared" / "errors.py"
        and any(ast.unparse(base).rpartition(".")[2] in API_ERRORS for base in node.bases)
    ]
    assert outside == []


# -- modules that are reached by a name in a string -----------------------------------------------

REACHED_BY_NAME = {
    "engine/api/core_process.py": {"'engine'": "the API process starts the core's"},
    "engine/bench/gpu/supervise.py": {"*self.part.argv": "each part of the bench is a process of its own"},
    "engine/bench/live.py": {"'engine'": "the bench measures an engine that serves"},
    "engine/bench/plot.py": {"'matplotlib'": "a package that may be missing"},
    "engine/bench/served.py": {"'engine'": "the bench measures an engine that serves"},
    "gateway/bench/recording.py": {"'opentelemetry.sdk'": "a package that may be missing"},
    "engine/bench/tiers.py": {"'engine'": "the bench measures an engine that serves"},
    "engine/runtime/backends.py": {"name": "attention libraries that may be missing: FUNCTIONS names them"},
    "engine/runtime/device/shipping.py": {
        "'engine.runtime.device.shipping'": "each card is the work of a process of its own"
    },
    "engine/runtime/parallel/ranks.py": {"MODULE": "a rank is a process of its own"},
    "gateway/bench/attackers.py": {"'gateway.bench.attackers'": "attackers are a process of their own"},
    "gateway/bench/faults.py": {"'gateway.bench.faulty_engine'": "each engine is a process of its own"},
    "gateway/bench/hop.py": {"'gateway.bench.bare'": "the ends of a hop are processes of their own"},
    "gateway/bench/neighbours.py": {
        "'engine'": "the bench attacks both services",
        "'gateway'": "the bench attacks both services",
    },
    "gateway/bench/routing_live.py": {
        "'engine'": "the bench measures engines that serve",
        "'gateway.bench.routing_live'": "each rule is tried in a gateway of its own",
    },
    "gateway/bench/subjects.py": {
        "'gateway'": "the bench measures a gateway that serves",
        "'gateway.bench.bare'": "the least that aiohttp needs to relay",
        "'gateway.bench.paced_engine'": "an engine that answers at a given pace",
        "module": "the paced engine, wherever a version has it",
    },
    "gateway/workers/process.py": {"'gateway'": "a worker is a process of its own"},
    "shared/bench/services.py": {"'engine.demo'": "the demo model's directory"},
    "shared/cli/__init__.py": {"f'shared.cli.{name}'": "a command is imported when it is asked for"},
    "shared/cli/bench.py": {"BENCHES[name][0]": "a bench is its service's own"},
    "shared/cli/keys.py": {
        "'gateway.directory.local'": "the gateway changes its file, or what its Redis holds",
        "'gateway.edge_config'": "the gateway says which addresses are of this machine alone",
        "'gateway.identity.keys'": "the gateway says what a new key is",
    },
    "shared/cli/service.py": {
        "*MODULES[service]": "a command starts a service",
        "module": "`reach`, through which the launcher looks into a service",
        "package": "packages of a service's extra that may be missing",
    },
    "shared/cli/settings.py": {"CONFIGS[service].module": "a service declares its settings"},
    "shared/checked_bundles.py": {
        "'shared.tokenizer_child'": "what may crash or hang is loaded by a process first"
    },
    "shared/rendering.py": {"'shared.rendering_child'": "long chats are the work of a process of its own"},
    "shared/cli/up.py": {
        "'engine.config'": "`up` takes the engine's options, and asks for its drain",
        "'engine.demo'": "the model that `up` serves unless it is told",
        "'gateway.config'": "`up` asks for the gateway's drain",
        "'gateway.development'": "`up` asks the gateway for its configuration",
        "'gateway.edge_config'": "the gateway says which addresses are of this machine alone",
        "'gateway.identity.keys'": "the gateway says what a key must be",
        "'gateway.redis_config'": "the gateway says what Redis' URL must be",
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
            if ast.unparse(node.func).rpartition(".")[2] in REACHES and words:
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
    for path in SOURCES:
        file = str(path.relative_to(ROOT))
        for module in reached_by_name(ast.parse(path.read_text())):
            assert module in REACHED_BY_NAME.get(file, {}), f"{file} reaches {module}: say why in the table"


def test_what_the_launcher_reaches_is_there_and_nothing_of_the_tests() -> None:
    launched = [config.module for config in service.CONFIGS.values()]
    launched += [module for module, _ in bench.BENCHES.values()]
    launched += [module for module, *_ in service.MODULES.values()]
    launched += [f"shared.cli.{command}" for command in cli.COMMANDS]
    names = {module_name(path) for path in SOURCES}
    assert set(launched) <= names
    constants = {
        f"{path.relative_to(ROOT)}: {node.value}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"tests(\.\w+)*", node.value)
    }
    assert constants == set()
