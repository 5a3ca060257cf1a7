"""A request's body parsed and validated: the checks that both services share, and the gateway's own
policy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Literal, TypeVar

from shared.apis.census import Census
from shared.apis.request import Request
from shared.apis.validation import Parsed, parse, parse_slices
from shared.fairness.fair_threads import Slices
from shared.wire.errors import InvalidRequest

T = TypeVar("T", bound=Request)


def warm(types: Iterable[type[Request]]) -> None:
    """Build the decoders of these types. The first one takes some 20 ms, which no request should wait for."""
    for type_ in types:
        with contextlib.suppress(InvalidRequest):
            parse(b"{}", type_)


def validate(
    body: bytes, type_: type[T], unknown_fields: Literal["ignore", "refuse"], census: Census
) -> Parsed[T]:
    """Parse a body. Raises InvalidJson or InvalidRequest, which name the field."""
    return _admitted(parse(body, type_, census), unknown_fields)


def validate_slices(
    body: bytes, type_: type[T], unknown_fields: Literal["ignore", "refuse"]
) -> Slices[Parsed[T]]:
    """The same, pass by pass, for a body of any length whose census was taken and checked already."""
    return _admitted((yield from parse_slices(body, type_)), unknown_fields)


def _admitted(parsed: Parsed[T], unknown_fields: Literal["ignore", "refuse"]) -> Parsed[T]:
    if getattr(parsed.request, "penstock", None) is not None:
        raise InvalidRequest("penstock is set by the gateway alone.", param="penstock")
    if parsed.ignored and unknown_fields == "refuse":
        raise InvalidRequest(
            f"Unknown fields: {parsed.ignored_header or 'with names not fit to be shown'}.",
            param=parsed.ignored_header.partition(",")[0] or None,
        )
    return parsed
