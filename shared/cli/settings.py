"""`penstock settings SERVICE`: what a service can be told: a table, a JSON schema or an example of its file.

All three follow from the service's declarations (`shared.settings`). README holds the tables.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING
from typing import Any, Final

import msgspec

from shared import sizes
from shared.arguments import Parser
from shared.cli.service import CONFIGS, reach
from shared.config import toml_value
from shared.settings import Kind, Setting, settings_of, walk

WIDTH: Final = 100
"""Columns of the comments in the example."""
DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
HEAD: Final = ("setting", "type", "default", "bounds", "variable", "meaning")


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add `settings` to the command line."""
    parser = commands.add_parser(
        "settings",
        help="print what a service can be told",
        description="Print the settings of a service: names, types, defaults, bounds, variables, meanings.",
    )
    parser.add_argument("service", choices=CONFIGS, help="whose settings")
    parser.add_argument(
        "--format",
        choices=_FORMATS,
        default="table",
        help="a table in Markdown, a JSON schema of the file, or an example of it (default: table)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what was asked for; the process's exit code."""
    sys.stdout.write(text_of(options.service, options.format))
    return 0


def text_of(service: str, form: str) -> str:
    """The settings of a service in one of the formats, with a line end."""
    module = reach(CONFIGS[service].module)
    return _FORMATS[form](getattr(module, CONFIGS[service].name), module.ENV_PREFIX).rstrip() + "\n"


# -- the table ------------------------------------------------------------------------------------


def table(type_: type, prefix: str) -> str:
    """A table in Markdown. A section that has the same type as one above it is one row, which names that."""
    rows = [HEAD, tuple("-" for _ in HEAD), *_rows(type_, prefix)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)


def _rows(type_: type, prefix: str) -> Iterator[tuple[str, ...]]:
    for setting, twin in _once(type_):
        kind = setting.kind
        if kind.section is not None and twin is None and setting.default is not None:
            continue  # its own settings follow
        as_above = "" if twin is None else f", as `{twin}`"
        default = "required" if setting.is_required else f"`{setting.shown_default}`"
        has_default = setting.is_required or (setting.shown_default and kind.section is None)
        variable = setting.variable(prefix)
        yield (
            f"`{setting.path}`",
            _type(kind) + as_above,
            default if has_default else "",
            _bounds(kind),
            f"`{variable}`" if variable is not None else "",
            setting.help,
        )


def _once(type_: type) -> Iterator[tuple[Setting, str | None]]:
    """All settings, but of sections of one type only the first one's; with it the path of that, else None."""
    first: dict[type, str] = {}
    skipped = ""
    for setting in walk(type_):
        if skipped and setting.path.startswith(skipped):
            continue
        section, twin = setting.kind.section, None
        if section is not None and (twin := first.setdefault(section, setting.path)) == setting.path:
            twin = None
        skipped = f"{setting.path}." if twin is not None else ""
        yield setting, twin


def _type(kind: Kind) -> str:
    if kind.item is not None:
        return f"list of {_type(kind.item)}s"
    unit = kind.unit if not kind.is_size and kind.base in (int, float) else None
    return f"{kind.noun}, {unit}" if unit is not None else kind.noun


def _bounds(kind: Kind) -> str:
    if kind.rule is not None:
        return kind.rule.says.replace("be ", "", 1)
    if kind.meta.pattern is not None:
        return f"`{kind.meta.pattern}`"
    return kind.bounds.removeprefix("from ").removeprefix("of ")


# -- the JSON schema ------------------------------------------------------------------------------


def json_schema(type_: type, _prefix: str) -> str:
    """A JSON schema of the file, as one value."""
    schema = {"$schema": DIALECT, **_schema_of(type_)}
    return msgspec.json.format(msgspec.json.encode(schema), indent=2).decode()


def _schema_of(type_: type) -> dict[str, Any]:
    settings = settings_of(type_)
    properties = {}
    for setting in settings:
        properties[setting.name] = {**_schema(setting.kind), "description": setting.help}
        if setting.kind.section is None and setting.default not in (MISSING, None):
            properties[setting.name]["default"] = setting.default
    required = [setting.name for setting in settings if setting.is_required]
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


def _schema(kind: Kind) -> dict[str, Any]:
    if kind.section is not None:
        section = _schema_of(kind.section)
        return {"anyOf": [section, {"type": "null"}]} if kind.is_optional else section
    if kind.item is not None:
        least, most = kind.meta.min_length, kind.meta.max_length
        bounds = {"minItems": least, "maxItems": most}
        known = {name: bound for name, bound in bounds.items() if bound is not None}
        return {"type": "array", "items": _schema(kind.item), **known}
    schema = msgspec.json.schema(kind.type)
    size = {"type": "string", "pattern": f"^{sizes.PATTERN}$"}
    return {"anyOf": [*schema.get("anyOf", [schema]), size]} if kind.is_size else schema


# -- the example ----------------------------------------------------------------------------------


def example(type_: type, _prefix: str) -> str:
    """A TOML file in which every setting has its default, as a comment; those without one are left open."""
    return "\n".join(_example(type_, ""))


def _example(type_: type, path: str) -> Iterator[str]:
    tables = []
    for setting in settings_of(type_, path):
        section, item = setting.kind.section, setting.kind.item
        if section is not None:
            tables.append((f"[{setting.path}]", section, setting))
        elif item is not None and item.section is not None:
            tables.append((f"[[{setting.path}]]", item.section, setting))
        else:
            yield from _comment(setting)
            yield f"# {setting.name} = {_value(setting)}\n"
    for head, section, setting in tables:
        yield from _comment(setting)
        yield f"# {head}\n"
        yield from _example(section, setting.path)


def _comment(setting: Setting) -> Iterator[str]:
    note = " Required." if setting.is_required else ""
    bounds = _bounds(setting.kind)
    kind = _type(setting.kind) + (f": {bounds}" if bounds else "")
    text = f"{setting.help} ({kind}){note}"
    yield from textwrap.wrap(text, WIDTH, initial_indent="## ", subsequent_indent="## ")


def _value(setting: Setting) -> str:
    return "..." if setting.is_required or setting.default is None else toml_value(setting.default)


_FORMATS: Final[Mapping[str, Callable[[type, str], str]]] = {
    "table": table,
    "json-schema": json_schema,
    "toml": example,
}
