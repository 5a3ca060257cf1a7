"""The variables that a chat template reads, as its syntax tree shows them.

One that is meant to be set from outside is read before the template itself sets it, if it ever does:
`{% if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}`.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import meta, nodes


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
