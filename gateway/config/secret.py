"""Secrets that the gateway shows to others, read from a variable or a file: engines' keys, Redis' passwords,
what signs posts to a webhook.

Rule: never in a log, an error or a `repr`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from shared.process import logs
from shared.process.files import MARK, read_text
from shared.process.settings import Rule

TOKEN_LEN_MAX: Final = 8 * 1024
"""Characters; some tokens hold a whole certificate's worth of claims."""
FILE_LEN_MAX: Final = 2 * TOKEN_LEN_MAX
"""Bytes of a file with a secret, and the space around it."""
_TOKEN: Final = re.compile(rf"[!-~]{{1,{TOKEN_LEN_MAX}}}")

_VARIABLE: Final = "env:"
_FILE: Final = "file:"
SecretSource = Annotated[
    str,
    Meta(max_length=4096),
    Rule("be env:NAME, a variable, or file:PATH, a file", re.compile(r"(env|file):\S.*").fullmatch),
]
"""Where a secret is: never the secret itself."""

log = logs.get(__name__)


def variable_of(source: str | None) -> str | None:
    """The variable that a source names. None where it names a file, and without one."""
    return source.removeprefix(_VARIABLE) if source is not None and source.startswith(_VARIABLE) else None


def file_of(source: str | None) -> str | None:
    """The file that a source names. None where it names a variable, and without one."""
    return source.removeprefix(_FILE) if source is not None and source.startswith(_FILE) else None


def read_secret(source: str | None, env: Mapping[str, str]) -> str | None:
    """The secret at a `SecretSource`; None without one. Raises ValueError; its message is for the operator,
    and does not show the secret."""
    if (variable := variable_of(source)) is not None:
        where = f"the environment variable {variable}"
        if variable not in env:
            raise ValueError(f"{where} is not set")
        text = env[variable]
    elif (path := file_of(source)) is not None:
        where = path
        try:
            text = read_text(Path(where), FILE_LEN_MAX)
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", "it is not UTF-8")
            raise ValueError(f"{where} cannot be read: {why}") from None
    else:
        return None
    token = text.removeprefix(MARK).strip()
    if not token:
        raise ValueError(f"{where} is empty")
    if not _TOKEN.fullmatch(token):
        told = f"one word of printable ASCII characters, {TOKEN_LEN_MAX} at most"
        raise ValueError(f"{where} must hold {told}")
    return token


class RenewableSecret:
    """A secret that may be renewed while it is in use: a file is read again whenever `now` is asked. What a
    variable says holds as long as the process."""

    __slots__ = ("_path", "_problem", "_read", "text")

    def __init__(
        self,
        source: str | None,
        env: Mapping[str, str],
        check: Callable[[str], object] | None = None,
    ) -> None:
        """`check` raises ValueError for a text that is no such secret. Raises ValueError, as `read_secret`
        does."""
        self._path: Final = file_of(source)
        self._read: Final = partial(_read_checked, source, env, check)
        self.text = self._read()
        """The secret as it was read last; None without a variable and a file."""
        self._problem: str | None = None
        """The reason why the file could not be used the last time; None where it could be."""

    async def now(self) -> str | None:
        """The secret, read anew on a thread, as its disk may be slow. A file that cannot be used leaves it as
        it was, which is logged once."""
        if self._path is None:
            return self.text
        try:
            self.text, self._problem = await asyncio.to_thread(self._read), None
        except ValueError as error:
            if self._problem != str(error):
                self._problem = str(error)
                log.error("secret.rejected", path=self._path, problem=self._problem)
        return self.text


def _read_checked(
    source: str | None, env: Mapping[str, str], check: Callable[[str], object] | None
) -> str | None:
    text = read_secret(source, env)
    if text is not None and check is not None:
        check(text)
    return text
