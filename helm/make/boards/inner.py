"""The dashboards of what stands behind the gateways: the fleet, and the engines."""

from __future__ import annotations

from typing import Final

from helm.make.boards.panels import Dashboard, Variable, panel, quantiles
from helm.make.boards.queries import ENGINE, GATEWAY, INSTANCE, MODEL, rate, share

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
                    (f"min by (model, phase) ({GATEWAY}members{{{MODEL}}})", "{{model}} {{phase}}"),
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
                panel(
                    "Discovery",
                    "s",
                    "How long ago the members were last confirmed, at the gateway that heard of it last.",
                    (f"max by (model) ({GATEWAY}discovery_age_seconds{{{MODEL}}})", "{{model}}"),
                ),
                panel(
                    "Discovery that failed",
                    "cps",
                    "Attempts to learn the members. They stay as they were meanwhile.",
                    (rate(f"{GATEWAY}discovery_failures_total", MODEL, "model"), "{{model}}"),
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
                    *quantiles(f"{ENGINE}step_seconds", INSTANCE),
                ),
                panel(
                    "Use of a step's tokens",
                    "percentunit",
                    "Of the tokens that a step may compute (--max-step-tokens), those that it did.",
                    *quantiles(f"{ENGINE}step_budget_use", INSTANCE),
                    most=1.0,
                ),
                panel(
                    "Tokens",
                    "short",
                    "Prompt tokens taken and tokens sampled, per second.",
                    (rate(f"{ENGINE}prompt_tokens_total", INSTANCE, "instance"), "{{instance}} prompt"),
                    (rate(f"{ENGINE}generated_tokens_total", INSTANCE, "instance"), "{{instance}} sampled"),
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
                    (f"{ENGINE}running_sequences{{{INSTANCE}}}", "{{instance}} running"),
                    (f"{ENGINE}stalled_sequences{{{INSTANCE}}}", "{{instance}} stalled"),
                ),
                panel(
                    "Waiting, by class",
                    "short",
                    "Sequences that wait for a slot.",
                    (
                        f"sum by (service_class) ({ENGINE}class_waiting{{{INSTANCE}}})",
                        "{{service_class}}",
                    ),
                    is_stacked=True,
                ),
                panel(
                    "Longest wait, by class",
                    "s",
                    "Of those that wait now.",
                    (
                        f"max by (service_class) ({ENGINE}class_waiting_age_seconds{{{INSTANCE}}})",
                        "{{service_class}}",
                    ),
                ),
                panel(
                    "Time in the queue",
                    "s",
                    "Until the first admission.",
                    *quantiles(f"{ENGINE}queue_seconds", INSTANCE),
                ),
                panel(
                    "Time to the first token",
                    "s",
                    "From the head of the request.",
                    *quantiles(f"{ENGINE}time_to_first_token_seconds", INSTANCE),
                ),
                panel(
                    "Ends",
                    "reqps",
                    "Requests, by how they ended.",
                    (rate(f"{ENGINE}requests_total", INSTANCE, "end_reason"), "{{end_reason}}"),
                    is_stacked=True,
                ),
            ),
        ),
        (
            "Reasoning, calls and grammars",
            (
                panel(
                    "Reasoning and calls",
                    "cps",
                    "Sampled tokens that are reasoning, and calls of functions in answers.",
                    (rate(f"{ENGINE}reasoning_tokens_total", INSTANCE, "instance"), "{{instance}} tokens"),
                    (rate(f"{ENGINE}calls_total", INSTANCE, "instance"), "{{instance}} calls"),
                ),
                panel(
                    "Requests with a grammar",
                    "reqps",
                    "By what asks for it, and those whose grammar could not be compiled.",
                    (rate(f"{ENGINE}grammar_requests_total", INSTANCE, "kind"), "{{kind}}"),
                    (rate(f"{ENGINE}grammars_refused_total", INSTANCE), "refused"),
                ),
                panel(
                    "Time of grammars in the core",
                    "s",
                    "Compiling a sequence's grammar and filling its masks, all of them together.",
                    *quantiles(f"{ENGINE}masks_seconds", INSTANCE),
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
                        f'sum by (instance, state) ({ENGINE}kv_pages{{{INSTANCE}, state!="free"}}) '
                        f"/ on (instance) group_left sum by (instance) ({ENGINE}kv_pages{{{INSTANCE}}})",
                        "{{instance}} {{state}}",
                    ),
                    most=1.0,
                ),
                panel(
                    "Preemptions",
                    "cps",
                    "Sequences that gave up their pages, to be computed again or copied to host memory, or a "
                    "slot alone.",
                    (rate(f"{ENGINE}preemptions_total", INSTANCE, "kind"), "{{kind}}"),
                    (rate(f"{ENGINE}swaps_in_total", INSTANCE), "came back"),
                ),
                panel(
                    "Copied to host memory and back",
                    "Bps",
                    "Pages of preempted sequences.",
                    (rate(f"{ENGINE}swapped_bytes_total", INSTANCE, "direction"), "{{direction}}"),
                ),
                panel(
                    "Memory of requests",
                    "bytes",
                    "Of --request-memory, what requests hold in the API process.",
                    (f"{ENGINE}held_bytes{{{INSTANCE}}}", "{{instance}}"),
                ),
                panel(
                    "Pages in host memory",
                    "short",
                    "Free and used.",
                    (
                        f"sum by (instance, state) ({ENGINE}host_pages{{{INSTANCE}}})",
                        "{{instance}} {{state}}",
                    ),
                ),
                panel(
                    "Event loop of the API process",
                    "s",
                    "The longest time that it was held up between two scrapes.",
                    (f"penstock_loop_lag_max_seconds{{{INSTANCE}}}", "{{instance}}"),
                ),
                panel(
                    "Connections not set up",
                    "cps",
                    "How often none could be accepted, as the process may open no more files; TLS handshakes "
                    "that failed, by the reason.",
                    (rate("penstock_accepts_failed_total", INSTANCE), "not accepted"),
                    (rate("penstock_connections_displaced_total", INSTANCE), "closed for others"),
                    (rate("penstock_handshakes_failed_total", INSTANCE, "reason"), "{{reason}}"),
                ),
                panel(
                    "Prompt tokens found cached, by tier",
                    "short",
                    "Tokens per second that were on the device, in host memory or on disk.",
                    (rate(f"{ENGINE}prefix_tier_tokens_total", INSTANCE, "tier"), "{{tier}}"),
                    is_stacked=True,
                ),
                panel(
                    "Pages on disk",
                    "short",
                    "Those that are there, and what happened to pages, per second.",
                    (f"sum by (instance) ({ENGINE}disk_pages{{{INSTANCE}}})", "{{instance}}"),
                    (rate(f"{ENGINE}disk_page_events_total", INSTANCE, "event"), "{{event}}"),
                ),
                panel(
                    "Tokens charged to nobody",
                    "short",
                    "Per second, by the reason: gateway/README.md says what each means.",
                    (rate(f"{ENGINE}uncharged_tokens_total", INSTANCE, "reason"), "{{reason}}"),
                ),
                panel(
                    "Drafts",
                    "short",
                    "Tokens per second that were guessed and verified. Each right one saved a step.",
                    (rate(f"{ENGINE}drafts_total", INSTANCE, "outcome"), "{{outcome}}"),
                ),
                panel(
                    "Snapshots of states",
                    "short",
                    "Places, what happened to snapshots per second, and prompt tokens per second that were "
                    "computed again for want of one.",
                    (
                        f"sum by (instance, state) ({ENGINE}state_places{{{INSTANCE}}})",
                        "{{instance}} {{state}}",
                    ),
                    (rate(f"{ENGINE}state_events_total", INSTANCE, "event"), "{{event}}"),
                    (rate(f"{ENGINE}prefix_stateless_tokens_total", INSTANCE), "computed again"),
                ),
            ),
        ),
    ),
)
