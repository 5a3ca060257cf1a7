"""The command line of the gateway: `python -m gateway --config FILE`."""

from __future__ import annotations

from shared.process import interrupts

if __name__ == "__main__":
    interrupts.end_quietly()
    interrupts.ignore_hangups()

import argparse
import asyncio
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from gateway.config.secret import variable_of
from gateway.config.whole import ENV_PREFIX, HEADINGS, GatewayConfig, load
from gateway.listen.listener import ListenFailed
from gateway.service import serve, supervise
from gateway.workers.channel import read_start
from shared.process import logs
from shared.process.arguments import Parser, add_settings
from shared.process.environment import unread_in
from shared.process.exit_codes import ExitCode
from shared.process.files import MARK, file_version, read_text
from shared.process.lifecycle import ORPHANED, die_with_parent
from shared.process.loops import loop_factory
from shared.process.setting_values import FILE_LEN_MAX, ConfigError
from shared.process.tls import UnusableTls
from shared.process.toml_lines import lines_of

NOBODY: Final = "it has no keys, issuers or certificates, so every request gets 401; see penstock keys create"


def build_parser() -> Parser:
    """The command line of the gateway. A setting without an option is set in the file or by a variable."""
    parser = Parser(prog="penstock gateway", description="Run a gateway in the foreground.")
    file = parser.add_mutually_exclusive_group(required=True)
    file.add_argument(
        "--config",
        type=Path,
        metavar="FILE.toml",
        help="the configuration; `penstock init` writes one",
    )
    file.add_argument(
        "--check", type=Path, metavar="FILE.toml", help="say all that is wrong with it, and do not start"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--parent-pid", type=int, help="stop when this process, the parent, is gone")
    add_settings(parser, GatewayConfig, HEADINGS)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Serve until a stop signal. Returns the process's exit status."""
    given = vars(build_parser().parse_args(argv))
    file: Path = given.pop("config")
    if (checked := given.pop("check")) is not None:
        return check(checked, given)
    parent_pid: int | None = given.pop("parent_pid")
    if parent_pid is not None:
        die_with_parent(parent_pid, ORPHANED)
    try:
        if given.pop("worker"):
            start = read_start(sys.stdin.buffer)
            service = serve(_log(load(tomllib.loads(start.config), {})), file, start)
        else:
            seen = file_version(file)  # before it is read: a change from then on is noticed
            config = _log(load(file, os.environ, given))
            _keep(given)
            if lets_nobody_in(config):
                logs.get(__name__).warning("identity.nobody", reason=NOBODY)
            if unread := unread_in(os.environ, _named(config)):
                logs.get(__name__).warning("environment.unread", names=unread)
            run = serve if config.workers == 1 else supervise
            service = run(config, file, seen=seen)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(service)
    except ConfigError as error:
        sys.stderr.write(_refusal(file, error))
        return ExitCode.UNUSABLE_CONFIG
    except (ListenFailed, UnusableTls) as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.FAILED


def check(file: Path, options: Mapping[str, object]) -> int:
    """Say what is wrong with a configuration, or what it has. Returns the process's exit status."""
    try:
        config = load(file, os.environ, options)
    except ConfigError as error:
        sys.stderr.write(_refusal(file, error))
        return ExitCode.UNUSABLE_CONFIG
    has = {"models": config.models, "tenants": config.tenants, "keys": config.keys}
    counts = ", ".join(
        f"{len(those)} {name if len(those) != 1 else name[:-1]}" for name, those in has.items()
    )
    sys.stdout.write(f"{file} is a usable configuration: {counts}\n")
    if lets_nobody_in(config):
        sys.stderr.write(f"{file}: {NOBODY}\n")
    return ExitCode.CLEAN


def lets_nobody_in(config: GatewayConfig) -> bool:
    """True if no caller can be known: there is none in the file, and no directory beside it."""
    return config.directory.store == "file" and not (config.keys or config.issuers or config.certificates)


def _refusal(file: Path, error: ConfigError) -> str:
    """The text about a configuration with mistakes: one in each line, with its own where that is known."""
    try:
        text = read_text(file, FILE_LEN_MAX).removeprefix(MARK)
    except (OSError, UnicodeDecodeError):
        text = ""
    lines = zip(lines_of(text, error.problems), error.problems, strict=True)
    by_line = sorted(lines, key=lambda one: one[0] or 0)
    told = (
        f"{file}:{line}: {problem.removeprefix(f'{file}: ')}\n" if line else f"{problem}\n"
        for line, problem in by_line
    )
    return f"{file} is not a usable configuration:\n{''.join(told)}"


def _keep(options: Mapping[str, object]) -> None:
    """Let options hold like variables from now on: also when the file is read again, and in workers."""
    os.environ.update({f"{ENV_PREFIX}{name.upper()}": str(given) for name, given in options.items()})


def _named(config: GatewayConfig) -> Iterator[str | None]:
    """The variables that settings name, as they hold secrets."""
    sources = config.redis.password, config.redis.sentinel_password, config.hop.salt
    yield from map(variable_of, (*sources, config.accounting.webhook_secret))
    yield from (variable_of(model.api_key) for model in config.models)


def _log(config: GatewayConfig) -> GatewayConfig:
    """Log as a configuration says, and return it."""
    logs.configure("gateway", level=config.log_level, is_shared=config.workers > 1)
    return config


if __name__ == "__main__":
    sys.exit(main())
