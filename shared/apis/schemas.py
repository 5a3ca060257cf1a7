"""JSON schemas that answers and arguments of tools follow: what we can hold of them, checked at the door."""

from __future__ import annotations


def check_schema(schema_json: bytes | str, *, strict: bool, param: str) -> tuple[str, ...]:
    """Check a schema, and return the places of what is ignored of it, none where `strict`. Raises
    InvalidRequest, whose `param` is the place below `param` of what cannot be held."""
    raise AssertionError((schema_json, strict, param))
