"""`python -m gateway --config FILE.toml`"""

from __future__ import annotations

from shared import interrupts

if __name__ == "__main__":
    interrupts.end_quietly()

import asyncio
import os
import sys
from pathlib import Path

from gateway.app import serve
from gateway.config import load
from gateway.listener import ListenFailed
from shared import logs
from shared.arguments import Parser
from shared.config import ConfigError
from shared.lifecycle import die_with_parent
from shared.loops import loop_factory
from shared.tls import UnusableTls


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="penstock gateway", description="Run a gateway in the foreground.")
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        metavar="FILE.toml",
        help="the configuration; gateway/README.md shows one",
    )
    parser.add_argument(
        "--log-level", choices=logs.LEVELS, default="info", help="lowest level that is logged"
    )
    parser.add_argument("--parent-pid", type=int, help="stop when this process, the parent, is gone")
    args = parser.parse_args(argv)
    if args.parent_pid is not None:
        die_with_parent(args.parent_pid)
    try:
        config = load(args.config, os.environ)
    except ConfigError as error:
        sys.stderr.write(f"{args.config} is not a usable configuration:\n{error}\n")
        return 2
    logs.configure("gateway", level=args.log_level)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve(config, args.config))
    except ConfigError as error:
        sys.stderr.write(f"{args.config} is not a usable configuration:\n{error}\n")
        return 2
    except (ListenFailed, UnusableTls) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
