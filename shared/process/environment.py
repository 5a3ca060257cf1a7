"""Settings in environment variables: the variables that are meant for a service.

A service reads the variables that begin with its prefix, such as `PENSTOCK_ENGINE_`.

Rules:

1. An empty variable counts as unset. Docker Compose passes one where `${NAME}` names a variable that is
   not set, and no setting here means anything when it is empty.
2. Kubernetes' service links are no settings. Every container of a namespace is given variables for
   every Service in it: a Service called `penstock-engine` makes `PENSTOCK_ENGINE_SERVICE_HOST`,
   `PENSTOCK_ENGINE_PORT=tcp://10.0.0.1:8001`, `PENSTOCK_ENGINE_PORT_8001_TCP_ADDR` and more.
3. Any other variable with the prefix is a setting, or a mistake that is reported by its name.
4. Any other variable that begins with `PENSTOCK_`, and that nothing of Penstock reads, may have a misspelt
   prefix: services and `penstock up` name it. It is no error: a variable of any name may be a user's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from shared.process.arguments import closest

_LINK_NAME: Final = re.compile(
    r"(.+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_LINK_PORT_NAME: Final = re.compile(r"(.+_)?PORT")
_LINK_URL: Final = re.compile(r"(tcp|udp|sctp)://.*")


PREFIX: Final = "PENSTOCK_"
SERVICE_PREFIXES: Final = ("PENSTOCK_ENGINE_", "PENSTOCK_GATEWAY_")
OTHERS: Final = frozenset({f"{PREFIX}{name}" for name in ("ADMIN_KEY", "ADMIN_URL", "API_KEY", "PROBE_URL")})
"""The variables that other commands read."""


def settings_in(env: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The variables that are meant to set something, by their names without the prefix."""
    names = ((name, name.removeprefix(prefix)) for name in env if name.startswith(prefix))
    return {short: env[name] for name, short in names if env[name] and not _is_service_link(short, env[name])}


def unread_in(env: Mapping[str, str], named: Iterable[str | None] = ()) -> list[str]:
    """The variables that nothing of Penstock reads, which may be misspelt (rule 4). `named` are those that
    settings name, as they hold secrets."""
    known = OTHERS.union(name for name in named if name)
    names = (f"{PREFIX}{short}" for short in settings_in(env, PREFIX))
    return sorted(name for name in names if not name.startswith(SERVICE_PREFIXES) and name not in known)


def _is_service_link(name: str, value: str) -> bool:
    if _LINK_NAME.fullmatch(name):
        return True
    return bool(_LINK_PORT_NAME.fullmatch(name) and _LINK_URL.fullmatch(value))


def no_such_setting(name: str, known: Iterable[str], former: str | None) -> str:
    """The message about a variable or a key that sets nothing: with what became of it where it is a `former`
    one, else with the known one that is most like it."""
    if former is not None:
        return f"{name}: this setting is {former}"
    hint = closest(name, known)
    return f"{name}: there is no such setting" + (f"; did you mean {hint}?" if hint else "")
