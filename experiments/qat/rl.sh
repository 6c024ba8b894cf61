#!/usr/bin/env bash
# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
# Runs of PLAN.md at a width, from rounding or from training, on one GPU for a limited time.
#
#   bash experiments/qat/rl.sh WORK SECONDS rounding|answers|training|nested [ARM:SEED...] [-- override...]
#   JOBS=3 bash experiments/qat/rl.sh /tmp/rl 1500 training qarl_w4a16:{1,2,3} rollout_w4a16_grpo:1
#   JOBS=3 bash experiments/qat/rl.sh /tmp/nested_all 1700 nested qarl_w4a16:{1,2,3} -- 'train.widths=[8,4,2]'
#
# `training` first makes WORK/model by qat, of the model's own answers to training questions (answers.py; PLAN.md, departures).
# Without ARM:SEED it makes no more than this model, and so does `nested`; `answers` makes no more than the answers.
# `nested` trains 8, 4 and 2 bits as slices of one grid, samples and evaluates at 2, and scores each run at 4 and 8, too
# (runs/*/w4a16_midpoint.jsonl, w8a16_asym.jsonl).
# BITS: 2 or 3 (2). ARMs are files of configs/qwen25_coder_0p5b; `base:w2a16_asym:g32` judges the beginning. MODEL, JOBS and the
# rest: experiments/qwen25_coder/stretch.sh.
# TINY=1: the shortest training and two short steps.
set -euo pipefail
work=${1:?a folder to work in} seconds=${2:?seconds that all of it may take} start=${3:?rounding, answers, training or nested}
shift 3
cd "$(dirname "$0")/../.."
bits=${BITS:-2} began=$SECONDS model=${MODEL:-models/qwen25-coder-0.5b}
mkdir -p "$work"
python=${PYTHON:-python3} answers=$work/answers.jsonl
scheme=w${bits}a16_asym:g32 more=(train.steps=30 eval.every=30)
if [ "$start" = training ] || [ "$start" = nested ] || [ "$start" = answers ]; then
  stages='["w8a16_asym:g32", "w4a16_asym:g32", "'$scheme'"]' size=(text.rows=1024)
  if [ "$start" = nested ]; then
    stages='["w8a16_asym:g32"]' scheme=w2a16_midpoint:g32
    size+=('widths=[8, 4, 2]') more+=(checkpoint.at_end=true)
  fi
  drawn=(train.prompts_per_step=1024 train.prompts_per_update=1024 rollout.num_samples_per_prompt=2 eval.every=0)
  if [ -n "${TINY:-}" ]; then
    source experiments/qwen25_coder/tiny.sh
    size+=(text.rows=8 text.row_len=64 text.heldout=2 distill=null data.holdout=0.3)
    drawn=("${tiny_step[@]}" train.prompts_per_step=8 train.prompts_per_update=8 rollout.max_response_len=256
      rollout.engine.max_model_len=640 train.row_len=640 eval.every=0)
  fi
  [ -e "$answers" ] || XLA_PYTHON_CLIENT_PREALLOCATE=false "$python" experiments/qat/answers.py "$answers" \
    configs/qwen25_coder_0p5b/bf16_grpo.yaml model.path="$model" "${drawn[@]}" >"$work/answers.log" 2>&1
  [ "$start" != answers ] || exit 0
  [ -e "$work/model" ] || XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false" \
    "$python" -m qarl_jax.qat --config configs/qat/smollm2_135m_gpu.yaml "data=$(bash experiments/qat/data.sh "$answers")" \
    model.path="$model" "stages=$stages" "${size[@]}" out="$work/model" >>"$work/qat.log" 2>&1
  model=$work/model
elif [ "$start" != rounding ]; then
  echo "$start: rounding, answers, training or nested" >&2
  exit 2
fi
if [ -n "${TINY:-}" ]; then
  source experiments/qwen25_coder/tiny.sh
  more+=("${tiny_step[@]}" train.steps=2 eval.every=0 eval.at_end=false)
fi
overrides=() runs=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do runs+=("$1") && shift; done
if [ ${#runs[@]} -eq 0 ]; then
  [ "$start" != rounding ] || { echo "rounding: name ARM:SEED" >&2 && exit 2; }
  exit 0
fi
[ $# -eq 0 ] || { shift && overrides=("$@"); }
MODEL=$model FORMAT=$scheme bash experiments/qwen25_coder/plan_1p5b.sh "$work" $((seconds - SECONDS + began)) \
  "${runs[@]}" -- "${more[@]}" "${overrides[@]}"
[ "$start" = nested ] || exit 0
export XLA_PYTHON_CLIENT_PREALLOCATE=false
export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps/pipe CUDA_MPS_LOG_DIRECTORY=/tmp/mps/log # a daemon that outlives stretch.sh
echo get_server_list | nvidia-cuda-mps-control >/dev/null 2>&1 || unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
for run in "$work"/runs/*_seed*; do # a run's last evaluation has two bits
  [ -d "$run" ] || continue # none was trained
  for scheme in w4a16_midpoint:g32 w8a16_asym:g32; do
    out=$run/${scheme%%:*}.jsonl limit=$((seconds - SECONDS + began))
    [ -e "$out" ] || [ "$limit" -lt 30 ] || timeout -k 10 "$limit" "$python" -m qarl_jax.evaluate --checkpoint "$run" \
      --scheme "$scheme" --json --out "$out" >"${out%l}" 2>"${out%.jsonl}.log" ||
      echo "not judged under $scheme: $run" >&2 &
    [ -z "${TINY:-}" ] || wait
  done
done
wait
