"""The command line of the gateway: `python -m gateway --config FILE`."""

from __future__ import annotations

from shared import interrupts

if __name__ == "__main__":
    interrupts.end_quietly()

import asyncio
import os
import sys
from pathlib import Path

from gateway.app import serve
from gateway.config import HEADINGS, GatewayConfig, load
from gateway.listener import ListenFailed
from shared import logs
from shared.arguments import Parser, add_settings
from shared.config import ConfigError
from shared.lifecycle import die_with_parent
from shared.loops import loop_factory
from shared.tls import UnusableTls


def build_parser() -> Parser:
    """The command line of the gateway. A setting without an option is set in the file or by a variable."""
    parser = Parser(prog="penstock gateway", description="Run a gateway in the foreground.")
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        metavar="FILE.toml",
        help="the configuration; gateway/README.md shows one",
    )
    parser.add_argument("--parent-pid", type=int, help="stop when this process, the parent, is gone")
    add_settings(parser, GatewayConfig, HEADINGS)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Serve until a stop signal. Returns the process's exit status."""
    given = vars(build_parser().parse_args(argv))
    file: Path = given.pop("config")
    parent_pid: int | None = given.pop("parent_pid")
    if parent_pid is not None:
        die_with_parent(parent_pid)
    try:
        config = load(file, os.environ, given)
        logs.configure("gateway", level=config.log_level)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve(config, file))
    except ConfigError as error:
        sys.stderr.write(f"{file} is not a usable configuration:\n{error}\n")
        return 2
    except (ListenFailed, UnusableTls) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
