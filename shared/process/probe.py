"""`python -m shared.process.probe [URL]`: ask a probe of a service in the same container. An image's health
check: it has no curl.

The exit status is 0 if the probe says yes, else 1, with the reason on standard error. Without an argument the
URL is that in `PENSTOCK_PROBE_URL`. Only this machine is asked, and never through a proxy; so a certificate,
which is for the name by which others know the service, is not verified.

A rank that serves nothing (`RANK` above 0, as torchrun sets it) has nothing to ask, and counts as well: it
ends when it has failed.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

VARIABLE: Final = "PENSTOCK_PROBE_URL"
TIMEOUT_S: Final = 3.0
ANSWER_LEN_MAX: Final = 4096
"""Bytes of an answer that are repeated."""


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Ask. Returns the process's exit status."""
    if env.get("RANK", "0") not in ("", "0"):
        return 0
    url = argv[0] if argv else env.get(VARIABLE, "")
    problem = problem_at(url)
    if problem is not None:
        sys.stderr.write(f"{problem}\n")
        return 1
    return 0


def problem_at(url: str) -> str | None:
    """The reason why the probe at `url` does not say yes; None when it does."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.hostname not in ("127.0.0.1", "::1", "localhost"):
        return f"{VARIABLE}: must be an http or https URL of this machine, got {url[:100]!r}"
    connection = _connection(parts.scheme, parts.hostname, parts.port)
    try:
        connection.request("GET", parts.path or "/")
        answer = connection.getresponse()
        text = answer.read(ANSWER_LEN_MAX).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return f"{url}: {error or type(error).__name__}"
    finally:
        connection.close()
    return None if answer.status == http.client.OK else f"{url}: {answer.status} {text}"


def _connection(scheme: str, host: str, port: int | None) -> http.client.HTTPConnection:
    if scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
