"""The admin listener of a gateway, as the commands ask it.

The address is what `--admin-url` says, else `$PENSTOCK_ADMIN_URL`, else the `penstock up` that runs here,
else the port that a gateway has by default. The key is `$PENSTOCK_ADMIN_KEY`; the key of a running `penstock
up` opens that gateway alone, and is sent to no other address. Behind https, the authorities are trusted that
the system trusts, or those of `$SSL_CERT_FILE`.
"""

from __future__ import annotations

import argparse
import os
from typing import Final, TypeVar

import httpx
import msgspec

from shared.cli.running import read_running
from shared.process.tls import client_context
from shared.wire.envelope import ErrorEnvelope
from shared.wire.undecodable import UNDECODABLE

DEFAULT_URL: Final = "http://127.0.0.1:9090"
KEY_VARIABLE: Final = "PENSTOCK_ADMIN_KEY"
URL_VARIABLE: Final = "PENSTOCK_ADMIN_URL"
TIMEOUT_S: Final = 60.0

T = TypeVar("T")


class AdminFailed(Exception):
    """The gateway refused, or could not be reached. The message is for the user."""


class Unreached(AdminFailed):
    """The gateway could not be reached."""


def url_problem(url: str, like: str) -> str | None:
    """The problem of a URL, for `checked`; `like` is one as it must be. None where there is none."""
    try:
        parsed = httpx.URL(url)
        if parsed.scheme in ("http", "https") and parsed.host:
            return None
    except (httpx.InvalidURL, ValueError):
        pass
    return f"must be a URL like {like}"


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add `--admin-url`, which `ask` is given."""
    parser.add_argument(
        "--admin-url",
        default=os.environ.get(URL_VARIABLE) or None,
        metavar="URL",
        help=f"the gateway's [admin] listener (default: ${URL_VARIABLE}, or that of the `penstock up` that "
        f"runs here, or {DEFAULT_URL})",
    )


def ask(admin_url: str | None, path: str, kind: type[T], parameters: dict[str, str]) -> T:
    """Get `/admin/v1` + `path` of a gateway as a value of `kind`. Raises AdminFailed."""
    running = read_running(None if admin_url is None else admin_url.rstrip("/"))
    url = admin_url or (running.admin_url if running is not None else None) or DEFAULT_URL
    key = os.environ.get(KEY_VARIABLE) or None
    if key is None and running is not None:
        key = running.admin_key
    try:
        answer = httpx.get(
            f"{url.rstrip('/')}/admin/v1{path}",
            params=parameters,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=TIMEOUT_S,
            trust_env=False,  # no proxy is to see an operator's key
            verify=client_context(),
        )
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise Unreached(f"{url} does not answer: {error or type(error).__name__}") from None
    try:
        if answer.status_code == httpx.codes.OK:
            return msgspec.json.decode(answer.content, type=kind)
        problem = msgspec.json.decode(answer.content, type=ErrorEnvelope).error.message
    except UNDECODABLE:
        raise AdminFailed(f"{url} is no admin listener of a gateway ({answer.status_code})") from None
    hint = (
        f"; put an operator's key into ${KEY_VARIABLE}"
        if answer.status_code == httpx.codes.UNAUTHORIZED
        else ""
    )
    raise AdminFailed(f"{problem} ({answer.status_code}){hint}")
