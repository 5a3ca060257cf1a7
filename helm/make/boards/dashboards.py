"""The four dashboards, from the outside in: what users get, the gateway, the fleet, the engines.

Labels that only Prometheus adds are `instance` and no others, so that the dashboards work wherever it runs.
"""

from __future__ import annotations

from typing import Final

from helm.make.boards.inner import ENGINES, FLEET
from helm.make.boards.panels import Dashboard, Variable, panel, quantiles
from helm.make.boards.queries import ENGINE, GATEWAY, INSTANCE, MODEL, OF, RATE, rate, share

_CHARGED: Final = f'{OF}, kind=~"prompt|completion"'
"""The tokens of which the others are parts."""
_TOKENS: Final = f"{GATEWAY}tokens_total"


def _of_kind(kind: str) -> str:
    return rate(_TOKENS, f'{OF}, kind="{kind}"')


REQUESTS: Final = f"{GATEWAY}requests_total"
EXPERIENCE: Final = Dashboard(
    "penstock-experience",
    "Penstock: what users get",
    (Variable("model", REQUESTS), Variable("tenant", REQUESTS)),
    (
        (
            "Answers",
            (
                panel(
                    "Requests",
                    "reqps",
                    "Requests that ended, by status.",
                    (rate(REQUESTS, OF, "status"), "{{status}}"),
                    is_stacked=True,
                ),
                panel(
                    "Share that failed",
                    "percentunit",
                    "Answers with a status of 500 or above: ours, not the caller's.",
                    (share(rate(REQUESTS, f'{OF}, status=~"5.."'), rate(REQUESTS, OF)), "failed"),
                ),
                panel(
                    "Ends",
                    "reqps",
                    "Requests by end_reason, without ok: gateway/README.md says what each means.",
                    (rate(REQUESTS, f'{OF}, end_reason!="ok"', "end_reason"), "{{end_reason}}"),
                    is_stacked=True,
                ),
            ),
        ),
        (
            "Times",
            (
                panel(
                    "Time to the first byte of streams",
                    "s",
                    "From a request's arrival to the first byte of its body: the first token, for streams.",
                    *quantiles(f"{GATEWAY}first_byte_seconds", f'{MODEL}, stream="True"'),
                ),
                panel(
                    "Gap between tokens",
                    "s",
                    "Mean gap of each sequence, as engines see it.",
                    *quantiles(f"{ENGINE}time_per_output_token_seconds", ""),
                ),
                panel(
                    "Whole requests",
                    "s",
                    "From arrival to end.",
                    *quantiles(f"{GATEWAY}request_seconds", MODEL),
                ),
            ),
        ),
        (
            "Tokens and quotas",
            (
                panel(
                    "Tokens",
                    "short",
                    "Tokens per second, as the engines counted them.",
                    (rate(_TOKENS, f'{OF}, kind!~"session_.*"', "kind"), "{{kind}}"),
                ),
                panel(
                    "Prompt tokens found cached",
                    "percentunit",
                    "Of the prompts of requests that name a session, as agents do, and of all others.",
                    (share(_of_kind("session_cached"), _of_kind("session_prompt")), "with a session"),
                    (
                        share(
                            f"({_of_kind('cached')} - {_of_kind('session_cached')})",
                            f"({_of_kind('prompt')} - {_of_kind('session_prompt')})",
                        ),
                        "without",
                    ),
                    most=1.0,
                ),
                panel(
                    "Tokens by tenant",
                    "short",
                    "The ten tenants with the most tokens per second.",
                    (f"topk(10, {rate(_TOKENS, _CHARGED, 'tenant')})", "{{tenant}}"),
                    is_stacked=True,
                ),
                panel(
                    "Calls of functions",
                    "cps",
                    "In answers.",
                    (rate(f"{GATEWAY}calls_total", OF, "model"), "{{model}}"),
                ),
                panel(
                    "Refused by quotas",
                    "reqps",
                    "By the meter that was full, and whose it is.",
                    (
                        rate(f"{GATEWAY}quota_decisions_total", 'decision="refused"', "meter, scope"),
                        "{{meter}} of {{scope}}",
                    ),
                    is_stacked=True,
                ),
            ),
        ),
    ),
)

