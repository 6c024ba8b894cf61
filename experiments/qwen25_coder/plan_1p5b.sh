#!/usr/bin/env bash
# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
# Runs of PLAN_1p5b.md: on every GPU that is visible, two at a time where one has room for two.
#
#   make data data-1.5b && bash experiments/qwen25_coder/plan_1p5b.sh WORK SECONDS [ARM:SEED...] [-- override...]
#   bash experiments/qwen25_coder/plan_1p5b.sh /tmp/work 1400 qarl_w4a16:1                  # one run of one cell
#
# Without ARM:SEED: all of the plan, in its order. A run that was judged in WORK is not run again, and one that was cut
# off is: it leaves no checkpoint. What it recorded is in WORK/results.tar.xz all the same.
# VIEWS=500: after each run, so many held-out questions by difficulty, with a plan and with facts (views.jsonl in its folder).
set -euo pipefail
work=${1:?a folder to work in} seconds=${2:?seconds that all of it may take}
shift 2
cd "$(dirname "$0")/../.."
export MODEL=${MODEL:-models/qwen25-coder-1.5b} SUITES=none EVAL_S=0 LEAST=${LEAST:-300}
runs=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do runs+=("$1") && shift; done
[ $# -eq 0 ] || shift
if [ ${#runs[@]} -eq 0 ]; then
  for seed in 1 2 3 4 5 6; do runs+=("qarl_w4a16:$seed" "rollout_w4a16_grpo:$seed"); done
  runs+=(base:w4a16 base:bf16)
  for seed in 1 2 3; do runs+=("aligned_grpo_w4a16:$seed" "bf16_grpo:$seed" "rollout_w4a16_tbpo:$seed"); done
fi
mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null || true)
if [ -n "$mib" ]; then
  gpus=($(seq 0 $(($(wc -l <<<"$mib") - 1))))
  visible=${CUDA_VISIBLE_DEVICES:-${gpus[*]}}
  export CARDS=${CARDS:-${visible//,/ }}
  [ "${mib%%$'\n'*}" -lt 100000 ] || export JOBS=${JOBS:-2}
fi
# Room for an engine: two runs share a GPU of 141 GB (three with adapters), or one has 80 GB.
room=(rollout.engine.kv_cache_gb=6 rollout.engine.gpu_memory_utilization="$([ "${JOBS:-1}" -gt 1 ] && echo 0.13 || echo 0.22)")
mkdir -p "$work"
questions=$work/questions.jsonl
[ -e "$questions" ] || "${PYTHON:-python3}" -m experiments.qwen25_coder.questions "$MODEL" "$questions"
system=$(sed -n 's/^  system: //p' configs/qwen25_coder_0p5b/qarl_w4a16.yaml) # with its quotes
data='{"source": {"name": "jsonl", "path": "'$questions'"}, "system": '$system', "max_prompt_len": 320, "holdout": 0.0}'
saved=false
if [ -n "${VIEWS:-}" ]; then
  base=$work/base.jsonl saved=true started=$SECONDS gpus=${CARDS:-${CUDA_VISIBLE_DEVICES:-0}}
  [ -e "$base" ] || CUDA_VISIBLE_DEVICES=${gpus%%[ ,]*} "${PYTHON:-python3}" -m qarl_jax.evaluate --scheme bf16 --out "$base" \
    --config configs/qwen25_coder_0p5b/bf16_grpo.yaml "${room[@]}" "$@" model.path="$MODEL" eval.num_prompts="$VIEWS" \
    eval.num_samples=8 >&2
  export VIEWS=$base
  seconds=$((seconds - SECONDS + started))
fi
exec bash experiments/qwen25_coder/stretch.sh "$work" "$seconds" "${runs[@]}" -- "${room[@]}" train.steps=28 \
  eval.every=20 eval.at_start=false eval.num_prompts=0 eval.num_samples=1 eval.data="$data" \
  checkpoint.every=0 checkpoint.at_end=$saved "$@"
