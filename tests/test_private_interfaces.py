"""Names of other packages that are private to them, or public and nowhere promised: any release may take them
away. Each has one place here that names it, and the first test says by name what is gone."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Final

import aiohttp
import pytest

ROOT = Path(__file__).parent.parent
OURS = {"engine", "gateway", "shared", "__future__"}
C10D = "torch._C._distributed_c10d"

PRIVATE: Final = {
    "engine/runtime/reference/layers.py": {
        "torch.ops.mkldnn._is_mkldnn_bf16_supported",
        "torch.ops.mkldnn._linear_pointwise",
        "torch.ops.mkldnn._reorder_linear_weight",
    },
    "engine/runtime/step/states.py": {"torch._foreach_copy_"},
    "engine/runtime/collective/group.py": {C10D, f"{C10D}.ProcessGroupGloo._Options"},
}
"""The private names that a module uses, by its path."""
REACHED: Final = {
    # through values, where the source does not show whose they are
    "torch._C._distributed_c10d.ProcessGroupGloo._Options._devices",
    "torch._C._distributed_c10d.ProcessGroupGloo._Options._timeout",
    "torch._C._distributed_c10d.ProcessGroupGloo._allgather_base",
    "torch._C._distributed_c10d.ProcessGroupGloo.allreduce",
    "torch._C._distributed_c10d.ProcessGroupGloo.create_device",
    "torch._C._distributed_c10d.AllgatherOptions.asyncOp",
    "torch._C._distributed_c10d.AllreduceOptions.asyncOp",
    *(
        f"aiohttp.web_protocol.RequestHandler.{name}"
        for name in ("_current_request", "_loop", "_messages", "_reading_paused", "_waiter")
    ),
    "aiohttp.BaseConnector._create_connection",
    # public names that no documentation promises
    "aiohttp.http_writer.StreamWriter.drain",
    "aiohttp.http_writer.StreamWriter.output_size",
    "aiohttp.web_protocol.RequestHandler.handle_error",
    "triton.AsyncCompileMode",
    "triton.compiler.CompiledKernel.run",
    "triton.runtime.JITFunction.warmup",
    "triton.runtime.cache.FileCacheManager.get_file",
    "triton.runtime.cache.FileCacheManager.get_group",
}
"""More of the names that the services need."""
HINT: Final = re.compile(r"\b(?!self\b|cls\b)\w+\._[a-zA-Z]|\bimport [^\n]*\b_[a-z]|\bimport \([^)]*\b_[a-z]")
"""A module without such text uses no private name, and need not be parsed."""


def found(path: str) -> object:
    """What a dotted path names, from its module on. Raises AttributeError."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, parts[end:], module)
    raise AttributeError(f"no package {parts[0]}")


@pytest.mark.parametrize("name", sorted(REACHED.union(*PRIVATE.values())))
def test_what_nobody_promised_is_still_there(name: str) -> None:
    try:
        found(name)
    except AttributeError as error:
        pytest.fail(f"{name} is gone: {error}")


def chain(node: ast.expr, aliases: dict[str, str]) -> str | None:
    """The dotted path that an expression names, when it begins at another package's module."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute) and (before := chain(node.value, aliases)) is not None:
        return f"{before}.{node.attr}"
    return None


def foreign(tree: ast.Module) -> dict[str, str]:
    """Names in a module that stand for what is another package's, each with its dotted path."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                root = each.name.partition(".")[0]
                aliases[each.asname or root] = each.name if each.asname else root
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            aliases |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    for node in tree.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or node.value is None:
            continue
        if (path := chain(node.value, aliases)) is not None:
            aliases[node.target.id] = path
    return {
        name: path
        for name, path in aliases.items()
        if (root := path.partition(".")[0]) not in OURS and root not in sys.stdlib_module_names
    }


def private_names(tree: ast.Module) -> Iterator[str]:
    aliases = foreign(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if (path := chain(node, aliases)) is not None:
                yield path
        elif isinstance(node, ast.Attribute) and (path := chain(node, aliases)) == C10D:
            yield path
    yield from (path for path in aliases.values() if any(p.startswith("_") for p in path.split(".")))


def test_no_private_name_is_used_elsewhere() -> None:
    used: dict[str, set[str]] = {}
    for package in ("engine", "gateway", "shared"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            if "bench" in path.parts or not HINT.search(text):
                continue
            if names := set(private_names(ast.parse(text))) - {"torch._C"}:
                used[str(path.relative_to(ROOT))] = names
    assert used == PRIVATE


AIOHTTPS: Final = ROOT / "gateway/client/connection.py"
"""The one file that rests on private names of aiohttp."""


def attributes(tree: ast.Module, *, of_self: bool) -> set[str]:
    """The private names that a module reads and writes; or those that it gives its own objects."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if not of_self
        or (isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self")
    }


def test_aiohttps_private_names_are_in_one_file() -> None:
    theirs = set[str]()
    for name in ("base_protocol", "web_protocol", "web_request", "web_runner", "web_server"):
        source = Path(aiohttp.__file__).with_name(f"{name}.py").read_text()
        theirs |= attributes(ast.parse(source), of_self=True)
    assert attributes(ast.parse(AIOHTTPS.read_text()), of_self=False) & theirs
    for path in (ROOT / "gateway").rglob("*.py"):
        text = path.read_text()
        if path != AIOHTTPS and "aiohttp" in text:
            tree = ast.parse(text)
            used = attributes(tree, of_self=False) - attributes(tree, of_self=True)
            assert not used & theirs, f"{path.name} uses names of aiohttp: {used & theirs}"
