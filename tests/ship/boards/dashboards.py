"""The four dashboards, from the outside in: what users get, the gateway, the fleet, the engines.

Labels that only Prometheus adds are `instance` and no others, so that the dashboards work wherever it runs.
"""

from __future__ import annotations

from typing import Final

from tests.ship.boards.panels import Dashboard, Variable, panel, quantiles

_RATE: Final = "[$__rate_interval]"
_OF: Final = 'model=~"$model", tenant=~"$tenant"'
_MODEL: Final = 'model=~"$model"'
_INSTANCE: Final = 'instance=~"$instance"'
GATEWAY: Final = "penstock_gateway_"
ENGINE: Final = "penstock_engine_"


def rate(name: str, matchers: str = "", by: str = "") -> str:
    """The rate of a counter, added up by a label."""
    group = f"sum by ({by})" if by else "sum"
    return f"{group} (rate({name}{{{matchers}}}{_RATE}))"


def share(part: str, whole: str) -> str:
    """A share, and nothing where there is nothing to share."""
    return f"{part} / ({whole} > 0)"


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
                    (rate(REQUESTS, _OF, "status"), "{{status}}"),
                    is_stacked=True,
                ),
                panel(
                    "Share that failed",
                    "percentunit",
                    "Answers with a status of 500 or above: ours, not the caller's.",
                    (share(rate(REQUESTS, f'{_OF}, status=~"5.."'), rate(REQUESTS, _OF)), "failed"),
                ),
                panel(
                    "Ends",
                    "reqps",
                    "Requests by end_reason, without ok: gateway/README.md says what each means.",
                    (rate(REQUESTS, f'{_OF}, end_reason!="ok"', "end_reason"), "{{end_reason}}"),
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
                    *quantiles(f"{GATEWAY}first_byte_seconds", f'{_MODEL}, stream="True"'),
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
                    *quantiles(f"{GATEWAY}request_seconds", _MODEL),
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
                    (rate(f"{GATEWAY}tokens_total", _OF, "kind"), "{{kind}}"),
                ),
                panel(
                    "Tokens by tenant",
                    "short",
                    "The ten tenants with the most tokens per second.",
                    (f"topk(10, {rate(f'{GATEWAY}tokens_total', _OF, 'tenant')})", "{{tenant}}"),
                    is_stacked=True,
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
                    (f"{GATEWAY}requests_in_flight{{{_INSTANCE}}}", "{{instance}}"),
                ),
                panel(
                    "Memory of requests",
                    "bytes",
                    "Of request_memory, what bodies, prompts and answers hold. Beyond it requests get 503.",
                    (f"{GATEWAY}held_bytes{{{_INSTANCE}}}", "{{instance}}"),
                ),
                panel(
                    "Streams to engines",
                    "short",
                    "HTTP/2 streams that are open.",
                    (f"{GATEWAY}http2_streams{{{_INSTANCE}}}", "{{instance}}"),
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
                        f"{{{_STAGES}, {_INSTANCE}}}{_RATE})))",
                        "{{stage}}",
                    ),
                ),
                panel(
                    "Busy time by stage",
                    "s",
                    "Seconds of requests' time per second, by stage: where requests are.",
                    (rate("penstock_stage_seconds_sum", f"{_STAGES}, {_INSTANCE}", "stage"), "{{stage}}"),
                    is_stacked=True,
                ),
                panel(
                    "Event loop",
                    "s",
                    "The longest time that the loop was held up between two scrapes. All requests waited.",
                    (f"penstock_loop_lag_max_seconds{{{_INSTANCE}}}", "{{instance}}"),
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
                        f"sum by (instance) (rate(process_cpu_seconds_total{{{_INSTANCE}}}{_RATE}))",
                        "{{instance}}",
                    ),
                ),
                panel(
                    "Memory",
                    "bytes",
                    "Resident memory. gateway/README.md has the formula of its bound.",
                    (f"sum by (instance) (process_resident_memory_bytes{{{_INSTANCE}}})", "{{instance}}"),
                ),
                panel(
                    "Connections cut",
                    "cps",
                    "Client connections closed because too many were open, or held something; and how often "
                    "none could be accepted, as the process may open no more files.",
                    (rate(f"{GATEWAY}connections_cut_total", _INSTANCE), "cut"),
                    (rate("penstock_accepts_failed_total", _INSTANCE), "not accepted"),
                ),
                panel(
                    "Quota store",
                    "short",
                    "1 while Redis can be asked; 0 too where quotas are counted in memory.",
                    (f"{GATEWAY}quota_store_up{{{_INSTANCE}}}", "{{instance}}"),
                ),
                panel(
                    "Decisions without the store",
                    "reqps",
                    "What became of requests while Redis did not answer, and the calls that failed.",
                    (rate(f"{GATEWAY}quota_without_store_total", _INSTANCE), "without"),
                    (rate(f"{GATEWAY}quota_store_failures_total", _INSTANCE, "call"), "{{call}} failed"),
                ),
                panel(
                    "Billing lines",
                    "short",
                    "Lines per second by what became of them, and bytes that the webhook has not taken.",
                    (rate(f"{GATEWAY}billing_lines_total", _INSTANCE, "outcome"), "{{outcome}}"),
                    (f"sum ({GATEWAY}billing_waiting_bytes{{{_INSTANCE}}})", "bytes that wait"),
                ),
            ),
        ),
    ),
)

