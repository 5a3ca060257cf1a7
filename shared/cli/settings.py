"""What the commands agree on: the development key, the gateway's file, and where `up` says it runs."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

KEY_VARIABLE: Final = "PENSTOCK_API_KEY"
KEY_LEN_MAX: Final = 256
DRAIN_S: Final = 20.0
"""A development server does not keep its owner waiting longer."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of a server's certificate chain and of its private key, both PEM."""

    cert: str
    key: str


def development_key() -> str:
    return f"sk-penstock-{secrets.token_urlsafe(18)}"


def key_problem(key: str) -> str | None:
    """What a key must be to fit into an Authorization header, when it is not that."""
    fits = 0 < len(key) <= KEY_LEN_MAX and all(" " <= char <= "~" for char in key) and key == key.strip()
    return None if fits else f"must be 1 to {KEY_LEN_MAX} printable ASCII characters, no space at its ends"


def gateway_toml(
    *,
    port: int,
    key: str,
    model: str,
    aliases: Sequence[str],
    engine_url: str,
    host: str = "127.0.0.1",
    tls: Tls | None = None,
) -> str:
    """A gateway's configuration: one model on one engine, one tenant without limits, one key."""
    key_hash = f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
    own = f"tls = {{ cert = {_quote(tls.cert)}, key = {_quote(tls.key)} }}\n" if tls is not None else ""
    names = [name for name in dict.fromkeys(aliases) if name != model]
    return f"""\
# Written by `penstock up`.
[listen]
host = {_quote(host)}
port = {port}
{own}
[timeouts]
drain_s = {DRAIN_S}

[[models]]
name = {_quote(model)}
aliases = [{", ".join(map(_quote, names))}]
replicas = [{_quote(engine_url)}]

[[tenants]]
id = "development"

[[keys]]
id = "development"
hash = "{key_hash}"
tenant = "development"
"""


def _quote(text: str) -> str:
    """A TOML basic string: JSON's, but for one control character that TOML escapes too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


# -- files ----------------------------------------------------------------------------------------


class Running(msgspec.Struct, frozen=True):
    """What `penstock chat` needs to find the `penstock up` beside it."""

    url: str
    """OpenAI base URL, with `/v1`."""
    key: str
    model: str
    pid: int
    cert: str | None = None
    """Path of the certificate that it shows, PEM; None for plain HTTP."""


def cache_dir() -> Path:
    """The user's own directory for run directories and for `running_file`; made when it is missing.

    Raises OSError or RuntimeError where there is no home that can be written.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    directory = (Path(base) if base else Path.home() / ".cache") / "penstock"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def running_file() -> Path:
    return cache_dir() / "up.json"


def write_private(path: Path, data: bytes) -> None:
    """A file that its owner alone can read, there in full or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    draft.replace(path)


def read_running() -> Running | None:
    """The `penstock up` that was started last, if it says that it runs."""
    try:
        return msgspec.json.decode(running_file().read_bytes(), type=Running)
    except (OSError, RuntimeError, msgspec.DecodeError):
        return None


def write_running(running: Running) -> None:
    write_private(running_file(), msgspec.json.encode(running))


def clear_running(pid: int) -> None:
    """Take back what the `up` of this pid wrote, unless another has written since."""
    running = read_running()
    if running is not None and running.pid == pid:
        running_file().unlink(missing_ok=True)
