"""The members that the EndpointSlices of a Service list. Pure: objects of the API in, members out.

A Service has several slices, and an endpoint may be in two of them while it moves from one to the other: it
is ready if one says so. One that is terminating drains, whatever else is said of it: its own word that it is
ready would be a Service's that publishes addresses which are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from msgspec import Raw, Struct, json

from gateway.config.whole import REPLICAS_MAX
from gateway.discovery.addresses import url_of, usable
from gateway.routing.members import Listed, Standing

SLICES_MAX: Final = 1000
_BETTER: Final = (Standing.ENDING, Standing.WAITING, Standing.READY)


class Conditions(Struct, frozen=True):
    ready: bool | None = None
    """None is to be taken for True."""
    terminating: bool | None = None


class SliceEndpoint(Struct, frozen=True):
    addresses: list[str] = []
    conditions: Conditions = Conditions()

    @property
    def standing(self) -> Standing:
        if self.conditions.terminating:
            return Standing.ENDING
        return Standing.WAITING if self.conditions.ready is False else Standing.READY


class Port(Struct, frozen=True):
    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class ObjectMetadata(Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_version: str = ""


class EndpointSlice(Struct, frozen=True, rename="camel"):
    metadata: ObjectMetadata
    address_type: str = "IPv4"
    endpoints: list[SliceEndpoint] | None = None
    ports: list[Port] | None = None


class SliceList(Struct, frozen=True):
    metadata: ObjectMetadata
    items: list[EndpointSlice] | None = None


class Event(Struct, frozen=True):
    """One line of a watch."""

    type: str
    object: Raw


class KubernetesStatus(Struct, frozen=True):
    """The object of an event that tells of an error."""

    code: int = 0
    message: str = ""


decode_list: Final = json.Decoder(SliceList).decode
decode_slice: Final = json.Decoder(EndpointSlice).decode
decode_event: Final = json.Decoder(Event).decode
decode_status: Final = json.Decoder(KubernetesStatus).decode


class TooManySlices(Exception):
    """A Service has more than `SLICES_MAX` slices."""


class Slices:
    """The slices of one Service, by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, EndpointSlice] = {}

    def replace(self, slices: Sequence[EndpointSlice]) -> None:
        """Take a whole list. Raises TooManySlices."""
        if len(slices) > SLICES_MAX:
            raise TooManySlices(f"more than {SLICES_MAX} EndpointSlices")
        self._by_name = {one.metadata.name: one for one in slices}

    def put(self, one: EndpointSlice) -> None:
        """Take one that is new or other than before. Raises TooManySlices."""
        self._by_name[one.metadata.name] = one
        if len(self._by_name) > SLICES_MAX:
            raise TooManySlices(f"more than {SLICES_MAX} EndpointSlices")

    def remove(self, name: str) -> None:
        self._by_name.pop(name, None)

    def members(self, port: str | None, scheme: str, *, loopback: bool) -> list[Listed]:
        """The members at a port, which is a name or a number, or the only one that a slice has."""
        found: dict[str, Standing] = {}
        for one in self._by_name.values():
            number = _number(one.ports or (), port)
            if number is None:
                continue
            for endpoint, address in _addresses(one):
                if (good := usable(address, loopback=loopback)) is not None:
                    url = url_of(scheme, str(good), number)
                    found[url] = max(found.get(url, endpoint.standing), endpoint.standing, key=_BETTER.index)
        return [Listed(url, standing) for url, standing in found.items()]


def _addresses(one: EndpointSlice) -> Iterator[tuple[SliceEndpoint, str]]:
    """Each endpoint with its address: of several, which are of one pod, the first."""
    if one.address_type in ("IPv4", "IPv6"):
        for endpoint in one.endpoints or ():
            if endpoint.addresses:
                yield endpoint, endpoint.addresses[0]


def _number(ports: Sequence[Port], wanted: str | None) -> int | None:
    tcp = [port for port in ports if port.port and port.protocol in (None, "TCP")]
    if wanted is None:
        return tcp[0].port if len(tcp) == 1 else None
    return next((one.port for one in tcp if wanted in (one.name, str(one.port))), None)


assert SLICES_MAX >= REPLICAS_MAX, "a slice per member must be possible"
