"""The alert rules. Each has a line of what it means and what to do, series for which it fires, and series
like them for which it does not.

Rules:

1. A rule is about what users get, or about what takes it away within the hour. What can wait has severity
   `ticket`, the rest `page`.
2. No rule uses the label `job`: whoever scrapes gives it its own name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from helm.make.boards.scope import by_place

GATEWAY: Final = "penstock_gateway_"
ENGINE: Final = "penstock_engine_"
MINUTES: Final = 40
"""Every test looks at the end of so many minutes."""


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule, its runbook, and its proof."""

    name: str
    expr: str
    for_: str
    severity: str
    summary: str
    action: str
    """What it means, and what to do."""
    fires: dict[str, str]
    """Series in promtool's notation, by their names, for which it fires."""
    quiet: dict[str, str]
    """Those for which it does not."""


def grows(by: int) -> str:
    """A counter that grows by so much in a minute."""
    return f"0+{by}x{MINUTES}"


def stays(at: float) -> str:
    return f"{at:g}x{MINUTES}"


_REQUESTS: Final = f'{GATEWAY}requests_total{{model="m",tenant="t",endpoint="e",status="%s",end_reason="%s"}}'
_OK: Final = _REQUESTS % (200, "ok")
_FAILED: Final = _REQUESTS % (502, "upstream_failed")
_TURNED_AWAY: Final = _REQUESTS % (503, "refused")
_HASTY: Final = (_REQUESTS % (504, "queue_timeout"), _REQUESTS % (504, "request_timeout"))
"""Requests that ended by their callers' own deadlines."""
_FIRST: Final = f'{GATEWAY}first_byte_seconds_bucket{{model="m",stream="True",le="%s"}}'
_GAP: Final = f'{ENGINE}time_per_output_token_seconds_bucket{{instance="e",le="%s"}}'
_MEMBERS: Final = f'{GATEWAY}members{{model="m",phase="%s",instance="%s"}}'
_AGE: Final = f'{ENGINE}class_waiting_age_seconds{{service_class="default",instance="e"}}'
_PREEMPTED: Final = f'{ENGINE}preemptions_total{{kind="pages",instance="e"}}'
_YIELDED: Final = f'{ENGINE}preemptions_total{{kind="yield",instance="e"}}'
_UP: Final = f'{GATEWAY}quota_store_up{{instance="g"}}'
_FAILURES: Final = f'{GATEWAY}quota_store_failures_total{{call="reserve",instance="g"}}'
_FOLLOWED: Final = f'{GATEWAY}directory_up{{instance="g"}}'
_FETCHED: Final = f'{GATEWAY}key_fetches_total{{issuer="i",outcome="%s",instance="g"}}'
_REFUSED: Final = 'penstock_handshakes_failed_total{reason="%s",instance="g"}'
_DISCOVERED: Final = f'{GATEWAY}discovery_%s{{model="m",instance="g"}}'
_BUILD: Final = 'penstock_build_info{version="%s",instance="%s"}'
_RETRY: Final = f'{GATEWAY}retries_total{{kind="%s",instance="g"}}'

