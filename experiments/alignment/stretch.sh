#!/usr/bin/env bash
# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
# The large scale on one host of N GPUs, for a limited time: the policy on one GPU and compiling on another, then the runs.
#
#   bash experiments/alignment/stretch.sh WORK SECONDS NAME...
#   bash experiments/alignment/stretch.sh /scratch/work 1500 'w4a16_g128/[34]_*/seed2' 'w3a16_g128/*' '*_vllm/*'
#
# NAMEs are those of `run --runs`; their programs are compiled while the policy is made. Trainers share a GPU under
# NVIDIA's MPS, where there is one. Everything has stopped SECONDS after the start, and the results so
# far are in WORK/results.tar.xz, also when it is interrupted; logs in WORK/log. JOBS: trainers to a GPU (7). GPUS: how
# many (all). PYTHON: the interpreter. Two H200 made fourteen runs in about ten minutes, after three and a half for the
# policy.
set -euo pipefail
work=${1:?a folder to work in} seconds=${2:?seconds that all of it may take}
shift 2
names=("${@:?names of runs, with wildcards}")
python=${PYTHON:-python3} jobs=${JOBS:-7} gpus=${GPUS:-$(nvidia-smi -L | wc -l)}
end=$((SECONDS + seconds - 60)) # a minute to pack
cd "$(dirname "$0")/../.."
mkdir -p "$work/log"
run() { "$python" -m experiments.alignment.run --work "$work" "$@"; }
pack() { JAX_PLATFORMS=cpu CUDA_VISIBLE_DEVICES='' run --pack "$work/results.tar.xz"; }
trap pack EXIT

if [[ ! -f $work/base_test.json ]]; then # what rounding costs the policy, from the results that are here
  tar -xJOf experiments/alignment/results.tar.xz gpu/base_test.json >"$work/base_test.json" || rm -f "$work/base_test.json"
fi
CUDA_VISIBLE_DEVICES=0 run --base --budget-s $((end - SECONDS)) >"$work/log/stretch.base" 2>&1 &
base=$!
CUDA_VISIBLE_DEVICES=$((gpus - 1)) run --warm-up --runs "${names[@]}" --jobs "$jobs" --compiles "$jobs" \
  --budget-s $((end - SECONDS)) >"$work/log/stretch.warm" 2>&1 || tail -n 3 "$work/log/stretch.warm"
wait "$base" || { tail -n 5 "$work/log/stretch.base" && exit 1; }
if command -v nvidia-cuda-mps-control >/dev/null; then
  export CUDA_MPS_PIPE_DIRECTORY=$work/mps CUDA_MPS_LOG_DIRECTORY=$work/mps_log
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  nvidia-cuda-mps-control -d || true
fi
run --all --runs "${names[@]}" --devices "$gpus" --jobs "$jobs" --compiles "$jobs" --budget-s $((end - SECONDS)) ||
  echo "not complete: the same command goes on"
