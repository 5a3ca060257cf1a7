"""Starts the gateway of compose.yaml with a key and an operator's key of its own.

They are made at the first start and kept in the gateway's volume, from which `first_token.py` reads them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Final

from gateway.identity.keys import hash_key, mint_key

FILE: Final = Path("/var/lib/penstock/keys.json")
TENANT: Final = "demo"


def kept(file: Path) -> dict[str, str]:
    """The keys, which are made where there are none yet."""
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        found: dict[str, str] = json.loads(file.read_text())
        return found
    made = {"api": mint_key("live").text, "admin": mint_key("admin").text}
    with open(handle, "w") as target:
        json.dump(made, target)
    return made


def variables(keys: dict[str, str]) -> dict[str, str]:
    """The gateway's settings for keys, as TOML."""
    own = {name: f'id = "{key.split("_")[2]}", hash = "{hash_key(key)}"' for name, key in keys.items()}
    return {
        "PENSTOCK_GATEWAY_KEYS": f'[{{ {own["api"]}, tenant = "{TENANT}" }}]',
        "PENSTOCK_GATEWAY_ADMIN__KEYS": f"[{{ {own['admin']} }}]",
    }


if __name__ == "__main__":
    os.execve(  # noqa: S606  a list, and no shell
        sys.executable,
        [sys.executable, "-m", "gateway", *sys.argv[1:]],
        {**variables(kept(FILE)), **os.environ},
    )
