"""What is worked out from what others send is kept for the next time, and no more of it than is stated."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.admission import guarded_store, redis_store
from gateway.admission.guarded_store import GuardedStore
from gateway.client import answer, connection, deadlines
from gateway.config.redis import RedisConfig
from gateway.redis import links
from gateway.relay import http1, http2_client, upstream
from gateway.request import outbound
from shared.http2 import headers
from shared.process import logs
from shared.telemetry import stages
from shared.text import rendering_child
from tests.gateway.admission.test_survival import BrokenStore, broken

STORE = redis_store.open_store(RedisConfig(url="redis://127.0.0.1:1"), {})
CACHES: dict[str, tuple[Any, int]] = {
    "statuses": (answer._begun, answer.STATUS_LINES_MAX),
    "status lines": (answer._status_line, answer.STATUS_LINES_MAX),
    "total timeouts": (deadlines._total_error, deadlines.TOTALS_MAX),
    "hosts": (connection._is_host, connection.HOSTS_MAX),
    "slots": (links._slot_of, links.TENANTS_KNOWN_MAX),
    "calls": (STORE._calls_of, redis_store.ENCODED_MAX),
    "notes": (STORE._notes_of, redis_store.ENCODED_MAX),
    "rows": (STORE._row_of, redis_store.ENCODED_MAX),
    "shares": (GuardedStore(broken(BrokenStore()))._share, guarded_store.SHARES_MAX),
    "targets over HTTP/1.1": (http1.target_of, http1.TARGETS_MAX),
    "targets over HTTP/2": (http2_client._target, http2_client.TARGETS_MAX),
    "media types": (upstream._media_type, upstream.TYPES_MAX),
    "tenants' headers": (outbound._same_for_all, outbound.TENANTS_KEPT_MAX),
    "names of headers that are sent": (headers._sent_names, headers.SENT_NAMES_MAX),
    "names of headers that came": (headers._judged, headers.RECEIVED_NAMES_MAX),
    "layouts of stages": (stages._layout, stages.LAYOUTS_MAX),
    "choices of stages": (stages._picker, stages.LAYOUTS_MAX),
    "names in logs": (logs._denied, logs.NAMES_MAX),
    "templates of the child": (rendering_child._template, rendering_child.TEMPLATES_MAX),
}


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_is_bounded(name: str) -> None:
    cache, bound = CACHES[name]
    assert cache.cache_info().maxsize == bound
