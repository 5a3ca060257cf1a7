"""Settings in environment variables: which of them are meant for a service.

A service reads the variables that begin with its prefix, such as `PENSTOCK_ENGINE_`.

Rules:

1. An empty variable counts as unset. Docker Compose passes one where `${NAME}` names a variable that is
   not set, and no setting here means anything when it is empty.
2. Kubernetes' service links are nobody's settings. Every container of a namespace is given variables for
   every Service in it: a Service called `penstock-engine` makes `PENSTOCK_ENGINE_SERVICE_HOST`,
   `PENSTOCK_ENGINE_PORT=tcp://10.0.0.1:8001`, `PENSTOCK_ENGINE_PORT_8001_TCP_ADDR` and more.
3. Any other variable with the prefix is a setting, or a mistake that is reported by its name.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from typing import Final

from shared.arguments import Parser, closest

_LINK_NAME: Final = re.compile(
    r"(.+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_LINK_PORT_NAME: Final = re.compile(r"(.+_)?PORT")
_LINK_URL: Final = re.compile(r"(tcp|udp|sctp)://.*")
_TRUTHS: Final = {"true": True, "1": True, "false": False, "0": False}


def settings_in(env: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The variables that are meant to set something, by their names without the prefix."""
    names = ((name, name.removeprefix(prefix)) for name in env if name.startswith(prefix))
    return {short: env[name] for name, short in names if env[name] and not _is_service_link(short, env[name])}


def _is_service_link(name: str, value: str) -> bool:
    if _LINK_NAME.fullmatch(name):
        return True
    return bool(_LINK_PORT_NAME.fullmatch(name) and _LINK_URL.fullmatch(value))


def no_such_setting(variable: str, known: Iterable[str]) -> str:
    """The message about a variable that sets nothing, with the known one that is most like it."""
    hint = closest(variable, known)
    return f"{variable}: there is no such setting" + (f"; did you mean {hint}?" if hint else "")


# -- for a command line ---------------------------------------------------------------------------


def apply_environment(parser: Parser, env: Mapping[str, str], prefix: str) -> None:
    """Make variables the defaults of the parser's options, so that the command line wins.

    `--max-model-len` is `PREFIX_MAX_MODEL_LEN`. A switch takes true or false, under its option's name
    (`PREFIX_NO_PREFIX_CACHE=true`) or its setting's (`PREFIX_PREFIX_CACHE=false`). A mistake is printed,
    and ends the process with status 2, as a wrong option does.
    """
    known = {prefix + name: action for action in parser.options for name in _names(action)}
    given = {prefix + name: text for name, text in settings_in(env, prefix).items()}
    if unknown := [no_such_setting(variable, known) for variable in given if variable not in known]:
        parser.error("; ".join(unknown))
    set_by: dict[argparse.Action, str] = {}
    for variable, text in given.items():
        action = known[variable]
        if action in set_by:
            parser.error(f"{set_by[action]} and {variable} set the same option")
        set_by[action] = variable
        try:
            action.default = _value(action, variable.removeprefix(prefix), text)
        except argparse.ArgumentTypeError as error:
            parser.error(f"{variable}: {error}")
        action.required = False


def _names(action: argparse.Action) -> set[str]:
    options = {option.removeprefix("--") for option in action.option_strings if option.startswith("--")}
    return {name.replace("-", "_").upper() for name in options | {action.dest}}


def _value(action: argparse.Action, name: str, text: str) -> object:
    """What argparse would make of the text. Raises ArgumentTypeError."""
    if action.nargs == 0:  # a switch
        if text.lower() not in _TRUTHS:
            raise argparse.ArgumentTypeError(f"must be true or false, got {text!r}")
        return _TRUTHS[text.lower()] != (name == f"NO_{action.dest.upper()}")
    try:
        value = action.type(text) if callable(action.type) else text
    except ValueError:
        value = text  # and none of the choices
    if action.choices is not None and value not in action.choices:
        choices = ", ".join(map(str, action.choices))
        raise argparse.ArgumentTypeError(f"must be one of {choices}, got {text!r}")
    return value
