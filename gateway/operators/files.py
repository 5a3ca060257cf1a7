"""The console's files: read once, sent as they are, to everybody who reaches the admin listener.

They hold no figures and no keys. Nothing in them is made on demand, and no path is ever looked up in the file
system: what is not in the table is not there.

Rules:

1. The page loads nothing from elsewhere, has no inline script or style, and is shown in no frame: `CSP`. The
   browser would refuse markup made of text, too (`require-trusted-types-for`).
2. What is vendored has its version, its licence and its hash beside it (`static/vendor/README.md`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Final

from aiohttp import web
from msgspec import Struct

from shared.process.listening import SERVER

PAGE: Final = "/console"
STATIC: Final = Path(__file__).parent.parent / "console" / "static"
CSP: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": CSP,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""The headers of every answer that a browser may show."""
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class _File(Struct, frozen=True):
    content_type: str
    etag: str
    body: bytes


@cache
def _files() -> Mapping[str, _File]:
    """The files by path."""
    found = {}
    for path in sorted(STATIC.rglob("*")):
        if (content_type := _TYPES.get(path.suffix)) is not None:
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            name = "" if path.name == "index.html" else f"/{path.relative_to(STATIC).as_posix()}"
            found[f"{PAGE}{name}"] = _File(content_type, etag, body)
    return found


def is_console(path: str) -> bool:
    """True if a path is the console's, whether or not there is such a file."""
    return path == PAGE or path.startswith(f"{PAGE}/")


def file_response(path: str, if_none_match: str | None) -> web.Response | None:
    """The answer to a GET of one of the console's files. None where there is none at this path."""
    if path == f"{PAGE}/":  # its links are relative to the other spelling
        return web.Response(status=HTTPStatus.FOUND, headers={"location": PAGE, "server": SERVER})
    if (file := _files().get(path)) is None:
        return None
    headers = {**HEADERS, "server": SERVER, "etag": file.etag, "cache-control": "no-cache"}
    if if_none_match == file.etag:
        return web.Response(status=HTTPStatus.NOT_MODIFIED, headers=headers)
    return web.Response(body=file.body, headers={**headers, "content-type": file.content_type})
