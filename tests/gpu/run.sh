#!/usr/bin/env bash
# Checks every kernel and the whole decoder on one NVIDIA GPU, and measures them against the card's own limits.
#
#   tests/gpu/run.sh [--out DIR] [PART...]
#
# Parts, in this order; all of them when none is named. Those that measure are the product's own
# (`penstock bench gpu`, engine/bench/gpu, where the floors are explained); those that check are here.
#
#   floors     measures what this card does at best: every share below is of that.
#   kernels    each kernel against the reference that the CPU's tests use, in fp32, fp16 and bf16; in float64
#              on the CPU where it is attention. Ragged rows, shuffled pages, NaN in all that nobody owns.
#   tokens     small random models of every family: tokens against transformers, greedy, in fp32; a decode
#              step as a graph against the same step eager, to the bit.
#   engine     the whole engine on small random models, from loading through the core's loop: tokens against
#              transformers, overlapped against plain under preemption, graphs against eager; launches that wait.
#   attention  measures paged decode attention alone, by every back end that is installed.
#   matmul     measures the library against our tiles.
#   steps      measures decode steps and prefills of true shapes; fp8 weights and KV against bf16.
#   ranks      what tensor-parallel ranks do together, over NCCL, eager and captured; where there are two cards,
#              small models on both against one.
#   whole      measures the whole engine: nano-vllm's benchmark beside transformers' continuous batching, the time
#              between decode graphs, start to ready of 8B. Writes 18 GB to TMPDIR, or where that is not set to
#              /dev/shm if it has room for twice as much, and removes them.
#   backends   every attention back end that is installed (FlashAttention, FlashInfer, cuDNN, torch), eager and
#              captured, as kernels does ours.
#
# Each part is a process of its own, or several that share its rows where it only checks. One that ends or hangs
# in a row is started again behind it: that row says how, and costs no other (engine/bench/gpu/supervise.py).
# Each part has a limit; what one does not use, later ones may, and all together take at most TOTAL_S, table
# included. Results go to DIR/gpu-<date>.jsonl (default DIR: tests/bench/results), one JSON object per line,
# written as soon as it is known; rows not measured say so, and a table is printed last, with what failed: how
# far off and where, which is meant to be enough to mend it.
#
# Needs python3 with torch >= 2.11, triton >= 3.6 and transformers, and what engine/runtime imports (msgspec,
# safetensors, numpy); the rows of `whole` that start an engine need all that serves (extra `engine`).
# WHEELS=DIR: wheels to use from there, for a machine that reaches no registry. Beside torch and transformers it
# mostly lacks these, which `pip download --no-deps --only-binary :all: --python-version 3.12 -c constraints.txt
# -d DIR msgspec structlog h2 hpack hyperframe pyzmq opentelemetry-api httpx` brings.
set -u
cd "$(dirname "$0")/../.." || exit 1

TOTAL_S=${TOTAL_S:-590}
TABLE_S=5
PARTS_ALL=(floors kernels tokens engine attention matmul steps ranks whole backends)
declare -A LIMIT_S=([floors]=30 [kernels]=110 [tokens]=35 [engine]=55 [attention]=40 [matmul]=45 [steps]=80
    [ranks]=15 [whole]=155 [backends]=20)
declare -A SHARES=([kernels]=7 [tokens]=4 [engine]=5 [backends]=3)
MEASURING=" floors attention matmul steps "

out=tests/bench/results
if [ "${1:-}" = --out ]; then out=$2; shift 2; fi
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=("${PARTS_ALL[@]}")
mkdir -p "$out"
results=$out/gpu-$(date +%F).jsonl
export PENSTOCK_GPU_RESULTS=$results PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

ROOM_KB=$((36 * 1000 * 1000))
if [ -z "${TMPDIR:-}" ] && [ "$(df --output=avail /dev/shm 2>/dev/null | tail -1)" -gt $ROOM_KB ] 2>/dev/null; then
    TMPDIR=/dev/shm
fi
TMPDIR=$(mktemp -d -p "${TMPDIR:-/tmp}") || exit 1
trap 'rm -rf "$TMPDIR"' EXIT # a part that is ended leaves what it wrote
export TMPDIR

if [ -n "${WHEELS:-}" ]; then
    site=$TMPDIR/wheels
    python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl || exit 1
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi

failed=0
ends=0
for part in "${parts[@]}"; do
    own=${LIMIT_S[$part]:-}
    if [ -z "$own" ]; then echo "no part is called $part" >&2; exit 2; fi
    ends=$((ends + own)) # what was left over is this part's
    limit=$((ends - SECONDS))
    left=$((TOTAL_S - TABLE_S - SECONDS))
    [ $limit -le $left ] || limit=$left
    if [ $limit -lt 5 ]; then echo "== $part: no time is left" >&2; failed=1; continue; fi
    echo "== $part (at most $limit s)"
    began=$(date +%s)
    case $MEASURING in
        *" $part "*) command=(engine.bench.gpu "$part") ;;
        *) command=("tests.gpu.$part") ;;
    esac
    python3 -m tests.gpu.part "$part" "$limit" "${SHARES[$part]:-1}" "${command[@]}"
    rc=$?
    printf '{"part": "%s", "row": "part", "rc": %d, "took_s": %d}\n' "$part" "$rc" $(($(date +%s) - began)) >>"$results"
    [ $rc -eq 0 ] || { echo "== $part failed: $rc" >&2; failed=1; }
done
python3 -m tests.gpu.table
exit $failed
