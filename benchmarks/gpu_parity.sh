#!/usr/bin/env bash
# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
#
# Everything that only a GPU can tell about publishing and parity, in about eighteen minutes on one H200:
#
#     PYTHONPATH=.:bridge:$VLLM bash benchmarks/gpu_parity.sh [MODEL]
#
# MODEL is a trained Hugging Face folder (default assets/tiny-qwen3). vLLM must be importable by the same python. Each
# step has a time limit of its own and does not stop the next; results, with the command of each, go to
# ${OUT:-benchmarks/results}/*_h200.json, logs of failures beside them.
set -uo pipefail
model=${1:-assets/tiny-qwen3}
out=${OUT:-benchmarks/results}
python=${PYTHON:-python3}
mkdir -p "$out"
export XLA_PYTHON_CLIENT_PREALLOCATE=false VLLM_USE_DEEP_GEMM=0 VLLM_USE_FLASHINFER_SAMPLER=0
begun=$SECONDS failed=0
step() { # name, seconds, command...; what it says of itself goes to stderr, what the command says to stdout
  local name=$1 limit=$2
  shift 2
  echo "=== $name at $((SECONDS - begun)) s: $*" >&2
  timeout --signal=INT --kill-after=15 "$limit" "$@" 2>"$out/$name.err" || {
    local code=$?
    failed=$((failed + 1))
    echo "=== $name: exit code $code" >&2
    tail -n 25 "$out/$name.err" >&2
  }
}

step gpu_linears 90 "$python" benchmarks/gpu_linears.py --out "$out/gpu_linears_h200.json"
for scheme in w4a16 w8a8 bf16; do
  step "publish_$scheme" 140 "$python" benchmarks/publish.py --shapes 8b --schemes "$scheme" --engine cuda \
    --repeats 3 --kv-cache-gb 1 --gpu-memory-utilization 0.4 --log-file "$out/publish_$scheme.log" \
    --out "$out/publish_${scheme}_h200.json"
done
# 61 GB of masters: what JAX frees must be free for the engine, and XLA must not try its programs out.
step publish_30b_a3b 240 env XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_FLAGS=--xla_gpu_autotune_level=0 \
  "$python" benchmarks/publish.py --shapes 30b-a3b --schemes w4a16 --engine cuda --repeats 2 --kv-cache-gb 1 \
  --gpu-memory-utilization 0.2 --log-file "$out/publish_30b_a3b.log" --out "$out/publish_30b_a3b_h200.json"
parity() { # name, model, scheme
  step "$1" 90 "$python" -m qarl_jax.parity --model "$2" --scheme "$3" --engine cuda --prompts 32 --response-len 64 \
    --json >"$out/$1_h200.json"
  cat "$out/$1_h200.json"
}
mixture=$(mktemp -d) # its matrices three times as large as usual, so that its distributions are not flat
step mixture 60 "$python" -m benchmarks.random_folder "$mixture" --shapes tiny-moe --deviation 0.06
for scheme in bf16 w8a8 fp8 w4a16:g64; do parity "parity_moe_${scheme%%:*}" "$mixture" "$scheme"; done
for scheme in w8a8 w4a16:g64 fp8; do parity "parity_${scheme%%:*}" "$model" "$scheme"; done
step soak 60 "$python" benchmarks/publish.py --model "$model" --schemes w8a8 --engine cuda --soak 100 \
  --out "$out/publish_soak_h200.json"
echo "=== done after $((SECONDS - begun)) s, $failed step(s) failed"
exit "$failed"
