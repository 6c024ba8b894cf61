# Of every job here. limited NAME SECONDS COMMAND...: runs it for so long at most, or not at all where the host is gone
# before; its output, and on failure what the engine said (NAME.engine), is printed and lies in RESULTS.
TINY=${TINY:-}
PYTHON=${PYTHON:-python3}
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
  }
}
# The cards of a command: `on 0,1 COMMAND...`. A CPU has none.
on() {
  local cards=$1
  shift
  if [ -n "$TINY" ]; then "$@"; else CUDA_VISIBLE_DEVICES=$cards "$@"; fi
}
