"""The settings of discovery: where the replicas of a model are found, when they are not listed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from gateway.config.edge import is_base_url, is_loopback
from shared.process.setting_values import ConfigError
from shared.process.settings import Text

INTERVAL_S_MIN: Final = 1.0
_HOST: Final = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")

HostName = Annotated[str, Meta(min_length=1, max_length=260)]
Label = Annotated[str, Meta(pattern=r"^[a-z0-9]$|^[a-z0-9][a-z0-9-]{0,61}[a-z0-9]$")]
"""A name of Kubernetes: of a namespace, or of a Service."""


@dataclass(frozen=True, slots=True)
class KubernetesConfig:
    """A Service whose endpoints are the replicas. Its EndpointSlices are watched, for which the pod's service
    account needs the verbs list and watch."""

    service: Label
    """Name of the Service."""
    namespace: Label | None = None
    """Its namespace. Unset: the gateway's own."""
    port: Annotated[str, Meta(min_length=1, max_length=63)] | None = None
    """Name or number of the engines' port, as the EndpointSlices have it. Unset: their only one."""
    api_url: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """URL of the API server. Unset: the one that Kubernetes tells every pod."""

    def __post_init__(self) -> None:
        if self.api_url is None:
            return
        if not is_base_url(self.api_url):
            raise ConfigError([f"api_url {self.api_url!r} is no base URL like https://host:port"])
        parts = urlsplit(self.api_url)
        if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
            raise ConfigError(["api_url must be https: a token is sent there"])


@dataclass(frozen=True, slots=True)
class DiscoveryConfig:
    """Where replicas are found. Exactly one of dns, srv and kubernetes is given."""

    dns: HostName | None = None
    """Name and port, such as engines.prod.svc.cluster.local:8001: each of its addresses (A, AAAA) is a
    replica."""
    srv: HostName | None = None
    """Name of SRV records, such as _http._tcp.engines.prod.svc.cluster.local: the targets of the lowest
    priority are the replicas. Weights are ignored."""
    kubernetes: KubernetesConfig | None = None
    """The Service whose endpoints are the replicas."""
    scheme: Literal["http", "https"] = "http"
    """https: replicas show certificates, for their addresses, or for the targets' names with srv."""
    interval_s: Annotated[float, Meta(ge=INTERVAL_S_MIN, le=3600.0)] = 10.0
    """Time between two questions to DNS."""
    nameserver: Text | None = None
    """Address and port of the DNS server that is asked, such as 10.96.0.10:53. Unset: the system's."""
    loopback: bool = False
    """True if addresses of this machine itself are taken, too. Link-local ones never are."""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError(problems)

    def _problems(self) -> Iterator[str]:
        if sum(source is not None for source in (self.dns, self.srv, self.kubernetes)) != 1:
            yield "needs exactly one of dns, srv and kubernetes"
        if self.dns is not None and host_and_port(self.dns) is None:
            yield f"dns {self.dns!r} is no name and port like engines:8001"
        if self.srv is not None and not _HOST.fullmatch(self.srv):
            yield f"srv {self.srv!r} is no DNS name"
        if self.nameserver is not None and host_and_port(self.nameserver) is None:
            yield f"nameserver {self.nameserver!r} is no address and port like 10.96.0.10:53"


def host_and_port(text: str) -> tuple[str, int] | None:
    """The parts of `name:port`. None where the text is none."""
    host, colon, port = text.rpartition(":")
    if not (colon and _HOST.fullmatch(host) and port.isascii() and port.isdigit() and len(port) < 6):
        return None
    return (host, int(port)) if 0 < int(port) < 65536 else None
