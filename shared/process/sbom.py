"""`python -m shared.process.sbom`: print the packages of this Python environment as a CycloneDX document
(JSON).

The images have theirs in /opt/penstock/sbom.cdx.json. It names what is installed, not what was asked for, and
is the same for the same packages: it holds no time and no random number.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from shared.process.build import DISTRIBUTION, OF_GATEWAY

LICENSE_LEN_MAX: Final = 200
"""Characters of a licence's name; some packages put its whole text there."""


def component(package: importlib.metadata.Distribution) -> dict[str, Any]:
    """A package, as its metadata describe it."""
    name = re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower()
    known = package.metadata
    stated = next((known[field] for field in ("License-Expression", "License") if field in known), "")
    named = stated.partition("\n")[0][:LICENSE_LEN_MAX]
    purl = f"pkg:pypi/{name}@{package.version}"
    found = {"type": "library", "name": name, "version": package.version, "purl": purl}
    return {**found, "licenses": [{"license": {"name": named}}]} if named else found


def bom(packages: Iterable[importlib.metadata.Distribution]) -> dict[str, Any]:
    """The document about these packages, one of which is Penstock."""
    by_purl = {one["purl"]: one for one in map(component, packages)}
    components = [by_purl[purl] for purl in sorted(by_purl)]
    own = next(one for one in components if one["name"] in (DISTRIBUTION, OF_GATEWAY))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {**own, "type": "application"}},
        "components": [one for one in components if one is not own],
    }


def main() -> int:
    document = bom(importlib.metadata.distributions())
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
