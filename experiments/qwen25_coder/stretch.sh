#!/usr/bin/env bash
# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
# Runs of this experiment on one GPU or several, for a limited time; see PLAN.md.
#
#   bash experiments/qwen25_coder/stretch.sh WORK SECONDS ARM:SEED... [-- override...]
#   JOBS=2 bash experiments/qwen25_coder/stretch.sh /tmp/work 480 bf16_grpo:0 qarl_w4a16:0 -- train.steps=20
#   CARDS="0 1" JOBS=2 bash experiments/qwen25_coder/stretch.sh /tmp/work 3600 {bf16_grpo,qarl_w4a16}:{1,2}
#   JOBS=3 bash experiments/qwen25_coder/stretch.sh /tmp/work 300 base:bf16 base:w8a8 base:w4a16:g-1
#
# Each ARM is a file of configs/qwen25_coder_0p5b; `base:SCHEME` judges the untrained model under a scheme, on the
# held-out questions and the suites. JOBS runs train on each of CARDS at a time (one, on the card that is visible), each
# with its part of the memory; where JOBS are several, the next begins while one is judged. When time is nearly up a run
# is interrupted, saves its checkpoint and is evaluated like one that is complete. A run that was begun in WORK goes on;
# one that was judged is not run again, and its checkpoint is gone unless KEEP is set. What comes of it, without weights,
# is packed into WORK/results.tar.xz after every run: metrics, evaluations, answers.
#
# CONFIG: a file of that folder whose arms the ARMs then are. Folders of lora's runs begin with lora_ (PLAN_lora.md).
# MODEL: the model folder (models/qwen25-coder-0.5b). FORMAT: the scheme in place of w4a16. SUITES: which suites
# (all the plan judges by), from where `make data` puts them; `none`: the run's own last evaluation judges it
# (PLAN_1p5b.md). VIEWS: the untrained model's answers to held-out questions; after a run its policy is asked these by
# difficulty, with a plan and with facts (docs/suites.md). EVAL_S: seconds kept for evaluation (150). LEAST: seconds that a run's training must have left, or it
# is not begun (30; two runs on an H100 take 500).
# FRACTION: of the card's memory for a learner, where JOBS do not share it equally. MPS: empty leaves NVIDIA's MPS out.
# PYTHON: the interpreter.
set -uo pipefail
work=${1:?a folder to work in} seconds=${2:?seconds that all of it may take}
shift 2
python=${PYTHON:-python3} jobs=${JOBS:-1} model=${MODEL:-models/qwen25-coder-0.5b} eval_s=${EVAL_S:-150}
end=$((SECONDS + seconds - 10))
cd "$(dirname "$0")/../.."
suites=${SUITES:-gsm8k,gsm8k:sampled,humaneval,hellaswag,truthfulqa} configs=configs/qwen25_coder_0p5b
mkdir -p "$work/log" "$work/runs"
arms=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do arms+=("$1") && shift; done
[ $# -gt 0 ] && shift # what is left are overrides
overrides=("model.path=$model" "$@")

judging=() in_little_room=() daemon=
if [ "$jobs" -gt 1 ]; then
  # Under MPS kernels of several runs are on a GPU at once: five runs were then as fast as four were without. It numbers the
  # GPUs that its daemon sees, so the daemon has to see all.
  if [ "${MPS-1}" = 1 ] && command -v nvidia-cuda-mps-control >/dev/null; then
    export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps/pipe CUDA_MPS_LOG_DIRECTORY=/tmp/mps/log
    mkdir -p /tmp/mps/pipe /tmp/mps/log
    if env -u CUDA_VISIBLE_DEVICES nvidia-cuda-mps-control -d >/tmp/mps/log/start 2>&1; then # else it runs
      daemon=started
    fi
    echo get_server_list | nvidia-cuda-mps-control >/dev/null 2>&1 || unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  fi
  # Of its part of the card a run leaves 20 GiB to its engine, staging and contexts, and to one that is judged beside it.
  # For an update 23.7 GiB were enough, and 19.7 too few: two runs on 80 GB leave no room for one that is judged.
  share=0.2
  if mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null); then
    share=$(awk -v mib="${mib%%$'\n'*}" -v jobs="$jobs" 'BEGIN {
      left = 1 / jobs - 20 * 1024 / mib; least = 23.7 * 1024 / mib; printf "%.3f", (left > least) ? left : least }')
  fi
  export XLA_PYTHON_CLIENT_MEM_FRACTION=${FRACTION:-$share} XLA_PYTHON_CLIENT_PREALLOCATE=true
  overrides=(rollout.engine.gpu_memory_utilization=0.1 rollout.engine.kv_cache_gb=4.5 "${overrides[@]}")
  judging=(env XLA_PYTHON_CLIENT_MEM_FRACTION=0.12 XLA_PYTHON_CLIENT_PREALLOCATE=false)
  in_little_room=(rollout.engine.kv_cache_gb=3)
