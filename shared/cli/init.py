"""The command `penstock init`: a gateway's configuration that starts as it is, with what to change beside it.

It has one model before an engine on this machine, one tenant and a new key of its, and an operator's key.
Both are shown this once, or written into a file of their owner's alone, as variables that a shell reads.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from shared.cli.service import missing_extra, reach
from shared.process.arguments import Parser, spelt
from shared.process.setting_values import toml_value
from shared.process.settings import ModelName

FILE: Final = "gateway.toml"
ENGINE_URL: Final = "http://127.0.0.1:8001"
CONSOLE: Final = "http://127.0.0.1:9090/console"
MODEL: Final = "demo"
TENANT: Final = "first"
KEY: Final = "KEY"
ADMIN_KEY: Final = "PENSTOCK_ADMIN_KEY"
TEXT: Final = """\
# A gateway's configuration. `penstock gateway --check {file}` says what is wrong with it, and
# `penstock settings gateway --format toml` prints every setting there is. Models, tenants and keys
# are read again when this file changes; the rest takes a restart.

[listen]
port = 8000
# host = "0.0.0.0"              # for other machines, with TLS:
# tls = {{ cert = "server.pem", key = "server.key" }}

[admin]                         # /metrics, the console and changes by operators: for your own network
port = 9090

[[admin.keys]]                  # opens the console
id = {admin_id}
hash = {admin_hash}

[[models]]
name = {model}
replicas = [{engine_url}]       # base URLs without /v1, any number of them
# engine = "openai"             # where they are another server's: vLLM, SGLang, llama.cpp, Ollama
# protocol = "http1"            # which speaks HTTP/1.1
# aliases = ["gpt-4o-mini"]     # further names that it answers to

[[tenants]]
id = "{tenant}"
# limits = {{ requests_per_min = 600, tokens_per_min = 100_000, concurrent = 16 }}

[[keys]]
id = {key_id}
hash = {key_hash}
tenant = "{tenant}"

# [redis]                       # several gateways, or workers, count limits together in Redis
# url = "redis://127.0.0.1:6379"
# [quotas]
# store = "redis"
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add `init` to the command line."""
    parser = commands.add_parser(
        "init",
        help="write a gateway's configuration that starts",
        description="Write a gateway's configuration that starts, and show a new key for it.",
    )
    parser.add_argument(
        "file", nargs="?", type=Path, default=Path(FILE), metavar="FILE.toml", help=f"({FILE})"
    )
    parser.add_argument(
        "--engine-url", default=ENGINE_URL, metavar="URL",
        help=f"base URL of an engine, without /v1 (default: {ENGINE_URL}, where `penstock engine` listens)",
    )  # fmt: skip
    parser.add_argument(
        "--model", type=spelt(ModelName), default=MODEL, metavar="NAME",
        help=f"what clients call the model (default: {MODEL})",
    )  # fmt: skip
    parser.add_argument(
        "--keys", type=Path, metavar="FILE",
        help=f"write the keys there, as {KEY} and {ADMIN_KEY} for a shell, and do not show them",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the file. Returns the process's exit code."""
    if problem := missing_extra("gateway"):
        return _fail(problem)
    mint = reach("gateway.identity.keys").mint_key
    key, admin = mint("live"), mint("admin")
    text = TEXT.format(
        file=options.file,
        model=toml_value(options.model),
        engine_url=toml_value(options.engine_url),
        tenant=TENANT,
        key_id=toml_value(key.id),
        key_hash=toml_value(key.hash),
        admin_id=toml_value(admin.id),
        admin_hash=toml_value(admin.hash),
    )
    files = {options.file: text}
    if options.keys is not None:
        files[options.keys] = f"export {KEY}={key.text}\nexport {ADMIN_KEY}={admin.text}\n"
    if problem := _write(files):
        return _fail(problem)
    code: int = reach("gateway.__main__").check(options.file, {})
    if code:
        _remove(files)
        return code
    print(_next(options, key.text, admin.text))
    return 0


def _write(files: Mapping[Path, str]) -> str | None:
    """Write new files that are their owner's alone: all of them, or none. Returns what prevents it."""
    written: list[Path] = []
    try:
        for path, text in files.items():
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                written.append(path)
                file.write(text)
    except OSError as error:
        _remove(written)
        if isinstance(error, FileExistsError):
            return f"{path} is there already: name another file, or remove it"
        return f"{path}: {error.strerror}"
    return None


def _remove(files: Iterable[Path]) -> None:
    for path in files:
        path.unlink()


def _next(options: argparse.Namespace, key: str, admin_key: str) -> str:
    chat = json.dumps({"model": options.model, "messages": [{"role": "user", "content": "Hello"}]})
    engine = "" if options.engine_url != ENGINE_URL else f"  penstock engine --model {MODEL}\n"
    shown = f"""\
  API key    {key}
  Admin key  {admin_key}   (of the console, {CONSOLE})

Both are shown this once."""
    asks = f"'Authorization: Bearer {key}'"
    if options.keys is not None:
        shown = f"The keys are in {options.keys}; the admin key is the console's, {CONSOLE}."
        engine += f"  . {_sourced(options.keys)}\n"
        asks = f'"Authorization: Bearer ${KEY}"'
    return f"""
{shown} Next:

{engine}  penstock gateway --config {shlex.quote(str(options.file))}
  curl http://127.0.0.1:8000/v1/chat/completions -H {asks} \\
    -H 'Content-Type: application/json' -d {shlex.quote(chat)}"""


def _sourced(path: Path) -> str:
    """A file as a shell's `.` takes it: a name without a slash would be looked for elsewhere."""
    text = str(path)
    return shlex.quote(text if "/" in text else f"./{text}")


def _fail(problem: str) -> int:
    sys.stderr.write(f"penstock init: {problem}\n")
    return 1
