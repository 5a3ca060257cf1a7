#!/usr/bin/env bash
# tests/ship/kube.sh: holds the chart against real API servers of Kubernetes, and says what was seen.
#
#     KUBE_SERVERS   folder with ready-made servers and their `start`; without it tests/ship/kube_servers.sh builds
#                    them into ~/.cache/penstock/kube, which takes 12 minutes of CPU
#     KUBE_CRDS      folders with definitions of custom resources, with colons between
#     PYTHON         what runs it; needs httpx and PyYAML
#     KUBE_PORT      the first of seven ports on loopback
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
built="${XDG_CACHE_HOME:-$HOME/.cache}/penstock/kube"
servers="${KUBE_SERVERS:-$built}"
[ -x "$servers/start" ] || tests/ship/kube_servers.sh "$built"
state="$(mktemp -d)"
"$servers/start" "$state" "${KUBE_PORT:-22379}" >"$state.log" 2>&1 &
starter=$!
trap 'kill $starter 2>/dev/null; wait $starter 2>/dev/null || true; rm -rf "$state" "$state.log"' EXIT
for _ in $(seq 180); do
    grep -q '^ready:' "$state.log" && break
    kill -0 $starter 2>/dev/null || { cat "$state.log" >&2; exit 1; }
    sleep 1
done
crds=()
IFS=: read -ra folders <<<"${KUBE_CRDS:-}"
for folder in "${folders[@]}"; do crds+=(--crds "$folder"); done
"$python" -m tests.ship.kube "$state" "${crds[@]}" "$@"
