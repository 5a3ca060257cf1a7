"""The gateway and the engine that attacks are sent to: small limits, so that they are reached, and a tenant
for each member of `Who`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gateway.config.edge import AdminConfig, LimitsConfig, ListenConfig
from gateway.config.quotas import QuotaLimits
from gateway.config.responses import ResponsesConfig
from gateway.config.timeouts import TimeoutOverrides
from gateway.config.whole import (
    GatewayConfig,
    KeyConfig,
    ModelConfig,
    TenantConfig,
)
from gateway.identity.keys import hash_key
from tests.bench.gateway.attack import HASTY_S, MIB, MODEL, POOR_TOKEN_BUDGET, POOR_TOKENS_PER_MIN, Rogue, Who
from tests.bench.memory_sums import core_memory_max, engine_memory_max, gateway_memory_max

REQUEST_MEMORY: Final = 192 * MIB
"""Bytes of each service's `request_memory`: little more than the largest body needs."""
LIVE_MAX: Final = 256
"""The gateway's bound on live requests."""
CONNECTIONS_MAX: Final = 2048
"""The gateway's bound on clients' connections: more than any attack makes."""
TOKENIZER_THREADS: Final = 2
KV_CACHE: Final = 256 * MIB
SEQUENCES: Final = 64 + 256
"""The engine's sequences that run, and those that wait."""
QUEUE_TOKENS: Final = 1 << 20
GAP_TARGET_MS: Final = 25
"""The gap that the engine is to keep: half of the 50 ms that a victim may wait longer for a first token. A
newcomer waits for the step under way, and for its own."""
STEP_TOKENS: Final = 2048
"""The tokens of one step of the engine."""

ENGINE_OPTIONS: Final = (
    *("--served-model-name", MODEL),
    *("--dtype", "float32"),
    *("--embeddings", "mean"),
    *("--threads", "1"),
    *("--kv-cache-memory", str(KV_CACHE)),
    *("--swap-memory", "0"),
    *("--request-memory", str(REQUEST_MEMORY)),
    *("--max-queue-tokens", str(QUEUE_TOKENS)),
    *("--max-step-tokens", str(STEP_TOKENS)),
    *("--gap-target-ms", str(GAP_TARGET_MS)),
    *("--tokenizer-threads", str(TOKENIZER_THREADS)),
)
KEPT: Final = ResponsesConfig(
    "memory", response_len_max=MIB // 4, tenant_len_max=2 * MIB, memory=8 * MIB, ttl_s=3600.0
)
"""Responses that are kept, if one process serves all."""
GATEWAY_MEMORY_MAX: Final = KEPT.memory + gateway_memory_max(
    REQUEST_MEMORY, LIVE_MAX, TOKENIZER_THREADS, CONNECTIONS_MAX
)
ENGINE_MEMORY_MAX: Final = engine_memory_max(REQUEST_MEMORY, LIVE_MAX, TOKENIZER_THREADS)
CORE_MEMORY_MAX: Final = core_memory_max(
    KV_CACHE, 0, SEQUENCES, QUEUE_TOKENS, running_max=0, vocab_size=0
)  # the demo model's vocabulary is small beside the rest

_LIMITS: Final[Mapping[Who, QuotaLimits]] = {
    Who.ZERO: QuotaLimits(requests_per_min=0),
    Who.SEATLESS: QuotaLimits(concurrent=0),
    Who.BROKE: QuotaLimits(token_budget=0),
    Who.POOR: QuotaLimits(tokens_per_min=POOR_TOKENS_PER_MIN, token_budget=POOR_TOKEN_BUDGET),
}


def gateway_config(
    engine_urls: Sequence[str],
    port: int = 0,
    admin_port: int = 0,
    *,
    workers: int = 1,
    rogue_url: str | None = None,
) -> GatewayConfig:
    """The gateway's configuration. Each tenant's key is the tenant's name. `rogue_url` is that of
    `tests.bench.gateway.rogue_engine`, where it runs. Tenants with limits, which several
    workers would count apart, are known to a lone worker only."""
    tenants = [who for who in Who if who is not Who.STRANGER and not (workers > 1 and who in _LIMITS)]
    rogues = () if rogue_url is None else (ModelConfig(kind, (f"{rogue_url}/{kind}",)) for kind in Rogue)
    return GatewayConfig(
        workers=workers,
        listen=ListenConfig(port=port),
        admin=AdminConfig(port=admin_port),
        limits=LimitsConfig(
            request_memory=REQUEST_MEMORY,
            live_max=LIVE_MAX,
            connections_max=CONNECTIONS_MAX,
            tokenizer_threads=TOKENIZER_THREADS,
        ),
        responses=KEPT if workers == 1 else ResponsesConfig(),
        models=(ModelConfig(MODEL, tuple(engine_urls)), *rogues),
        tenants=tuple(map(_tenant, tenants)),
        keys=tuple(KeyConfig(who, hash_key(who), who) for who in tenants),
    )


def _tenant(who: Who) -> TenantConfig:
    return TenantConfig(
        who,
        limits=_LIMITS.get(who, QuotaLimits()),
        timeouts=TimeoutOverrides(first_token_s=HASTY_S) if who is Who.HASTY else None,
    )


def peak_bytes(pid: int) -> int:
    """The most resident memory that a process has had since its start, or since `forget_peak`."""
    return _status(pid, "VmHWM")


def rest_bytes(pid: int) -> int:
    """The resident memory that a process has now."""
    return _status(pid, "VmRSS")


def data_bytes(pid: int) -> int:
    """The memory that a process has mapped for itself to write to, used or not. RLIMIT_DATA bounds it."""
    return _status(pid, "VmData")


def forget_peak(pid: int) -> None:
    """Reset the peak of a process to what is resident now. Linux only."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
