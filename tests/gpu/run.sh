#!/usr/bin/env bash
# Checks every kernel and the whole decoder on one NVIDIA GPU, and measures them against the card's own limits.
#
#   tests/gpu/run.sh [--out DIR] [PART...]
#
# Parts, in this order; all of them when none is named:
#
#   floors     what this card does at best: read-only bandwidth over a buffer far larger than its cache, and
#              the rate of a large bf16 product of random numbers. Every share below is of these two, so a
#              result means the same on another card, and no datasheet is believed.
#   kernels    each kernel against the reference that the CPU's tests use, in fp32, fp16 and bf16; in float64
#              on the CPU where it is attention. Ragged rows, shuffled pages, NaN in all that nobody owns.
#   tokens     small random models of every family: tokens against transformers, greedy, in fp32; a decode
#              step as a graph against the same step eager, to the bit.
#   attention  paged decode attention alone: bytes of keys and values over time, as a share of `floors`.
#   matmul     the library against our tiles, per shape of the two models, weights not in the cache.
#   steps      decode steps and prefills of true shapes with random weights, as graphs where they decode;
#              fp8 weights against bf16.
#
# Theory of the floors. A decode step of batch B at context L must read its weights once and B contexts of
# keys and values, and multiply 2 P numbers per row:
#     max(W / bandwidth, 2 P B / rate) + B L kv / bandwidth
# A prefill of L tokens multiplies 2 P numbers per token, and its attention 2 Hq D L per layer and token,
# half of the square being masked:
#     L (2 P + 2 Hq D layers L) / rate
#
# Each part is a process of its own with a limit of its own: one that fails or hangs costs its own rows and no
# others. Results go to DIR/gpu-<date>.jsonl (default DIR: tests/bench/results), one JSON object per line,
# rows not measured included; a table is printed last. The whole takes less than ten minutes on an H200.
#
# Needs python3 with torch >= 2.11, triton >= 3.6 and transformers, and what engine/runtime imports (msgspec,
# safetensors, numpy). WHEELS=DIR: wheels to use from there, for a machine that reaches no registry.
set -u
cd "$(dirname "$0")/../.." || exit 1

PARTS_ALL=(floors kernels tokens attention matmul steps)
declare -A LIMIT_S=([floors]=60 [kernels]=150 [tokens]=120 [attention]=60 [matmul]=80 [steps]=180)

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
    timeout --kill-after=10 "$limit" python3 -m "tests.gpu.$part"
    rc=$?
    printf '{"part": "%s", "row": "part", "rc": %d, "took_s": %d}\n' "$part" "$rc" $(($(date +%s) - began)) >>"$results"
    [ $rc -eq 0 ] || { echo "== $part failed: $rc" >&2; failed=1; }
done
python3 -m tests.gpu.table
exit $failed