_STAGES: Final = 'service="gateway"'
GATEWAYS: Final = Dashboard(
    "penstock-gateway",
    "Penstock: gateways",
    (Variable("instance", f"{GATEWAY}requests_in_flight"),),
    (
        (
            "Load",
            (
                panel(
                    "Requests in progress",
                    "short",
                    "At each gateway.",
                    (f"{GATEWAY}requests_in_flight{{{INSTANCE}}}", "{{instance}}"),
                ),
                panel(
                    "Memory of requests",
                    "bytes",
                    "Of request_memory, what bodies, prompts and answers hold. Beyond it requests get 503.",
                    (f"{GATEWAY}held_bytes{{{INSTANCE}}}", "{{instance}}"),
                ),
                panel(
                    "Streams to engines",
                    "short",
                    "HTTP/2 streams that are open.",
                    (f"{GATEWAY}http2_streams{{{INSTANCE}}}", "{{instance}}"),
                ),
            ),
        ),
        (
            "Stages",
            (
                panel(
                    "Time in each stage, p99",
                    "s",
                    "connect and wait are the engine's; the rest is the gateway's own.",
                    (
                        "histogram_quantile(0.99, sum by (le, stage) (rate(penstock_stage_seconds_bucket"
                        f"{{{_STAGES}, {INSTANCE}}}{RATE})))",
                        "{{stage}}",
                    ),
                ),
                panel(
                    "Busy time by stage",
                    "s",
                    "Seconds of requests' time per second, by stage: where requests are.",
                    (rate("penstock_stage_seconds_sum", f"{_STAGES}, {INSTANCE}", "stage"), "{{stage}}"),
                    is_stacked=True,
                ),
                panel(
                    "Event loop",
                    "s",
                    "The longest time that the loop was held up between two scrapes. All requests waited.",
                    (f"penstock_loop_lag_max_seconds{{{INSTANCE}}}", "{{instance}}"),
                ),
            ),
        ),
        (
            "Around it",
            (
                panel(
                    "Processors",
                    "short",
                    "Cores that each process uses.",
                    (
                        f"sum by (instance) (rate(process_cpu_seconds_total{{{INSTANCE}}}{RATE}))",
                        "{{instance}}",
                    ),
                ),
                panel(
                    "Memory",
                    "bytes",
                    "Resident memory. gateway/README.md has the formula of its bound.",
                    (f"sum by (instance) (process_resident_memory_bytes{{{INSTANCE}}})", "{{instance}}"),
                ),
                panel(
                    "Connections cut",
                    "cps",
                    "Client connections closed because too many were open, or held something; and how often "
                    "none could be accepted, as the process may open no more files.",
                    (rate(f"{GATEWAY}connections_cut_total", INSTANCE), "cut"),
                    (rate("penstock_accepts_failed_total", INSTANCE), "not accepted"),
                    (rate("penstock_connections_displaced_total", INSTANCE), "closed for others"),
                ),
                panel(
                    "Quota store",
                    "short",
                    "1 while Redis can be asked; 0 too where quotas are counted in memory.",
                    (f"{GATEWAY}quota_store_up{{{INSTANCE}}}", "{{instance}}"),
                ),
                panel(
                    "Decisions without the store",
                    "reqps",
                    "What became of requests while Redis did not answer, and the calls that failed.",
                    (rate(f"{GATEWAY}quota_without_store_total", INSTANCE), "without"),
                    (rate(f"{GATEWAY}quota_store_failures_total", INSTANCE, "call"), "{{call}} failed"),
                ),
                panel(
                    "Billing lines",
                    "short",
                    "Lines per second by what became of them, posts by how they were answered, lines that "
                    "are not in the file yet, and bytes that the webhook has not taken.",
                    (rate(f"{GATEWAY}billing_lines_total", INSTANCE, "outcome"), "{{outcome}}"),
                    (rate(f"{GATEWAY}billing_posts_total", INSTANCE, "outcome"), "posts {{outcome}}"),
                    (f"sum ({GATEWAY}billing_queued_lines{{{INSTANCE}}})", "lines that wait"),
                    (f"sum ({GATEWAY}billing_waiting_bytes{{{INSTANCE}}})", "bytes that wait"),
                ),
                panel(
                    "Stored responses",
                    "reqps",
                    "Responses that were to be kept, by what became of that, and those that went before "
                    "their time. unavailable: Redis did not answer.",
                    (rate(f"{GATEWAY}responses_kept_total", INSTANCE, "outcome"), "{{outcome}}"),
                    (rate(f"{GATEWAY}responses_evicted_total", INSTANCE), "evicted"),
                ),
                panel(
                    "Bytes of stored responses",
                    "bytes",
                    "Bytes per second that were kept, and those that gateways hold in memory.",
                    (rate(f"{GATEWAY}responses_kept_bytes_total", INSTANCE), "kept per second"),
                    (f"sum ({GATEWAY}responses_held_bytes{{{INSTANCE}}})", "held"),
                ),
            ),
        ),
        (
            "Who calls",
            (
                panel(
                    "TLS handshakes that failed",
                    "cps",
                    "By the reason, on every listener: gateway/README.md says what each means. left and late "
                    "are of whoever looks for ports, too; a client that refuses our certificate is in other.",
                    (rate("penstock_handshakes_failed_total", INSTANCE, "reason"), "{{reason}}"),
                    is_stacked=True,
                ),
                panel(
                    "Directory in Redis",
                    "short",
                    "1 while keys and tenants in Redis can be followed, at the gateway that is worst off; "
                    "entries that cannot be read, per second.",
                    (f"min ({GATEWAY}directory_up{{{INSTANCE}}})", "followed"),
                    (
                        rate(f"{GATEWAY}directory_entries_refused_total", INSTANCE, "kind"),
                        "{{kind}} refused",
                    ),
                ),
                panel(
                    "Issuers' keys",
                    "cps",
                    "Reads of issuers' keys, and tokens whose key was not known, by what came of them.",
                    (
                        rate(f"{GATEWAY}key_fetches_total", INSTANCE, "issuer, outcome"),
                        "{{issuer}} read {{outcome}}",
                    ),
                    (
                        rate(f"{GATEWAY}keys_sought_total", INSTANCE, "issuer, outcome"),
                        "{{issuer}} sought {{outcome}}",
                    ),
                ),
                panel(
                    "Workers",
                    "short",
                    "Where a gateway has several, by their phase: paused ones have died again and again.",
                    (f"sum by (phase) ({GATEWAY}workers{{{INSTANCE}}})", "{{phase}}"),
                ),
                panel(
                    "Workers that ended",
                    "cps",
                    "Without being told to, by the reason. Their connections broke.",
                    (rate(f"{GATEWAY}worker_deaths_total", INSTANCE, "reason"), "{{reason}}"),
                ),
                panel(
                    "Spans",
                    "cps",
                    "Those that a collector took, that it did not take, and that found the queue full.",
                    (rate("penstock_spans_total", INSTANCE, "outcome"), "{{outcome}}"),
                ),
            ),
        ),
    ),
)

DASHBOARDS: Final = {"experience": EXPERIENCE, "gateway": GATEWAYS, "fleet": FLEET, "engine": ENGINES}
"""By the names of their files."""
