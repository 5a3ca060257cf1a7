"""Tokenizers of replicas, loaded by a process of their own before this one loads them.

To decode a bundle of 60 MB takes a second in which the interpreter lets nothing else run, and the library
that loads it may crash, or take memory without bound. So a child process does both first, within `CHECK_S`
and `MEMORY_MAX`, and tells what it found: the bundle's hash, and its tokenizer.json without white space,
which is then loaded here. That loading holds the interpreter as well, as the library is made: 1.1 s for
250,000 tokens, and less for fewer. The child says how long it took, by which the gateway spaces such loads.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import BinaryIO, Final, cast

import msgspec
from msgspec import Struct

from shared.process.child_python import scant_environment
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.text.tokenizer import Tokenizer, TokenizerBundle

CHECK_S: Final = 30.0
"""The time for a check, in seconds: ten times what 250,000 tokens take."""
MEMORY_MAX: Final = 1024 * 1024 * 1024
"""Bytes of addresses that the child may have: twice what 250,000 tokens take."""
NICE: Final = 10
"""The number that is added to the child's nice value."""


class Checked(Struct, frozen=True, omit_defaults=True):
    """The child's answer. Behind it comes the tokenizer.json."""

    hash: str = ""
    bundle: TokenizerBundle | None = None
    """The bundle without its tokenizer.json. None where it cannot be used."""
    load_s: float = 0.0
    """The CPU time that loading took."""
    problem: str = ""
    unreadable: str = ""
    """The reason why the data is no bundle."""


class Unreadable(Exception):
    """The data is no bundle."""


class CheckedBundle(Struct, frozen=True):
    """A bundle that was loaded once."""

    hash: str
    load_s: float
    bundle: TokenizerBundle

    def load(self, clock: Clock = SYSTEM_CLOCK) -> Tokenizer:
        """Raises UnusableTokenizer."""
        return Tokenizer(self.bundle, clock, hash_=self.hash)


def bundle_file() -> BinaryIO:
    """A file in memory for a bundle's JSON as it comes, so that it never is one value of this process."""
    if not hasattr(os, "memfd_create"):
        return cast(BinaryIO, tempfile.TemporaryFile(buffering=0))
    return cast(BinaryIO, open(os.memfd_create("bundle"), "w+b", buffering=0))


def check(
    file: BinaryIO, argv: tuple[str, ...] = (sys.executable, "-P", "-m", "gateway.relay.tokenizer_child")
) -> tuple[str, CheckedBundle | str]:
    """The hash of the bundle in a file, and the bundle itself or what is wrong with it. Blocks for as long as
    that takes. Raises Unreadable."""
    try:
        file.seek(0)
        done = subprocess.run(
            argv,
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=scant_environment(),
            timeout=CHECK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"the tokenizer cannot be loaded: it takes more than {CHECK_S:g} s"
    except OSError as error:
        raise Unreadable(f"it cannot be checked: {error}") from error
    out = done.stdout
    head_len = int.from_bytes(out[:8], "big")
    try:
        found = msgspec.msgpack.decode(out[8 : 8 + head_len], type=Checked)
    except msgspec.DecodeError:
        return "", "the tokenizer cannot be loaded: it ends the process that tries"
    return outcome(found, memoryview(out)[8 + head_len :])


def outcome(found: Checked, tokenizer_json: bytes | memoryview) -> tuple[str, CheckedBundle | str]:
    """The result of a check of which this was found. Raises Unreadable."""
    if found.unreadable:
        raise Unreadable(found.unreadable)
    if found.bundle is None:
        return found.hash, found.problem
    bundle = msgspec.structs.replace(found.bundle, tokenizer_json=str(tokenizer_json, "utf-8"))
    return found.hash, CheckedBundle(found.hash, found.load_s, bundle)
