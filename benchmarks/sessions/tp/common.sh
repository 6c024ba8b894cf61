# What the jobs here share: limits of time, cards, and the commands of more than one job.
TINY=${TINY:-}
PYTHON=${PYTHON:-python3}
gpus=4
! command -v nvidia-smi >/dev/null || gpus=$(nvidia-smi --list-gpus | wc -l)

# limited NAME SECONDS COMMAND...: runs it for so long at most, or not at all where the host is gone before; what it found
# and, on failure, the ends of its log and of the engine's (NAME.engine) are printed, and lie in RESULTS.
limited() {
  local name=$1 most=$2 left code=0
  shift 2
  left=$(($(bash benchmarks/offline_host.sh left) - 25))
  if [ "$left" -lt 45 ]; then
    echo "$name: no time is left" && return 0
  fi
  echo "$name: $(date +%T) $*"
  timeout -k 10 "$((left < most ? left : most))" "$@" >"$RESULTS/$name.log" 2>&1 || code=$?
  grep -h '^{' "$RESULTS/$name.log" | cut -c 1-700 || true
  echo "$name: $(date +%T) exit code $code"
  [ "$code" = 0 ] || {
    tail -n 25 "$RESULTS/$name.log" | cut -c 1-400
    tail -q -n 25 "$RESULTS/$name".engine* 2>/dev/null | cut -c 1-400
    sleep 12 # what was killed lets go of its memory
    return "$code"
  }
}

# simulated COUNT: devices of the CPU. XLA ends a process when one of them is 60 s late, as on busy cores.
simulated() {
  export PJRT_NPROC=16 XLA_FLAGS="--xla_force_host_platform_device_count=$1 \
--xla_cpu_collective_call_warn_stuck_timeout_seconds=120 --xla_cpu_collective_call_terminate_timeout_seconds=240"
}

# on CARDS COMMAND...: the learner sees these alone. A CPU has none.
on() {
  local cards=$1
  shift
  if [ -n "$TINY" ]; then "$@"; else CUDA_VISIBLE_DEVICES=$cards "$@"; fi
}

# gate NAME SHARDS CARDS FOLDER SCHEME OPTIONS...: the learner on the first of the engine's cards.
gate() {
  local name=$1 shards=$2 cards=$3 folder=$4 scheme=$5
  shift 5
  [ -z "$TINY" ] || { cards="" && shards=2; } # its shapes have two heads of keys
  on "${cards%%,*}" limited "$name" 280 $PYTHON -m benchmarks.gate --model "$MODELS/$folder" --schemes "$scheme" \
    --tensor-parallel "$shards" --visible-gpus "$cards" --engine-log "$RESULTS/$name.engine" \
    --json "$RESULTS/$name.json" "$@"
}

# price NAME SECONDS CARDS SHAPES SCHEME SHARDS SEQUENCES OPTIONS...: the learner over the cards, which the engine shares.
price() {
  local name=$1 most=$2 cards=$3 shapes=$4 scheme=$5 shards=$6 sequences=$7 length=256
  shift 7
  [ -z "$TINY" ] || { length=8 && sequences=4 && shapes=tiny && shards=$((shards < 2 ? 1 : 2)); }
  on "$cards" limited "$name" "$most" $PYTHON -m benchmarks.engine_price --shapes "$shapes" --schemes "$scheme" \
    --tensor-parallel "$shards" --sequences $sequences --response-len $length --arithmetics batch_invariant \
    --out "$RESULTS/price.jsonl" --engine-log "$RESULTS/$name.engine" "$@"
}

shapes=1.7b sizes=(--sequences 128)
if [ -n "$TINY" ]; then
  shapes=tiny
  sizes=(--sequences 8 --prompt-len 12 --long-prompt 171 --response-len 8 --kv-cache-gb 0.2 --threads 1)
fi
