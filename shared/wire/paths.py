"""The message about a path that does not exist: nearly always from a base URL that lacks `/v1`, or has it
twice, or for a part of OpenAI's API that is not served.

A path that is wrong in one of these ways is not served, so that every endpoint has one name in logs,
metrics and a proxy's rules, and no POST is answered with a redirect, which clients send again without its
body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

VERSION: Final = "/v1"
_SHOWN_LEN_MAX: Final = 100
_INSTEAD: Final[Mapping[str, str]] = {
    "/v1/files": "Files are not kept here: send their text in the request.",
    "/v1/batches": 'Batches are not taken here: send the requests themselves, with service_tier "flex" if'
    " others are to go first.",
    "/v1/conversations": "Conversations are not kept here: send the items, or previous_response_id to a"
    " gateway that keeps responses.",
}
"""Advice in place of parts of OpenAI's API that are not served."""


def no_such_path(path: str, exists: Callable[[str], bool]) -> str:
    """The message of the 404, with the path that was probably meant, if `exists` is true of one."""
    message = f"There is nothing at {path[:_SHOWN_LEN_MAX]!r}."
    plain = "/" + path.strip("/")
    for part, instead in _INSTEAD.items():
        if plain == part or plain.startswith(f"{part}/"):
            return f"{message} {instead}"
    for meant, advice in (
        (plain, ""),
        (VERSION + plain, f" The base URL ends with {VERSION}."),
        (plain.removeprefix(VERSION), ""),
    ):
        if meant != path and exists(meant):
            return f"{message} Did you mean {meant[:_SHOWN_LEN_MAX]!r}?{advice}"
    return message