fi

judge() { # FOLDER SECONDS ARGUMENT...: answers to the suites
  local dir=$1 limit=$2 code
  shift 2
  timeout -k 10 "$limit" "${judging[@]}" "$python" -m qarl_jax.evaluate --suite "$suites" --json \
    --out "$dir/suite.jsonl" "$@" "${overrides[@]}" rollout.engine.max_model_len=4096 "${in_little_room[@]}" \
    >"$dir/suites.json" 2>>"$work/log/$(basename "$dir").evaluate"
  code=$?
  echo "evaluation ended with $code after $SECONDS s: $(basename "$dir")"
  cut -c 1-160 "$dir/suites.json"
  return $code
}

views() { # FOLDER: writes views.jsonl, which `qarl_jax.plot` draws
  local limit=$((end - SECONDS))
  [ "$limit" -gt 20 ] || return
  timeout -k 10 "$limit" "${judging[@]}" "$python" -m qarl_jax.evaluate --checkpoint "$1" --base "$VIEWS" --json \
    --view difficulty,plan,knowledge "${overrides[@]}" eval.data=null eval.num_prompts="$(wc -l <"$VIEWS")" \
    "${in_little_room[@]}" >"$1/views.jsonl" 2>>"$work/log/$(basename "$1").views"
  echo "views ended with $? after $SECONDS s: $(basename "$1")"
  rm -rf "$1/checkpoints"
}

leave() { # gives the place on $card to the next run, once
  [ -z "$card" ] || echo "$card" >&"$places"
  card=
}

one() { # ARM:SEED
  local arm=${1%%:*} seed=${1#*:} dir named= limit least=${LEAST:-30} format=() code
  limit=$((end - SECONDS - eval_s))
  [ "$arm" = base ] && limit=$((end - SECONDS)) least=30
  [ "$limit" -gt "$least" ] || { echo "$1: no time left" && return; }
  if [ "$arm" = base ]; then
    dir=$work/runs/base_${seed//:/_} && mkdir -p "$dir"
    [ "$suites" = none ] && suites=own || suites=own,$suites
    judge "$dir" "$limit" --config $configs/bf16_grpo.yaml --scheme "$seed"
    return
  fi
  [ -n "${FORMAT:-}" ] && case $arm in
    bf16_*) ;;
    rollout_*) format=("quant.rollout=$FORMAT") ;;
    *) format=("quant.forward=$FORMAT") ;;
  esac
  [ "${CONFIG:-}" = lora ] && named=lora_ # its arms have the names of full-parameter configs
  dir=$work/runs/$named$arm${format:+_${FORMAT//:/_}}_seed$seed
  [ -e "$dir/judged" ] && return
  timeout -s INT -k 120 "$limit" "$python" -m qarl_jax.train --config "$configs/${CONFIG:-$arm}.yaml" ${CONFIG:+"arm=$arm"} \
    "run_dir=$dir" "seed=$seed" "log.view=lines" "${format[@]}" "${overrides[@]}" \
    >>"$work/log/$(basename "$dir").train" 2>&1
  code=$?
  echo "training ended with $code after $SECONDS s: $(basename "$dir")"
  if [ "$suites" = none ]; then
    [ "$code" = 0 ] || return
    [ -z "${VIEWS:-}" ] || views "$dir"
    touch "$dir/judged"
    return
  fi
  [ "$jobs" -gt 1 ] && leave # alone, a run has all of the card, its judge too
  limit=$((end - SECONDS))
  [ "$limit" -gt 20 ] && judge "$dir" "$limit" --checkpoint "$dir" && touch "$dir/judged"
  [ -e "$dir/judged" ] && [ -z "${KEEP:-}" ] && rm -rf "$dir/checkpoints"
}

pack() {
  # whole or not at all: someone may be copying it
  (cd "$work" && flock results.lock bash -c \
    'tar --exclude=checkpoints --exclude=tensorboard -cJf results.part runs log; mv results.part results.tar.xz') || true
}
trap 'pack; [ -z "$daemon" ] || echo quit | nvidia-cuda-mps-control >/dev/null 2>&1' EXIT
# A line for each place that is free: its card.
rm -f "$work/places" && mkfifo "$work/places" && exec {places}<>"$work/places"
for ((i = 0; i < jobs; i++)); do
  for card in ${CARDS:-${CUDA_VISIBLE_DEVICES:-0}}; do echo "$card" >&"$places"; done
done
for each in "${arms[@]}"; do
  read -r -u "$places" card
  { export CUDA_VISIBLE_DEVICES=$card && one "$each"; leave; pack; } &
done
wait
