"""The variables that a chat template reads, as its syntax tree shows them.

- *Content*: a template that goes through the parts of a content has a loop over it, or over a variable or a
  macro's parameter that stands for it; one that takes texts as well asks whether it is one.
- *Variables*: one that is meant to be set from outside is read before the template itself sets it, if it ever
  does: `{% if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from jinja2 import meta, nodes

CONTENT: Final = "content"


@dataclass(frozen=True, slots=True)
class Reads:
    """The forms of content that a template takes."""

    takes_text: bool = True
    takes_parts: bool = False


def reads_of(template: nodes.Template) -> Reads:
    contents = _Contents(template)
    if not any(contents.has(loop.iter) for loop in template.find_all(nodes.For)):
        return Reads()
    tests = (test for test in template.find_all(nodes.Test) if test.name == "string")
    return Reads(takes_text=any(contents.has(test.node) for test in tests), takes_parts=True)


def variables_of(template: nodes.Template) -> frozenset[str]:
    """The variables that are meant to be set from outside. Raises TemplateError for a template that does not
    compile."""
    undeclared = meta.find_undeclared_variables(template)
    first: dict[str, str] = {}
    for name in _in_order(template):
        first.setdefault(name.name, name.ctx)
    return frozenset(name for name in undeclared if first[name] == "load")


def _in_order(node: nodes.Node) -> Iterator[nodes.Name]:
    """The names in a node, as they come up when it is rendered."""
    if isinstance(node, nodes.Name):
        yield node
    children = list(node.iter_child_nodes())
    if isinstance(node, nodes.Assign):
        children.reverse()  # its value comes before its target
    for child in children:
        yield from _in_order(child)


class _Contents:
    """The expressions that stand for a message's content."""

    def __init__(self, template: nodes.Template) -> None:
        self._names: set[str] = set()
        macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
        given = [
            (call.node.name, call)
            for call in template.find_all(nodes.Call)
            if isinstance(call.node, nodes.Name) and call.node.name in macros
        ]
        assigns = [
            (one.target.name, one.node)
            for one in template.find_all(nodes.Assign)
            if isinstance(one.target, nodes.Name)
        ]
        known = -1
        while known < len(self._names):
            known = len(self._names)
            self._names |= {name for name, value in assigns if self.has(value)}
            for name, call in given:
                parameters = zip(macros[name].args, call.args, strict=False)
                self._names |= {parameter.name for parameter, value in parameters if self.has(value)}

    def has(self, node: nodes.Node | None) -> bool:
        match node:
            case nodes.Name(name=name):
                return name in self._names
            case nodes.Getattr(attr=attr):
                return bool(attr == CONTENT)
            case nodes.Getitem(arg=nodes.Const(value=key)):
                return bool(key == CONTENT)
            case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value=key), *_]):
                return bool(key == CONTENT)
            case nodes.Filter(node=inner):
                return self.has(inner)
        return False
