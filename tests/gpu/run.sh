#!/usr/bin/env bash
# Checks every kernel and the whole decoder on one NVIDIA GPU, and measures them against the card's own limits.
#
#   tests/gpu/run.sh [--out DIR] [--floors FILE] [--cache-in DIR] [--cache-out DIR] [PART...]
#
# Parts, in this order; all of them when none is named. Those that measure are the product's own
# (`python -m tests.bench gpu`, tests/bench/engine/gpu, where the floors are explained); those that check are here.
#
#   floors     measures what this card does at best: every share below is of that.
#   kernels    each kernel against the reference that the CPU's tests use, in fp32, fp16 and bf16; in float64
#              on the CPU where it is attention; delta nets token by token. Ragged rows, shuffled pages, NaN in
#              all that nobody owns. Tokens of rows that verify drafts, attention, delta nets and sampling.
#   steps      measures decode steps and prefills of true shapes; those with targets first, then overlapped
#              launches and measured splits, then fp8 KV and what else is compared. And sampling of flat rows,
#              and steps of 1, 8 and 32 streams that verify up to 8 drafts each.
#   tokens     small random models of every family: tokens against transformers, greedy, in fp32; a decode
#              step as a graph against the same step eager, to the bit.
#   engine     the whole engine on small random models, from loading through the core's loop: tokens against
#              transformers, overlapped against plain under preemption, graphs against eager, drafts against none,
#              prompts that go on from snapshots of states against cold ones; an MTP layer's guesses against torch's;
#              launches that wait.
#   attention  measures paged decode attention alone, by every back end that is installed, and delta nets.
#   whole      measures the whole engine: nano-vllm's benchmark, the time between decode graphs, streams beside a
#              long prompt, start to ready of 8B, and last transformers' continuous batching. Writes 18 GB to
#              TMPDIR, or where that is not set to /dev/shm if it has room for twice as much, and removes them.
#   matmul     measures the library against our tiles.
#   profile    the decode steps kernel by kernel.
#   ranks      what tensor-parallel ranks do together, over NCCL, eager and captured; where there are two cards,
#              small models on both against one.
#   backends   every attention back end that is installed (FlashAttention, FlashInfer, cuDNN, torch), eager and
#              captured, as kernels does ours.
#
# Each part is a process of its own, or several that share its rows where it only checks. One that ends or hangs
# in a row is started again behind it: that row says how, and costs no other (tests/bench/engine/gpu/supervise.py).
#
# Time. All together take at most TOTAL_S seconds, table included. A part's limit is its weight's share of that
# among the parts that run, so a part that is named alone has all of it; what one does not use, later ones may.
# `LIMITS="steps=200 whole=300"` sets limits by hand. Libraries are loaded before the first part's time begins.
#
# In several commands. `--floors FILE` takes the card's rates from an earlier result instead of the part
# `floors`. `--cache-out DIR` keeps the compiled kernels in pieces of 15 MB, and `--cache-in DIR` begins with
# them: an empty kernel cache costs some minutes of compiling.
#
# Results go to DIR/gpu-<date>.jsonl (default DIR: tests/bench/results; on a machine that gives back one folder,
# name that folder), one JSON object per line, written as soon as it is known; rows not measured say so, and a
# table is printed last, with what failed: how far off and where, which is meant to be enough to mend it.
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
LOADING_S=120
PARTS_ALL=(floors kernels steps tokens engine attention whole matmul profile ranks backends)
declare -A WEIGHT_S=([floors]=30 [kernels]=80 [steps]=90 [tokens]=90 [engine]=70 [attention]=25 [whole]=190
    [matmul]=20 [profile]=60 [ranks]=10 [backends]=10)
declare -A SHARES=([kernels]=7 [tokens]=8 [engine]=5 [backends]=3)
MEASURING=" floors attention matmul steps profile "

usage() { echo "$1; see the head of tests/gpu/run.sh" >&2; exit 2; }

out=tests/bench/results floors= cache_in= cache_out=
while [[ "${1:-}" == --* ]]; do
    [ $# -ge 2 ] || usage "$1 needs a value"
    case $1 in
        --out) out=$2 ;;
        --floors) floors=$2; [ -r "$floors" ] || usage "--floors: no file $floors" ;;
        --cache-in) cache_in=$2; [ -d "$cache_in" ] || usage "--cache-in: no folder $cache_in" ;;
        --cache-out) cache_out=$2 ;;
        *) usage "no option is called $1" ;;
    esac
    shift 2
done
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=("${PARTS_ALL[@]}")
weights=0
for part in "${parts[@]}"; do
    [ -n "${WEIGHT_S[$part]:-}" ] || usage "no part is called $part"
    weights=$((weights + WEIGHT_S[$part]))
done
declare -A LIMIT_S
for limit in ${LIMITS:-}; do
    [[ "$limit" =~ ^([a-z]+)=([0-9]+)$ &&
        -n "${WEIGHT_S[${BASH_REMATCH[1]}]:-}" ]] || usage "LIMITS: not PART=SECONDS: $limit"
    LIMIT_S[${BASH_REMATCH[1]}]=${BASH_REMATCH[2]}
done
mkdir -p "$out"
results=$out/gpu-$(date +%F).jsonl
echo "results: $results"
[ -z "$floors" ] || grep '"part": "floors"' "$floors" >>"$results" || usage "--floors: no rates in $floors"
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

if [ -n "$cache_in$cache_out" ]; then
    export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$TMPDIR/kernels}
    mkdir -p "$TRITON_CACHE_DIR"
fi
if [ -n "$cache_in" ]; then
    cat "$cache_in"/kernels.tgz.* | tar xz -C "$TRITON_CACHE_DIR" || echo "the kept kernels cannot be read" >&2
fi

df -h "$TMPDIR" | tail -1
timeout $LOADING_S python3 -c 'import sys, torch, triton; torch.cuda.is_available() and torch.cuda.init()
print(f"python {sys.version.split()[0]}, torch {torch.__version__}, triton {triton.__version__}")'
echo "libraries loaded after $SECONDS s"

failed=0
ends=$SECONDS
room=$((TOTAL_S - TABLE_S - SECONDS))
for part in "${parts[@]}"; do
    own=${LIMIT_S[$part]:-$((room * WEIGHT_S[$part] / weights))}
    ends=$((ends + own)) # what was left over is this part's
    limit=$((ends - SECONDS))
    left=$((TOTAL_S - TABLE_S - SECONDS))
    [ $limit -le $left ] || limit=$left
    if [ $limit -lt 5 ]; then echo "== $part: no time is left" >&2; failed=1; continue; fi
    echo "== $part (at most $limit s)"
    began=$(date +%s)
    case $MEASURING in
        *" $part "*) command=(tests.bench.engine.gpu "$part") ;;
        *) command=("tests.gpu.$part") ;;
    esac
    python3 -m tests.gpu.part "$part" "$limit" "${SHARES[$part]:-1}" "${command[@]}"
    rc=$?
    printf '{"part": "%s", "row": "part", "rc": %d, "took_s": %d}\n' "$part" "$rc" $(($(date +%s) - began)) >>"$results"
    [ $rc -eq 0 ] || { echo "== $part failed: $rc" >&2; failed=1; }
done
if [ -n "$cache_out" ]; then
    mkdir -p "$cache_out"
    rm -f "$cache_out"/kernels.tgz.*
    tar cz -C "$TRITON_CACHE_DIR" . | split -b 15M - "$cache_out/kernels.tgz."
fi
python3 -m tests.gpu.table
echo "results: $results"
exit $failed
