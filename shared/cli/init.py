"""The command `penstock init`: a gateway's configuration that starts as it is, with what to change beside it.

It has one model before an engine on this machine, one tenant and a new key of its, which is shown this once.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Final

from shared.cli.service import missing_extra, reach
from shared.process.arguments import Parser, spelt
from shared.process.setting_values import toml_value
from shared.process.settings import ModelName

FILE: Final = "gateway.toml"
ENGINE_URL: Final = "http://127.0.0.1:8001"
MODEL: Final = "demo"
TENANT: Final = "first"
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
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the file. Returns the process's exit code."""
    if problem := missing_extra("gateway"):
        return _fail(problem)
    mint = reach("gateway.identity.keys").mint_key
    key, admin = mint("live"), mint("live")
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
    try:
        with open(os.open(options.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
    except FileExistsError:
        return _fail(f"{options.file} is there already: name another file, or remove it")
    except OSError as error:
        return _fail(f"{options.file}: {error.strerror}")
    code: int = reach("gateway.__main__").check(options.file, {})
    if code:
        options.file.unlink()
        return code
    print(_next(options, key.text, admin.text))
    return 0


def _next(options: argparse.Namespace, key: str, admin_key: str) -> str:
    chat = json.dumps({"model": options.model, "messages": [{"role": "user", "content": "Hello"}]})
    engine = "" if options.engine_url != ENGINE_URL else f"  penstock engine --model {MODEL}\n"
    return f"""
  API key    {key}
  Admin key  {admin_key}   (of the console, http://127.0.0.1:9090/console)

Both are shown this once. Next:

{engine}  penstock gateway --config {options.file}
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Authorization: Bearer {key}' \\
    -H 'Content-Type: application/json' -d {shlex.quote(chat)}"""


def _fail(problem: str) -> int:
    sys.stderr.write(f"penstock init: {problem}\n")
    return 1
