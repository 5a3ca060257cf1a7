"""Dashboards held against Grafana's own types, of the version that compose.yaml runs.

Grafana itself is a server that no package registry has. Its makers publish the types of its files for Python
(grafana-foundation-sdk, one release for each of Grafana's). They are made of Grafana's schemas, and read any
JSON without looking at it. So what was read is looked at here: each field has the type that is declared, and
what is written again has every field that was given, with its value.
"""

from __future__ import annotations

import enum
import importlib
import json
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

from tests.ship import tools


def problems(document: dict[str, Any]) -> list[str]:
    """The places at which a dashboard is none of Grafana's."""
    dashboard, encoder = _sdk()
    read = dashboard.from_json(json.loads(json.dumps(document)))
    written = json.loads(json.dumps(read, cls=encoder))
    return [*_mistyped(read, dashboard, "dashboard"), *_lost(document, written, "dashboard")]


def _sdk() -> tuple[Any, type[json.JSONEncoder]]:
    """The type of a dashboard, and what writes one."""
    directory = str(tools.grafana_types())
    if directory not in sys.path:
        sys.path.append(directory)
    importlib.import_module("grafana_foundation_sdk.cog.plugins").register_default_plugins()
    models = importlib.import_module("grafana_foundation_sdk.models.dashboard")
    encoder = importlib.import_module("grafana_foundation_sdk.cog.encoder")
    return models.Dashboard, encoder.JSONEncoder


def _lost(given: Any, written: Any, path: str) -> Iterator[str]:
    """What Grafana would not keep."""
    if isinstance(given, dict) and isinstance(written, dict):
        for name, value in given.items():
            if name in written:
                yield from _lost(value, written[name], f"{path}.{name}")
            else:
                yield f"{path}.{name}: is not a field"
    elif isinstance(given, list) and isinstance(written, list) and len(given) == len(written):
        for index, (one, other) in enumerate(zip(given, written, strict=True)):
            yield from _lost(one, other, f"{path}[{index}]")
    elif given != written:
        yield f"{path}: {given!r} is read as {written!r}"


def _mistyped(value: Any, hint: Any, path: str) -> Iterator[str]:
    """What is of another type than is declared."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        found = [list(_mistyped(value, one, path)) for one in arguments if one is not types.NoneType]
        is_none = value is None and types.NoneType in arguments
        if not is_none and all(found):
            yield from min(found, key=len)
    elif origin is list and isinstance(value, list):
        for index, one in enumerate(value):
            yield from _mistyped(one, arguments[0], f"{path}[{index}]")
    elif origin is dict and isinstance(value, dict):
        for name, one in value.items():
            yield from _mistyped(one, arguments[1], f"{path}.{name}")
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        if value not in [member.value for member in hint] and value not in list(hint):
            yield f"{path}: {value!r} is no {hint.__name__}"
    elif _is_of_grafana(hint) or (hint is object and _is_of_grafana(type(value))):
        yield from _fields(value, hint, path)
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return
    elif isinstance(hint, type) and hint is not object and type(value) is not hint:
        yield f"{path}: {value!r} is no {hint.__name__}"


def _is_of_grafana(hint: Any) -> bool:
    return isinstance(hint, type) and hint.__module__.partition(".")[0] == "grafana_foundation_sdk"


def _fields(value: Any, hint: type, path: str) -> Iterator[str]:
    """The fields of an object, which may be of a narrower type: a query, or a panel's options."""
    if not _is_of_grafana(type(value)):
        if not isinstance(value, dict) or typing.get_type_hints(hint):
            yield f"{path}: {value!r} is no {hint.__name__}"
        return
    for name, inner in typing.get_type_hints(type(value)).items():
        yield from _mistyped(getattr(value, name), inner, f"{path}.{name}")
