#!/usr/bin/env bash
# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
# Runs of PLAN.md at a width, from rounding or from training, on one GPU for a limited time.
#
#   bash experiments/qat/rl.sh WORK SECONDS rounding|training ARM:SEED... [-- override...]
#   JOBS=3 bash experiments/qat/rl.sh /tmp/rl 1500 training qarl_w4a16:{1,2,3} rollout_w4a16_grpo:1
#
# `training` first makes WORK/model by qat, with TEXT (experiments/qat/text.py makes it). BITS: 2 or 3 (2). ARMs are files of
# configs/qwen25_coder_0p5b; `base:w2a16_asym:g32` judges the beginning. MODEL, JOBS and the rest: experiments/qwen25_coder/stretch.sh.
# TINY=1: the shortest training and two short steps.
set -euo pipefail
work=${1:?a folder to work in} seconds=${2:?seconds that all of it may take} start=${3:?rounding or training}
shift 3
cd "$(dirname "$0")/../.."
bits=${BITS:-2} began=$SECONDS model=${MODEL:-models/qwen25-coder-0.5b}
mkdir -p "$work"
if [ "$start" = training ]; then
  stages='["w8a16_asym:g32", "w4a16_asym:g32", "w2a16_asym:g32"]' size=(text.rows=1024)
  [ -z "${TINY:-}" ] || size=(text.rows=8 text.row_len=64 text.heldout=2 distill=null)
  [ -e "$work/model" ] || XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false" \
    "${PYTHON:-python3}" -m qarl_jax.qat --config configs/qat/smollm2_135m_gpu.yaml data.source.path="${TEXT:?text to train on}" \
    model.path="$model" "stages=${stages//w2/w$bits}" "${size[@]}" out="$work/model" >>"$work/qat.log" 2>&1
  model=$work/model
elif [ "$start" != rounding ]; then
  echo "$start: rounding or training" >&2
  exit 2
fi
more=(train.steps=30 eval.every=30)
if [ -n "${TINY:-}" ]; then
  source experiments/qwen25_coder/tiny.sh
  more=("${tiny_step[@]}" train.steps=2 eval.every=0 eval.at_end=false)
fi
overrides=() runs=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do runs+=("$1") && shift; done
[ $# -eq 0 ] || { shift && overrides=("$@"); }
MODEL=$model FORMAT=w${bits}a16_asym:g32 exec bash experiments/qwen25_coder/plan_1p5b.sh "$work" $((seconds - SECONDS + began)) \
  "${runs[@]}" -- "${more[@]}" "${overrides[@]}"
