"""The replicas of every model, and what each has in flight. A static list, from the configuration."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from gateway.config import ModelConfig, Protocol
from gateway.routing.policy import least_loaded
from shared.ids import ReplicaId


@dataclass(slots=True)
class Replica:
    id: ReplicaId
    """Host and port of its URL: a name for logs and metrics."""
    url: str
    protocol: Protocol
    tokens: int = 0
    """In flight, reserved."""
    requests: int = 0


class Replicas:
    """One entry per URL, also when several models are served there."""

    def __init__(self, models: Iterable[ModelConfig]) -> None:
        self._by_url: dict[str, Replica] = {}
        self._pools: Final = {
            model.name: tuple(self._entry(url, model.protocol) for url in model.replicas) for model in models
        }
        self._turn = 0

    def take(self, model: str, tokens: int, tried: Collection[ReplicaId] = ()) -> Replica | None:
        """The least loaded that was not tried yet, with the request's load upon it, or None when all
        were tried. `give_back` takes the load off."""
        left = [replica for replica in self._pools[model] if replica.id not in tried]
        if not left:
            return None
        self._turn += 1
        loads = [replica.tokens for replica in left]
        replica = left[least_loaded(loads, self._turn % len(left))] if len(left) > 1 else left[0]
        replica.tokens += tokens
        replica.requests += 1
        return replica

    def give_back(self, replica: Replica, tokens: int) -> None:
        replica.tokens -= tokens
        replica.requests -= 1
        assert replica.tokens >= 0
        assert replica.requests >= 0

    def _entry(self, url: str, protocol: Protocol) -> Replica:
        url = url.rstrip("/")
        return self._by_url.setdefault(url, Replica(ReplicaId(urlsplit(url).netloc), url, protocol))
