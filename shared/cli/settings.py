"""The command `penstock settings SERVICE`: a service's settings as tables, as a JSON schema or as an example
of its file.

All three follow from the service's declarations (`shared.process.settings`). README holds the tables.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from typing import Any, Final

import msgspec

from shared.cli.service import CONFIGS, reach
from shared.process import sizes
from shared.process.arguments import Parser
from shared.process.setting_values import toml_value
from shared.process.settings import Kind, Setting, settings_of

WIDTH: Final = 100
"""Columns of the comments in the example."""
DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
FORMATS: Final = ("table", "json-schema", "toml")
COLUMNS: Final = ("type", "default", "bounds", "variable", "meaning")
"""The columns of a table after the first one, whose head names the section."""


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
        choices=FORMATS,
        default="table",
        help="tables in Markdown, a JSON schema of the file, or an example of it (default: table)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the settings of the chosen service. Returns the process's exit code."""
    sys.stdout.write(text_of(options.service, options.format))
    return 0


def text_of(service: str, form: str) -> str:
    """The settings of a service in one of the formats."""
    module = reach(CONFIGS[service].module)
    type_ = getattr(module, CONFIGS[service].name)
    match form:
        case "table":
            text = tables(type_, module.ENV_PREFIX, module.HEADINGS)
        case "json-schema":
            text = json_schema(type_)
        case _:
            text = example(type_)
    return text.rstrip() + "\n"


# -- the tables -----------------------------------------------------------------------------------


def tables(type_: type, prefix: str, headings: Mapping[str, str]) -> str:
    """Tables in Markdown: one for each section, and for each heading within the top level."""
    heads: dict[type, str] = {}
    found = list(_sections(type_, "", "top level", headings, heads))
    return "\n\n".join(_table(head, settings, prefix, heads) for head, settings in found)


def _sections(
    type_: type, path: str, head: str, headings: Mapping[str, str], heads: dict[type, str]
) -> Iterator[tuple[str, list[Setting]]]:
    """The head and the settings of each table. `headings` are by the name of the setting that is the first
    below each. `heads` are those of the sections found so far, by their types: each type has one table."""
    group: list[Setting] = []
    inner: list[tuple[type, Setting]] = []
    for setting in settings_of(type_, path):
        if setting.name in headings:
            if group:
                yield head, group
            head, group = headings[setting.name], []
        group.append(setting)
        if setting.section is not None and setting.section not in heads:
            heads[setting.section] = _head(setting)
            inner.append((setting.section, setting))
    yield head, group
    for section, setting in inner:
        yield from _sections(section, setting.inner_path, heads[section], {}, heads)


def _table(head: str, settings: list[Setting], prefix: str, heads: Mapping[type, str]) -> str:
    lines = [_line(head, *COLUMNS), "|---" * (1 + len(COLUMNS)) + "|"]
    for setting in settings:
        kind, shown = _type(setting.kind), heads.get(setting.section) if setting.section else None
        if shown not in (None, _head(setting)):
            kind += f", as {shown}"
        default = "required" if setting.is_required else _code(setting.shown_default)
        variable = _code(setting.variable(prefix) or "")
        lines.append(_line(_code(setting.name), kind, default, _bounds(setting.kind), variable, setting.help))
    return "\n".join(lines)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _head(setting: Setting) -> str:
    """The header of a section in the file."""
    path = setting.path.replace("[]", "")
    return f"`[[{path}]]`" if setting.kind.item is not None else f"`[{path}]`"


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


def json_schema(type_: type) -> str:
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


def example(type_: type) -> str:
    """A TOML file with every setting as a comment, with its default where it has one."""
    return "\n".join(_example(type_, ""))


def _example(type_: type, path: str) -> Iterator[str]:
    inner: list[tuple[type, Setting]] = []
    for setting in settings_of(type_, path):
        if setting.section is not None:
            inner.append((setting.section, setting))
        else:
            yield from _comment(setting)
            yield f"# {setting.name} = {_value(setting)}\n"
    for section, setting in inner:
        yield from _comment(setting)
        yield f"# {_head(setting).strip('`')}\n"
        yield from _example(section, setting.inner_path)


def _comment(setting: Setting) -> Iterator[str]:
    note = " Required." if setting.is_required else ""
    bounds = _bounds(setting.kind)
    kind = _type(setting.kind) + (f": {bounds}" if bounds else "")
    text = f"{setting.help} ({kind}){note}"
    yield from textwrap.wrap(text, WIDTH, initial_indent="## ", subsequent_indent="## ")


def _value(setting: Setting) -> str:
    return "..." if setting.is_required or setting.default is None else toml_value(setting.default)
