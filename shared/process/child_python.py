"""The environment of a process of our own modules, `python -P -m MODULE`.

Without `-P` the current directory is looked in first. Services are started anywhere, also where a package is
named `engine`, `gateway` or `shared`, which would be run in place of ours. With it, modules are found where
this process finds them, so that parent and child are of one version.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import BinaryIO, Final

_INHERITED: Final = ("PATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX", "TZ", "LANG", "LC_ALL")


def scant_environment() -> dict[str, str]:
    """The environment of a process that is to know nothing of ours but the places of modules, the language
    and the time zone."""
    return environment({name: os.environ[name] for name in _INHERITED if name in os.environ})


def answer_pipe() -> BinaryIO:
    """This process's stdout, for its answers alone: from now on, all else that writes there, as logs that
    nobody configured do, writes to stderr."""
    own = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return os.fdopen(own, "wb")


def environment(ours: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`ours`, with the places of modules."""
    return {**ours, "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, sys.path)))}
