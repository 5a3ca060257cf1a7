"""The commands `penstock engine` and `penstock gateway`: the services themselves, in the foreground.

The process becomes the service, which has an argument parser of its own; nothing is copied here.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Final

from shared.process import interrupts
from shared.process.build import DISTRIBUTION
from shared.process.child_python import environment

SERVICES: Final = {
    "engine": "serve one model in the foreground",
    "gateway": "run a gateway in the foreground",
}
MODULES: Final = {"engine": ("engine", "serve"), "gateway": ("gateway",)}
"""The words after `python -m` that run a service."""
_NEEDS: Final = {"engine": ("aiohttp", "safetensors", "torch", "zmq"), "gateway": ("aiohttp",)}


@dataclass(frozen=True, slots=True)
class ConfigClass:
    """The place where a service declares its settings."""

    module: str
    name: str


CONFIGS: Final = {
    "gateway": ConfigClass("gateway.config.whole", "GatewayConfig"),
    "engine": ConfigClass("engine.config", "EngineConfig"),
}


def command(service: str, options: Sequence[str]) -> list[str]:
    """The command line that runs a service."""
    return [sys.executable, "-P", "-m", *MODULES[service], *options]


def reach(module: str) -> ModuleType:
    """Import a module of a service. Only a launcher does so, by name and when it must: the service may not be
    installed, and no other command pays for its import."""
    return importlib.import_module(module)


def missing_extra(service: str) -> str | None:
    """The message about packages of the service's extra that are not installed; None when all are."""
    missing = [package for package in _NEEDS[service] if importlib.util.find_spec(package) is None]
    if not missing:
        return None
    needs = ", ".join(missing)
    advice = f"pip install '{DISTRIBUTION}[{service}]'"
    return f"the {service} needs packages that are not installed ({needs}): {advice}"


def exec_service(service: str, options: Sequence[str]) -> int:
    """Replace this process by the service. Returns, with the exit code, only when it cannot be run."""
    problem = missing_extra(service)
    if problem is None:
        if sys.stdout is not None:
            sys.stdout.flush()
        interrupts.hold_back()
        argv = command(service, options)
        os.execve(sys.executable, argv, environment())  # noqa: S606  a list, and no shell
    sys.stderr.write(f"penstock {service}: {problem}\n")
    return 1
