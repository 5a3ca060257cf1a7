"""The settings of `[accounting]`: how long usage is kept, and where settled requests are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta

from gateway.config.secret import SecretSource
from shared.process.setting_values import ConfigError
from shared.process.settings import Text, Unit, url_parts

DAYS_MAX: Final = 400
MIB: Final = 1024 * 1024
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class AccountingConfig:
    """Callers' usage: how long it is kept, and to whom it is told."""

    days: Annotated[int, Meta(ge=1, le=DAYS_MAX), Unit("days")] = 62
    """How long the usage of a day is kept."""
    file: Text | None = None
    """File to which one JSON line is appended for each settled request, for billing. Each gateway process has
    one of its own. Unset: none."""
    file_max: Annotated[int, Meta(ge=MIB, le=1024 * MIB), Unit("bytes")] | None = None
    """How large file may become before it is moved to FILE.old, in place of the one before, whose sums are
    kept in FILE.sums. Unset: it is not moved. Not where a webhook empties it."""
    webhook: Text | None = None
    """https URL to which those lines are posted. It needs file, which keeps them until they are taken."""
    webhook_secret: SecretSource | None = None
    """Where the secret is that signs what is posted, whsec_ and its base64: env:NAME, a variable, or
    file:PATH, a file, which is read for each post."""
    webhook_ca: Text | None = None
    """File with the authorities that are trusted when lines are posted, PEM. It is read again when it
    changes. Unset: the system's."""
    spool_max: Annotated[int, Meta(ge=MIB, le=1024**4), Unit("bytes")] = 256 * MIB
    """How large file may become where there is a webhook. Lines that do not fit are dropped and counted."""

    def __post_init__(self) -> None:
        problems = []
        if self.webhook is not None:
            if self.file is None:
                problems.append("webhook needs file")
            if self.file_max is not None:
                problems.append("file_max is for a file without webhook: see spool_max")
            if self.webhook_secret is None:
                problems.append("webhook needs webhook_secret")
            if not _is_safe_url(self.webhook):
                problems.append("webhook must be an https URL (http on this machine alone), without user")
        if problems:
            raise ConfigError(problems)


def _is_safe_url(text: str) -> bool:
    if (parts := url_parts(text)) is None or "@" in parts.netloc:
        return False
    return parts.scheme == "https" or parts.hostname in _LOOPBACK