ALERTS: Final = (
    Alert(
        "PenstockRequestsFail",
        f'sum by (model) (rate({GATEWAY}requests_total{{status=~"5..",'
        f'end_reason!~"queue_timeout|request_timeout|refused"}}[5m])) '
        f"/ sum by (model) (rate({GATEWAY}requests_total[5m])) > 0.01",
        "5m",
        "page",
        "More than 1 % of the requests for {{ $labels.model }} fail on our side.",
        "`Ends` on the experience dashboard says how they end. `engine_failed` and `upstream_*`: look at the "
        "fleet dashboard for members that are ejected or gone. What callers bring about by deadlines of "
        "their own, or by more requests than there is room for, does not count. "
        "One request: `penstock trace ID --logs` with both services' logs.",
        {_OK: grows(100), _FAILED: grows(2)},
        {_OK: grows(300), _FAILED: grows(2), _TURNED_AWAY: grows(90), **dict.fromkeys(_HASTY, grows(90))},
    ),
    Alert(
        "PenstockRequestsRefused",
        f'sum by (model) (rate({GATEWAY}requests_total{{status=~"5..",end_reason="refused"}}[15m])) '
        f"/ sum by (model) (rate({GATEWAY}requests_total[15m])) > 0.05",
        "15m",
        "ticket",
        "More than 5 % of the requests for {{ $labels.model }} find no room.",
        "`Ends` on the experience dashboard says whose: of one tenant, its share is full, and its quotas are "
        "more than it can have. Of all, queues are full (`Waiting sequences` on the fleet dashboard): add "
        "replicas, or lower quotas.",
        {_OK: grows(100), _TURNED_AWAY: grows(10)},
        {_OK: grows(100), _FAILED: grows(10), _TURNED_AWAY: grows(4)},
    ),
    Alert(
        "PenstockFirstByteSlow",
        "histogram_quantile(0.99, sum by (model, le) "
        f'(rate({GATEWAY}first_byte_seconds_bucket{{stream="True"}}[10m]))) > 10',
        "10m",
        "page",
        "Streams of {{ $labels.model }} wait more than 10 s for their first byte (p99).",
        "`Longest wait, by class` on the engine dashboard: a queue means too few replicas for the prompts "
        "that come. No queue: `Time in each stage` on the gateway dashboard names the stage.",
        {_FIRST % "10": grows(90), _FIRST % "30": grows(100), _FIRST % "+Inf": grows(100)},
        {_FIRST % "10": grows(100), _FIRST % "30": grows(100), _FIRST % "+Inf": grows(100)},
    ),
    Alert(
        "PenstockTokensSlow",
        "histogram_quantile(0.95, sum by (instance, le) "
        f"(rate({ENGINE}time_per_output_token_seconds_bucket[10m]))) > 0.25",
        "10m",
        "ticket",
        "Streams of {{ $labels.instance }} get a token every 0.25 s or less often (p95).",
        "`Time of a step` and `Running`: many sequences make long steps. Lower --max-num-seqs or "
        "--gap-target-ms, or add replicas. `Event loop`: the host is short of processors.",
        {_GAP % "0.25": grows(90), _GAP % "0.5": grows(100), _GAP % "+Inf": grows(100)},
        {_GAP % "0.25": grows(100), _GAP % "0.5": grows(100), _GAP % "+Inf": grows(100)},
    ),
    Alert(
        "PenstockNoMember",
        f'min by (model) (sum by (model, instance) ({GATEWAY}members{{phase="ready"}})) == 0 '
        f'or (sum by (model) ({GATEWAY}members) unless sum by (model) ({GATEWAY}members{{phase="ready"}}))',
        "2m",
        "page",
        "No replica of {{ $labels.model }} is ready.",
        "Pods that are not ready say why at `/readyz` of the probe port. None there: look at the autoscaler "
        "and at the nodes. Ready pods: `Discovery that failed` on the fleet dashboard, and the gateway's log "
        "lines `discovery.down`; `GET /admin/v1/replicas` says what it knows.",
        {_MEMBERS % ("joining", "g"): stays(2), _MEMBERS % ("ready", "g"): stays(0)},
        {_MEMBERS % ("joining", "g"): stays(2), _MEMBERS % ("ready", "g"): stays(1)},
    ),
    Alert(
        "PenstockEngineNotReady",
        f"{ENGINE}ready == 0",
        "15m",
        "ticket",
        "{{ $labels.instance }} has taken no requests for 15 minutes.",
        "It loads, drains, or has failed: `/readyz` of its probe port and the last lines of its log say "
        "which. Large models need --startup-timeout-s.",
        {f'{ENGINE}ready{{instance="e"}}': stays(0)},
        {f'{ENGINE}ready{{instance="e"}}': stays(1)},
    ),
    Alert(
        "PenstockReplicasEjected",
        f"sum by (reason) (increase({GATEWAY}ejections_total[15m])) > 5",
        "0m",
        "ticket",
        "Replicas are ejected again and again: {{ $labels.reason }}.",
        "`Failed attempts` on the fleet dashboard, by replica and error. A replica that is ejected for its "
        "streams' breaks answers its probes: restart it, and keep its log.",
        {f'{GATEWAY}ejections_total{{reason="r",instance="g"}}': grows(1)},
        {f'{GATEWAY}ejections_total{{reason="r",instance="g"}}': stays(7)},
    ),
    Alert(
        "PenstockRetriesRefused",
        f'sum (rate({GATEWAY}retries_total{{kind="refused"}}[5m])) > 0.1',
        "5m",
        "page",
        "So many requests fail at replicas that further attempts are refused.",
        "The budget of retries is used up: most replicas fail. See PenstockRequestsFail and "
        "PenstockNoMember.",
        {_RETRY % "refused": grows(30)},
        {_RETRY % "repeated": grows(30), _RETRY % "refused": grows(1)},
    ),
    Alert(
        "PenstockQueueOld",
        f'max by (instance) ({ENGINE}class_waiting_age_seconds{{service_class!="flex"}}) > 30',
        "5m",
        "page",
        "A request has waited for more than 30 s at {{ $labels.instance }}.",
        "All replicas: too few of them. One replica: it is slow (`Time of a step`) or gets more than its "
        "share (`Waiting prompt tokens` on the fleet dashboard). Class flex may wait, and does not count.",
        {_AGE: stays(45)},
        {_AGE.replace("default", "flex"): stays(45), _AGE: stays(5)},
    ),
    Alert(
        "PenstockPreempting",
        f'sum by (instance) (rate({ENGINE}preemptions_total{{kind!="yield"}}[10m])) > 1',
        "10m",
        "ticket",
        "{{ $labels.instance }} takes pages from more than one sequence a second.",
        "The KV cache is too small for what runs. Give --kv-cache-memory more, lower --max-num-seqs or "
        "--max-model-len, use fp8 keys and values on a GPU, or add replicas.",
        {_PREEMPTED: grows(120)},
        {_PREEMPTED: grows(30), _YIELDED: grows(600)},
    ),
    Alert(
        "PenstockQuotaStoreDown",
        f"({GATEWAY}quota_store_up == 0 and max_over_time({GATEWAY}quota_store_up[6h]) == 1) "
        f"or sum by (instance) (increase({GATEWAY}quota_store_failures_total[5m])) > 10",
        "1m",
        "page",
        "{{ $labels.instance }} cannot ask Redis about quotas.",
        "By [quotas] fail, requests are refused or counted by each gateway alone meanwhile. Look at Redis: "
        "memory (maxmemory with noeviction refuses writes), failover, network policy, password.",
        {_UP: f"1x10 0x{MINUTES}"},
        {_UP: stays(0), _FAILURES: stays(3)},
    ),
    Alert(
        "PenstockDirectoryDown",
        f"{GATEWAY}directory_up == 0",
        "5m",
        "page",
        "{{ $labels.instance }} cannot follow the keys and tenants in Redis.",
        "What was read last holds for directory.stale_s, then callers whose keys are in Redis get 503; a "
        "gateway that starts now is not ready. `directory.down` in the log says why. Look at Redis, and "
        "whether it has lost the directory: restore it.",
        {_FOLLOWED: stays(0)},
        {_FOLLOWED: stays(1)},
    ),
    Alert(
        "PenstockIssuerKeysNotRead",
        f'sum by (instance, issuer) (increase({GATEWAY}key_fetches_total{{outcome="failed"}}[15m])) > 2 '
        f'unless sum by (instance, issuer) (increase({GATEWAY}key_fetches_total{{outcome="ok"}}[15m])) > 0',
        "5m",
        "page",
        "{{ $labels.instance }} cannot read the keys of the issuer {{ $labels.issuer }}.",
        "Tokens are checked by the keys that were read last for the issuer's stale_s, then get 503. "
        "`keys.rejected` in the log says why: the issuer's key server, its certificate (ca), egress.",
        {_FETCHED % "failed": grows(12)},
        {_FETCHED % "failed": grows(12), _FETCHED % "ok": grows(1)},
    ),
    Alert(
        "PenstockRevocationListMissing",
        "sum by (instance) (increase(penstock_handshakes_failed_total"
        '{reason=~"no_revocation_list|revocation_list_expired"}[10m])) > 2',
        "0m",
        "page",
        "{{ $labels.instance }} refuses clients since an authority's revocation list is missing or old.",
        "All clients of that authority are refused. Renew the list in the file that crl names, which is read "
        "again when it changes. `listener.handshake_failed` in the log has a client's address.",
        {_REFUSED % "revocation_list_expired": grows(1)},
        {_REFUSED % "expired": grows(9), _REFUSED % "left": grows(99)},
    ),
    Alert(
        "PenstockDiscoveryOld",
        f"max by (instance, model) ({GATEWAY}discovery_age_seconds) > 900 "
        f"and sum by (instance, model) (increase({GATEWAY}discovery_failures_total[15m])) > 2",
        "0m",
        "ticket",
        "{{ $labels.instance }} has not learned the replicas of {{ $labels.model }} for 15 minutes.",
        "The members stay as they were: a new replica gets nothing, one that is gone is found out by its "
        "failures. `discovery.down` in the log says why: DNS, or the API server and the pod's account.",
        {_DISCOVERED % "age_seconds": stays(1200), _DISCOVERED % "failures_total": grows(6)},
        {_DISCOVERED % "age_seconds": stays(1200), _DISCOVERED % "failures_total": stays(9)},
    ),
    Alert(
        "PenstockWorkersEnd",
        f"sum by (instance) (increase({GATEWAY}worker_deaths_total[15m])) > 2",
        "0m",
        "ticket",
        "Workers of {{ $labels.instance }} end again and again.",
        "Each takes its connections with it. `Workers that ended` on the gateway dashboard has the reason; a "
        "worker that was killed has most often met the limit of memory.",
        {f'{GATEWAY}worker_deaths_total{{reason="r",instance="g"}}': grows(1)},
        {f'{GATEWAY}worker_deaths_total{{reason="r",instance="g"}}': stays(5)},
    ),
    Alert(
        "PenstockGatewayStalls",
        "max by (instance) (penstock_loop_lag_max_seconds) > 0.5",
        "10m",
        "ticket",
        "The event loop of {{ $labels.instance }} is held up for more than 0.5 s again and again.",
        "The process is short of processors: raise its limit, add gateways or workers, and look for a "
        "neighbour on the node that takes them.",
        {'penstock_loop_lag_max_seconds{instance="g"}': stays(0.8)},
        {'penstock_loop_lag_max_seconds{instance="g"}': f"0.8 0.01x{MINUTES}"},
    ),
    Alert(
        "PenstockConnectionsCut",
        f"sum by (instance) (increase({GATEWAY}connections_cut_total[10m])) > 20",
        "0m",
        "ticket",
        "{{ $labels.instance }} closes client connections, as too many are open.",
        "Clients that open connections and send nothing, or more clients than limits.connections_max. A "
        "load balancer in front can bound connections by address.",
        {f'{GATEWAY}connections_cut_total{{instance="g"}}': grows(5)},
        {f'{GATEWAY}connections_cut_total{{instance="g"}}': grows(1)},
    ),
    Alert(
        "PenstockAcceptsFail",
        "sum by (instance) (increase(penstock_accepts_failed_total[10m])) > 5",
        "0m",
        "ticket",
        "{{ $labels.instance }} cannot accept connections: it may open no more files.",
        "Its hard bound on open files (ulimit -Hn, LimitNOFILE) is too low for its connections, all of which "
        "have a request; a gateway says so at its start (`gateway.descriptors_few`).",
        {'penstock_accepts_failed_total{instance="g"}': grows(5)},
        {'penstock_accepts_failed_total{instance="g"}': "0x60"},
    ),
    Alert(
        "PenstockBillingLost",
        f'sum by (instance) (increase({GATEWAY}billing_lines_total{{outcome="dropped"}}[10m])) > 0',
        "0m",
        "page",
        "{{ $labels.instance }} drops billing lines.",
        "The spool is full (accounting.spool_max), or its file cannot be written. `Billing lines` on the "
        "gateway dashboard: does the webhook take them? Lost lines are still in the request log.",
        {f'{GATEWAY}billing_lines_total{{outcome="dropped",instance="g"}}': grows(2)},
        {f'{GATEWAY}billing_lines_total{{outcome="written",instance="g"}}': grows(2)},
    ),
    Alert(
        "PenstockVersionsMixed",
        "count (count by (version) (penstock_build_info)) > 1",
        "2h",
        "ticket",
        "Processes have been of several versions for two hours.",
        "A rollout has stopped half way: `kubectl rollout status`. Ranks of one model refuse each "
        "other then.",
        {_BUILD % ("1", "a"): f"1x{MINUTES + 140}", _BUILD % ("2", "b"): f"1x{MINUTES + 140}"},
        {_BUILD % ("1", "a"): f"1x{MINUTES + 140}", _BUILD % ("1", "b"): f"1x{MINUTES + 140}"},
    ),
)


