#!/usr/bin/env bash
# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
# Runs of this experiment on one GPU, for a limited time; see PLAN.md.
#
#   bash experiments/qwen25_coder/stretch.sh WORK SECONDS ARM:SEED... [-- override...]
#   bash experiments/qwen25_coder/stretch.sh /tmp/work 480 bf16_grpo:0 qarl_w4a16:0 -- train.steps=20
#
# Each ARM is a file of configs/qwen25_coder_0p5b. JOBS runs share the card at a time (1). When time is nearly up a run is
# interrupted, saves its checkpoint and is evaluated like one that is complete. What comes of it, without weights, is
# packed into WORK/results.tar.xz: metrics, evaluations, samples, and answers to the suites. MODEL: the model folder
# (models/qwen25-coder-0.5b). FORMAT: the scheme in place of w4a16. SUITES, GSM8K: which suites, and their file when
# `make data` has not been run. EVAL_S: seconds kept for evaluation (100). PYTHON: the interpreter.
set -uo pipefail
work=${1:?a folder to work in} seconds=${2:?seconds that all of it may take}
shift 2
python=${PYTHON:-python3} jobs=${JOBS:-1} model=${MODEL:-models/qwen25-coder-0.5b} eval_s=${EVAL_S:-100}
end=$((SECONDS + seconds - 10))
cd "$(dirname "$0")/../.."
mkdir -p "$work/log"
arms=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do arms+=("$1") && shift; done
[ $# -gt 0 ] && shift # what is left are overrides

one() { # ARM:SEED
  local arm=${1%%:*} seed=${1##*:} dir limit format=()
  [ -n "${FORMAT:-}" ] && case $arm in
    qarl_*) format=("quant.forward=$FORMAT") ;;
    rollout_*) format=("quant.rollout=$FORMAT") ;;
  esac
  dir=$work/runs/${arm}${FORMAT:+_$FORMAT}_seed$seed
  limit=$((end - SECONDS - eval_s))
  [ "$limit" -gt 30 ] || { echo "$1: no time left" && return; }
  timeout -s INT -k 60 "$limit" "$python" -m qarl_jax.train --config "configs/qwen25_coder_0p5b/$arm.yaml" \
    "model.path=$model" "run_dir=$dir" "seed=$seed" "log.view=lines" "${format[@]}" "${overrides[@]}" \
    >"$work/log/$(basename "$dir").train" 2>&1
  echo "$(basename "$dir"): training ended with $? after $SECONDS s"
  limit=$((end - SECONDS))
  [ "$limit" -gt 20 ] && timeout -k 10 "$limit" "$python" -m qarl_jax.evaluate --checkpoint "$dir" \
    --suite "${SUITES:-gsm8k}" ${GSM8K:+--suite-data "$GSM8K"} --json --out "$dir/suite.jsonl" "model.path=$model" \
    >"$dir/suites.json" 2>"$work/log/$(basename "$dir").evaluate"
  echo "$(basename "$dir"): $(tail -c 300 "$dir/suites.json" 2>/dev/null)"
}

overrides=("$@")
pack() { (cd "$work" && tar --exclude=checkpoints --exclude=tensorboard -cJf results.tar.xz runs log) || true; }
trap pack EXIT
for each in "${arms[@]}"; do
  while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
  one "$each" &
done
wait
