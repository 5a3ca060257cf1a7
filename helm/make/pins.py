"""`python -m helm.make.pins`: the images of others, each by its digest of today, as lines for .env.

    python -m helm.make.pins >> .env

Compose takes them from there, and `docker build` takes BASE_IMAGE as `--build-arg BASE`. A registry may move
a tag; a digest is the hash of the manifest that it names, and so of all layers. No digest is kept in the
repository: a base with today's security fixes is a new one. The Dockerfiles refuse a base without a digest
when they are built with RELEASE=yes.

The registries are asked as every client asks them (the OCI distribution specification), with an anonymous
token where they want one. A digest is computed here, of the manifest that came, and not taken from a header.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path
from typing import Final

import httpx

ROOT: Final = Path(__file__).parents[2]
TIMEOUT_S: Final = 60.0
MANIFEST_MAX: Final = 4 << 20
"""Bytes of a manifest, as registries bound them."""
MANIFESTS: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
"""A manifest of several platforms first: its digest is the same on all of them."""
HOSTS: Final = {"docker.io": "registry-1.docker.io"}


class PinError(Exception):
    """An image whose digest could not be learned."""


def images() -> dict[str, str]:
    """The images of others that compose.yaml names, by their variables."""
    text = (ROOT / "compose.yaml").read_text()
    return dict(re.findall(r"\$\{(\w+_IMAGE):-(docker\.io/[^}]+)\}", text))


def pinned(image: str, http: httpx.Client) -> str:
    """The image by its digest: NAME:TAG becomes NAME@sha256:... Raises PinError."""
    host, _, rest = image.partition("/")
    name, _, tag = rest.rpartition(":")
    if not name or "@" in image:
        raise PinError(f"{image}: not HOST/NAME:TAG")
    scheme = "http" if host.startswith("127.0.0.1:") else "https"
    url = f"{scheme}://{HOSTS.get(host, host)}/v2/{name}/manifests/{tag}"
    try:
        answer = _asked(url, http)
    except httpx.HTTPError as error:
        raise PinError(f"{image}: {type(error).__name__}: {error}") from error
    if answer.status_code != 200:
        raise PinError(f"{image}: its registry answers {answer.status_code}")
    if len(answer.content) > MANIFEST_MAX or answer.headers.get("content-type") not in MANIFESTS:
        raise PinError(f"{image}: what its registry sends is no manifest")
    digest = f"sha256:{hashlib.sha256(answer.content).hexdigest()}"
    if (told := answer.headers.get("docker-content-digest", digest)) != digest:
        raise PinError(f"{image}: its registry says {told}, and sends {digest}")
    return f"{host}/{name}@{digest}"


def _asked(url: str, http: httpx.Client) -> httpx.Response:
    """The registry's answer, asked again with a token where it wants one."""
    headers = {"accept": ", ".join(MANIFESTS)}
    answer = http.get(url, headers=headers)
    scheme, _, fields = answer.headers.get("www-authenticate", "").partition(" ")
    if answer.status_code != 401 or scheme.lower() != "bearer":
        return answer
    challenge = dict(re.findall(r'(\w+)="([^"]*)"', fields))
    realm = challenge.pop("realm", "")
    if not realm.startswith("https://"):
        return answer
    granted = http.get(realm, params=challenge)
    token = granted.json().get("token") if granted.status_code == 200 else None
    return http.get(url, headers=headers | {"authorization": f"Bearer {token}"}) if token else answer


def main() -> int:
    failed = 0
    with httpx.Client(timeout=TIMEOUT_S) as http:
        for variable, image in images().items():
            try:
                sys.stdout.write(f"{variable}={pinned(image, http)}\n")
            except PinError as error:
                failed += 1
                sys.stderr.write(f"{error}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
