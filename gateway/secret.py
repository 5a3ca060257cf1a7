"""Secrets that the gateway shows to others, read from a variable or a file: engines' keys, Redis' password.

Rule: never in a log, an error or a `repr`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

TOKEN_LEN_MAX: Final = 8 * 1024
"""Characters; some tokens hold a whole certificate's worth of claims."""
_TOKEN: Final = re.compile(rf"[!-~]{{1,{TOKEN_LEN_MAX}}}")


def read_secret(variable: str | None, path: str | None, env: Mapping[str, str]) -> str | None:
    """The secret in a variable or a file; None without either. Raises ValueError; its message is for the
    operator, and does not show the secret."""
    if variable is not None:
        where, text = f"the environment variable {variable}", env.get(variable, "")
    elif path is not None:
        where = path
        try:
            text = Path(where).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{where} cannot be read: {type(error).__name__}") from None
    else:
        return None
    token = text.strip()
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"{where} holds no key")
    return token
