#!/usr/bin/env bash
# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
# The learner's benchmarks on one GPU, a part at a time; every part ends within nine minutes.
#
#   bash benchmarks/gpu_learner.sh PART [FOLDER]
#
#   learner-8b, learner-1.7b   every scheme beside the peer ($PEER: a command that prints RESULT tokens_per_s=... and takes
#                              --model, --seq, --rows and --steps, e.g. "python peer_hf.py --remat --compile layer")
#   kernels                    GEMMs with and without autotuning; attention, plain and packed
#   memory                     peaks of 8B Muon at 16k tokens by where and how its state is kept, beside the plan
#   profile                    one profiled step of bf16 and w8a8, summarised
#   fp8                        a step of 8B fp8 as vLLM on CUDA computes it, with XLA's products and with the kernel's
#   tests                      the tests that need a GPU
#   step                       the whole step ($SPEEDS: "bf16=N w8a8=N fp8=N w4a16=N", the engine's tokens/s)
#
# PYTHON names the interpreter. Results go to FOLDER (gpu_results).
set -euo pipefail
part=${1:?say which part; see the head of this file}
out=${2:-gpu_results}
python=${PYTHON:-python}
mkdir -p "$out"
cd "$(dirname "$0")/.."

learner() { # model, remat
  peer=()
  if [[ -n "${PEER:-}" ]]; then peer=(--peer "$PEER --model $1 --seq 4096 --rows 4 --steps 5"); fi
  timeout 530 "$python" -m benchmarks.learner --model "$1" --remat "$2" "${peer[@]}" --out "$out/learner_$1.json"
}

case "$part" in
  learner-8b) learner 8b "${REMAT:-mixer}" ;;
  learner-1.7b) learner 1.7b "${REMAT:-dots}" ;;
  kernels)
    timeout 330 "$python" -m benchmarks.gemm --model 8b --autotune 0 4 | tee "$out/gemm.jsonl"
    timeout 190 "$python" -m benchmarks.attention --out "$out/attention.json"
    ;;
  memory) timeout 530 "$python" -m benchmarks.memory --measure --out "$out/memory.json" ;;
  profile)
    timeout 500 "$python" -m benchmarks.learner --model 1.7b --schemes bf16 w8a8 --profile "$out/profile"
    for scheme in bf16 w8a8; do
      "$python" -m benchmarks.trace_summary "$out/profile/$scheme" | tee "$out/profile_$scheme.txt"
      "$python" -m benchmarks.trace_summary "$out/profile/$scheme" --by kind
    done
    ;;
  fp8)
    for kernels in xla hopper; do
      timeout 265 "$python" -m benchmarks.learner --model 8b --schemes fp8 --engine cuda --kernels "$kernels" \
        --remat "${REMAT:-dots}" --out "$out/learner_fp8_$kernels.json"
    done
    ;;
  tests) JAX_PLATFORMS=cuda,cpu timeout 530 "$python" -m pytest -q -m gpu -n 0 tests/quant tests/models ;;
  step)
    "$python" -m benchmarks.step_gpu --shapes "${SHAPES:-4b}" --folder "/tmp/${SHAPES:-4b}" --case "${CASE:-w8a8}" \
      --batch "${BATCH:-128}" --out "$out/steps.jsonl"
    ;;
  *) echo "unknown part $part" >&2 && exit 2 ;;
esac
