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
#   backends   the same of every attention back end that is installed (FlashAttention, FlashInfer, cuDNN,
#              torch), eager and captured.
#   tokens     small random models of every family: tokens against transformers, greedy, in fp32; a decode
#              step as a graph against the same step eager, to the bit.
#   ranks      what tensor-parallel ranks do together, over NCCL, eager and captured; where there are two cards,
#              small models on both against one.
#   engine     the whole engine on small random models, from loading through the core's loop: tokens against
#              transformers, overlapped against plain under preemption, graphs against eager; launches that wait.
#   attention  measures paged decode attention alone, by every back end that is installed.
#   matmul     measures the library against our tiles.
#   steps      measures decode steps and prefills of true shapes; fp8 weights and KV against bf16.
#   whole      measures the whole engine: nano-vllm's benchmark beside transformers' continuous batching, the time
#              between decode graphs, start to ready of 8B. Writes 18 GB to TMPDIR and removes them.
#
# Each part is a process of its own with a limit of its own: one that fails or hangs costs its own rows and no
# others. Results go to DIR/gpu-<date>.jsonl (default DIR: tests/bench/results), one JSON object per line,
# rows not measured included; a table is printed last. The whole is meant to take ten minutes on an H200.
#
# Needs python3 with torch >= 2.11, triton >= 3.6 and transformers, and what engine/runtime imports (msgspec,
# safetensors, numpy); the rows of `whole` that start an engine need all that serves (extra `engine`).
# WHEELS=DIR: wheels to use from there, for a machine that reaches no registry.
set -u
cd "$(dirname "$0")/../.." || exit 1

PARTS_ALL=(floors kernels backends tokens ranks engine attention matmul steps whole)
declare -A LIMIT_S=([floors]=60 [kernels]=130 [backends]=80 [tokens]=90 [ranks]=60 [attention]=60 [matmul]=60
    [steps]=160 [engine]=90 [whole]=260)
MEASURING=" floors attention matmul steps "

out=tests/bench/results
if [ "${1:-}" = --out ]; then out=$2; shift 2; fi
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=("${PARTS_ALL[@]}")
mkdir -p "$out"
results=$out/gpu-$(date +%F).jsonl
export PENSTOCK_GPU_RESULTS=$results PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

if [ -n "${WHEELS:-}" ]; then
    site=$(mktemp -d)
    python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl || exit 1
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi

failed=0
for part in "${parts[@]}"; do
    limit=${LIMIT_S[$part]:-}
    if [ -z "$limit" ]; then echo "no part is called $part" >&2; exit 2; fi
    echo "== $part (at most $limit s)"
    began=$(date +%s)
    case $MEASURING in
        *" $part "*) command=(engine.bench.gpu "$part") ;;
        *) command=("tests.gpu.$part") ;;
    esac
    timeout --kill-after=10 "$limit" python3 -m "${command[@]}"
    rc=$?
    printf '{"part": "%s", "row": "part", "rc": %d, "took_s": %d}\n' "$part" "$rc" $(($(date +%s) - began)) >>"$results"
    [ $rc -eq 0 ] || { echo "== $part failed: $rc" >&2; failed=1; }
done
python3 -m tests.gpu.table
exit $failed