def rules() -> dict[str, Any]:
    """The file of rules, as Prometheus reads it, and the `spec` of a PrometheusRule."""
    return {"groups": [{"name": "penstock", "rules": [_rule(alert) for alert in ALERTS]}]}


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": by_place(alert.expr),
        "for": alert.for_,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "runbook": f"RUNBOOK.md#{alert.name.lower()}"},
    }


def proofs(rule_file: str) -> dict[str, Any]:
    """promtool's unit tests: each rule fires for its series, and not for those beside them."""
    cases = [
        (alert, series, count) for alert in ALERTS for series, count in ((alert.fires, 1), (alert.quiet, 0))
    ]
    return {
        "rule_files": [rule_file],
        "evaluation_interval": "1m",
        "tests": [_proof(alert, series, count) for alert, series, count in cases],
    }


def _proof(alert: Alert, series: dict[str, str], count: int) -> dict[str, Any]:
    firing = f'count(ALERTS{{alertname="{alert.name}", alertstate="firing"}})'
    at = MINUTES + 130 if alert.for_ == "2h" else MINUTES - 1
    return {
        "name": f"{alert.name}, {'fires' if count else 'quiet'}",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": firing,
                "eval_time": f"{at}m",
                "exp_samples": [{"labels": "{}", "value": 1}] if count else [],
            }
        ],
    }


def runbook() -> str:
    """A section for each alert."""
    head = (
        "# Runbook\n\nWhat each alert of `alerts/penstock.yaml` means, and what to do. `page`: now. "
        "`ticket`: today.\n"
    )
    sections = [f"\n## {one.name}\n\n{one.severity}, for {one.for_}. {one.action}\n" for one in ALERTS]
    return head + "".join(sections)