FLEET: Final = Dashboard(
    "penstock-fleet",
    "Penstock: the fleet",
    (Variable("model", f"{GATEWAY}members"),),
    (
        (
            "Members",
            (
                panel(
                    "Members by phase",
                    "short",
                    "As the gateway with the fewest sees them.",
                    (f"min by (model, phase) ({GATEWAY}members{{{_MODEL}}})", "{{model}} {{phase}}"),
                ),
                panel(
                    "Engines ready",
                    "short",
                    "Engines that take requests, by their own word.",
                    (f"sum ({ENGINE}ready)", "ready"),
                    (f"count ({ENGINE}ready)", "all"),
                ),
                panel(
                    "Ejections",
                    "cps",
                    "Replicas left alone for a time, by the reason, and those that work again.",
                    (rate(f"{GATEWAY}ejections_total", "", "reason"), "{{reason}}"),
                    (rate(f"{GATEWAY}ejections_ended_total"), "returned"),
                ),
            ),
        ),
        (
            "Routing",
            (
                panel(
                    "Choices",
                    "reqps",
                    "Choices of a replica by their reason.",
                    (rate(f"{GATEWAY}routes_total", "", "route"), "{{route}}"),
                    is_stacked=True,
                ),
                panel(
                    "Requests by replica",
                    "reqps",
                    "Dispatches that had a connection.",
                    (
                        rate(f"{GATEWAY}upstream_attempts_total", 'outcome="connected"', "replica"),
                        "{{replica}}",
                    ),
                ),
                panel(
                    "Failed attempts and retries",
                    "reqps",
                    "Attempts after which another may follow, by the error; retries, and those refused.",
                    (
                        rate(f"{GATEWAY}upstream_attempts_total", 'outcome!="connected"', "outcome"),
                        "{{outcome}}",
                    ),
                    (rate(f"{GATEWAY}retries_total", "", "kind"), "retry {{kind}}"),
                ),
            ),
        ),
        (
            "Balance",
            (
                panel(
                    "Waiting sequences",
                    "short",
                    "At each engine.",
                    (f"{ENGINE}queue_depth", "{{instance}}"),
                ),
                panel(
                    "Waiting prompt tokens",
                    "short",
                    "The load that routing goes by.",
                    (f"{ENGINE}waiting_tokens", "{{instance}}"),
                ),
                panel(
                    "Prompt tokens found cached",
                    "percentunit",
                    "Of the prompt tokens that were looked up, at each engine.",
                    (
                        share(
                            rate(f"{ENGINE}prefix_hit_tokens_total", "", "instance"),
                            rate(f"{ENGINE}prefix_query_tokens_total", "", "instance"),
                        ),
                        "{{instance}}",
                    ),
                    most=1.0,
                ),
                panel(
                    "Versions",
                    "short",
                    "Processes by version.",
                    ("count by (version) (penstock_build_info)", "{{version}}"),
                ),
            ),
        ),
    ),
)

