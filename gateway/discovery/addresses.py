"""The addresses that a member of a pool may have. Pure.

Prompts and the engines' key are sent to whatever is discovered, so an answer that was made up must not lead
to what is not meant for others: this machine itself, its link, the metadata service of a cloud.
"""

from __future__ import annotations

import ipaddress
from ipaddress import IPv4Address, IPv6Address
from typing import Final

METADATA: Final = frozenset(
    ipaddress.ip_address(text)
    for text in ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254")
)
"""Addresses of clouds' own services that are not link-local."""


def usable(text: str, *, loopback: bool) -> IPv4Address | IPv6Address | None:
    """The address, unless it is none or nobody's who serves a model. `loopback` admits this machine's own."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, IPv6Address):
        if address.scope_id is not None or address.ipv4_mapped is not None or address.sixtofour is not None:
            return None  # other spellings of IPv4 addresses
    elif int(address) >> 24 == 0:
        return None
    if address.is_loopback:
        return address if loopback else None
    is_refused = address.is_link_local or address.is_multicast or address.is_unspecified
    return None if is_refused or address.is_reserved or address in METADATA else address


def url_of(scheme: str, host: str, port: int) -> str:
    """The base URL of a host, which is a name or an address."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
