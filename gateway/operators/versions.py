"""The versions of answers that a page asks for every second: who has the newest is told so, and none is made.

Rules:

1. A version is a name (`etag`) of what the answer is made of, known before it is made: of this process, of
   the question, and of numbers that change whenever the answer may; or, where nothing tells that beforehand,
   of what it says. Whoever has it sends `if-none-match`.
2. The version of an answer that several give has those of all, so that each finds its own in it
   (`gateway.operators.together`). One that has changed makes all of them answer.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Final

from aiohttp import web

from gateway.client.responses import json_response
from shared.process.listening import SERVER

ETAG: Final = "etag"
KNOWN: Final = "if-none-match"
ETAG_LEN_MAX: Final = 4096
"""Characters of a version of several. One that would be longer is not told."""
_SEVERAL: Final = re.compile(r'"([0-9a-f.]+)"')


class Versions:
    """The versions of one process's answers."""

    def __init__(self) -> None:
        self._process: Final = secrets.token_hex(8)

    def of(self, request: web.BaseRequest, *numbers: int) -> str:
        """The version of the answer to this question."""
        told = f"{self._process} {request.raw_path} {numbers}".encode()
        return hashlib.sha256(told).hexdigest()[:16]

    def told(self, request: web.BaseRequest, body: bytes, said: bytes | None = None) -> web.Response:
        """An answer of JSON, or that whoever asks has it: where nothing tells before it is made whether it
        is the same, its version is of what it says. `said` is that, where not all of the body counts."""
        digest = hashlib.sha256(body if said is None else said).digest()
        version = self.of(request, int.from_bytes(digest[:8]))
        if is_known(request, version):
            return unchanged(etag_of(version))
        return json_response(HTTPStatus.OK, body, etag_of(version))


def is_known(request: web.BaseRequest, version: str) -> bool:
    """True if who asks has this version."""
    return version in request.headers.get(KNOWN, "")


def etag_of(version: str) -> dict[str, str]:
    """The header that tells a version."""
    return {ETAG: f'"{version}"'}


def unchanged(headers: Mapping[str, str]) -> web.Response:
    """The answer to who has the newest. `headers` have its version."""
    return web.Response(status=HTTPStatus.NOT_MODIFIED, headers={**headers, "server": SERVER})


def version_of(headers: Mapping[str, str]) -> dict[str, str]:
    """The header that tells a version, where there is one."""
    told = [text for name, text in headers.items() if name.lower() == ETAG]
    return {ETAG: told[0]} if told else {}


def etag_of_all(answers: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The version of an answer made of several, of which these are the headers. None where one has none."""
    found = [_SEVERAL.fullmatch(version_of(headers).get(ETAG, "")) for headers in answers]
    told = ".".join(one[1] for one in found if one is not None)
    return etag_of(told) if all(found) and len(told) <= ETAG_LEN_MAX else {}