ENGINES: Final = Dashboard(
    "penstock-engine",
    "Penstock: engines",
    (Variable("instance", f"{ENGINE}ready"),),
    (
        (
            "Steps",
            (
                panel(
                    "Time of a step",
                    "s",
                    "Of the runner. It is the gap that streams see.",
                    *quantiles(f"{ENGINE}step_seconds", _INSTANCE),
                ),
                panel(
                    "Use of a step's tokens",
                    "percentunit",
                    "Of the tokens that a step may compute (--max-step-tokens), those that it did.",
                    *quantiles(f"{ENGINE}step_budget_use", _INSTANCE),
                    most=1.0,
                ),
                panel(
                    "Tokens",
                    "short",
                    "Prompt tokens taken and tokens sampled, per second.",
                    (rate(f"{ENGINE}prompt_tokens_total", _INSTANCE, "instance"), "{{instance}} prompt"),
                    (rate(f"{ENGINE}generated_tokens_total", _INSTANCE, "instance"), "{{instance}} sampled"),
                ),
            ),
        ),
        (
            "Sequences",
            (
                panel(
                    "Running",
                    "short",
                    "Sequences that hold a slot, and of these, those whose client does not read.",
                    (f"{ENGINE}running_sequences{{{_INSTANCE}}}", "{{instance}} running"),
                    (f"{ENGINE}stalled_sequences{{{_INSTANCE}}}", "{{instance}} stalled"),
                ),
                panel(
                    "Waiting, by class",
                    "short",
                    "Sequences that wait for a slot.",
                    (
                        f"sum by (service_class) ({ENGINE}class_waiting{{{_INSTANCE}}})",
                        "{{service_class}}",
                    ),
                    is_stacked=True,
                ),
                panel(
                    "Longest wait, by class",
                    "s",
                    "Of those that wait now.",
                    (
                        f"max by (service_class) ({ENGINE}class_waiting_age_seconds{{{_INSTANCE}}})",
                        "{{service_class}}",
                    ),
                ),
                panel(
                    "Time in the queue",
                    "s",
                    "Until the first admission.",
                    *quantiles(f"{ENGINE}queue_seconds", _INSTANCE),
                ),
                panel(
                    "Time to the first token",
                    "s",
                    "From the head of the request.",
                    *quantiles(f"{ENGINE}time_to_first_token_seconds", _INSTANCE),
                ),
                panel(
                    "Ends",
                    "reqps",
                    "Requests, by how they ended.",
                    (rate(f"{ENGINE}requests_total", _INSTANCE, "end_reason"), "{{end_reason}}"),
                    is_stacked=True,
                ),
            ),
        ),
        (
            "Memory",
            (
                panel(
                    "KV cache",
                    "percentunit",
                    "Pages that sequences hold, and that hold prefixes to be found again.",
                    (
                        f'sum by (instance, state) ({ENGINE}kv_pages{{{_INSTANCE}, state!="free"}}) '
                        f"/ on (instance) group_left sum by (instance) ({ENGINE}kv_pages{{{_INSTANCE}}})",
                        "{{instance}} {{state}}",
                    ),
                    most=1.0,
                ),
                panel(
                    "Preemptions",
                    "cps",
                    "Sequences that gave up their pages, to be computed again or copied to host memory, or a "
                    "slot alone.",
                    (rate(f"{ENGINE}preemptions_total", _INSTANCE, "kind"), "{{kind}}"),
                    (rate(f"{ENGINE}swaps_in_total", _INSTANCE), "came back"),
                ),
                panel(
                    "Copied to host memory and back",
                    "Bps",
                    "Pages of preempted sequences.",
                    (rate(f"{ENGINE}swapped_bytes_total", _INSTANCE, "direction"), "{{direction}}"),
                ),
                panel(
                    "Memory of requests",
                    "bytes",
                    "Of --request-memory, what requests hold in the API process.",
                    (f"{ENGINE}held_bytes{{{_INSTANCE}}}", "{{instance}}"),
                ),
                panel(
                    "Pages in host memory",
                    "short",
                    "Free and used.",
                    (
                        f"sum by (instance, state) ({ENGINE}host_pages{{{_INSTANCE}}})",
                        "{{instance}} {{state}}",
                    ),
                ),
                panel(
                    "Event loop of the API process",
                    "s",
                    "The longest time that it was held up between two scrapes.",
                    (f"penstock_loop_lag_max_seconds{{{_INSTANCE}}}", "{{instance}}"),
                ),
                panel(
                    "Connections not accepted",
                    "cps",
                    "How often none could be, as the process may open no more files.",
                    (rate("penstock_accepts_failed_total", _INSTANCE), "not accepted"),
                ),
            ),
        ),
    ),
)

DASHBOARDS: Final = {"experience": EXPERIENCE, "gateway": GATEWAYS, "fleet": FLEET, "engine": ENGINES}
"""By the names of their files."""
