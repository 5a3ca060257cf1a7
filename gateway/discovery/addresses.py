"""The addresses that a member of a pool may have. Pure.

Prompts and the engines' key are sent to whatever is discovered, so an answer that was made up must not lead
to what is not meant for others: this machine itself, its link, the services of a cloud, and any of these by
another spelling. Private addresses are where engines are.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final

REFUSED: Final[tuple[tuple[str, str], ...]] = (
    ("0.0.0.0/8", "this machine, or none"),
    ("100.100.100.200/32", "the metadata of Alibaba Cloud"),
    ("168.63.129.16/32", "the platform of Azure"),
    ("169.254.0.0/16", "the link, and the metadata of most clouds"),
    ("192.0.0.0/24", "protocols, and the metadata of Oracle's cloud"),
    ("192.88.99.0/24", "relays of 6to4"),
    ("198.18.0.0/16", "measurements between devices; 198.19.0.0/16 is one that AWS advises for pods"),
    ("224.0.0.0/3", "many at once, and reserved"),
    ("::/3", "none, and IPv4 addresses spelled as IPv6: mapped, compatible, by NAT64"),
    ("2001::/23", "protocols: Teredo, which holds IPv4 addresses, and identifiers"),
    ("2002::/16", "IPv4 addresses spelled as IPv6: 6to4"),
    ("4000::/2", "reserved"),
    ("8000::/2", "reserved"),
    ("c000::/3", "reserved"),
    ("e000::/4", "reserved"),
    ("f000::/5", "reserved"),
    ("f800::/6", "reserved"),
    ("fd00:42::/96", "the metadata of Scaleway"),
    ("fd00:c1::/96", "the metadata of Oracle's cloud"),
    ("fd00:ec2::/32", "the services of AWS: metadata, names, the agent of pods' identities"),
    ("fd20:ce::/96", "the metadata of Google Cloud"),
    ("fe00::/7", "the link, the site, many at once, and reserved"),
)
"""The networks whose addresses are no member's, and what they are. Before them, loopback is decided on."""
_NETWORKS: Final = [ip_network(text) for text, _ in REFUSED]


def usable(text: str, *, loopback: bool) -> IPv4Address | IPv6Address | None:
    """The address, unless it is none or nobody's who serves a model. `loopback` admits this machine's own."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        return None
    if address.is_loopback and (not isinstance(address, IPv6Address) or address.ipv4_mapped is None):
        return address if loopback else None
    return None if any(address in network for network in _NETWORKS) else address


def url_of(scheme: str, host: str, port: int) -> str:
    """The base URL of a host, which is a name or an address."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
