"""The command `penstock`: start the services, talk to them, measure them.

A command is a module with `add_parser(commands)`, which sets `run`, a function from the parsed options to the
exit code. Only the module of the chosen command is imported, so that `penstock chat` does not pay for
`penstock up`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Final

from shared.cli.service import SERVICES, exec_service
from shared.process.arguments import Parser
from shared.process.build import version
from shared.process.interrupts import INTERRUPTED

COMMANDS: Final = {
    "up": "start an engine and a gateway, ready to be used",
    "init": "write a gateway's configuration that starts",
    "keys": "create, list, rotate and revoke API keys",
    "tenants": "list, create, limit and delete tenants",
    "chat": "talk to a model in the terminal",
    "settings": "print what a service can be told",
    "trace": "show what became of a request, from both services' logs",
    "usage": "show what callers used, by tenant, key, model and day",
    "bench": "say how to measure what README claims",
}
"""A summary of each command, by the name of its module in this package. `shared.cli.service.SERVICES` are
commands too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the process's exit code: 0 done, 1 failed, 2 wrong usage."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if sys.stderr is None:  # closed before the start; there is nowhere to write errors
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  for as long as the process lives
    try:
        if argv and argv[0] in SERVICES:
            return exec_service(argv[0], argv[1:])
        if sys.stdout is None:
            sys.stderr.write("penstock: standard output is closed\n")
            return 1
        try:
            return run(argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:  # while the command's module was imported, too
        return INTERRUPTED
    except OSError as error:  # commands handle the files that they open: this is mostly stdout
        _drop_output()
        if not isinstance(error, BrokenPipeError):  # the reader of a pipe may stop at any time
            sys.stderr.write(f"penstock: {error if error.filename else error.strerror or error}\n")
        return 1


def _drop_output() -> None:
    """Discard what is still to be written, which would fail again when the interpreter ends."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(argv: list[str]) -> int:
    parser, commands = build_parser(argv[0] if argv else "")
    options, unknown = parser.parse_known_args(argv)
    command = commands.choices.get(options.command, parser)
    if unknown and not options.takes_more:
        command.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    options.more = unknown
    code: int = options.run(options)
    return code


def build_parser(chosen: str) -> tuple[Parser, argparse._SubParsersAction[Parser]]:
    """The command line, with the options of the `chosen` command only."""
    parser = Parser(prog="penstock", description="Serve large language models.")
    parser.add_argument("--version", action="version", version=f"penstock {version()}")
    parser.set_defaults(takes_more=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        if name == chosen:
            importlib.import_module(f"shared.cli.{name}").add_parser(commands)
        else:
            commands.add_parser(name, help=summary)
    for name, summary in SERVICES.items():
        commands.add_parser(name, help=summary)
    return parser, commands
