# Whole steps on four cards (or two), 1.7B shapes (or SHAPES=8b) under w8a8: synchronous, the learner over all with an engine on each;
# then staleness 1 and 4, the learner on half of them and engines on the other half. Tokens per second are in the lines, the busy
# share of each card, once a second, in busy_*.csv. Last, an engine of a run at staleness 1 is killed after a step, and the run goes on.
source benchmarks/sessions/tp/common.sh
sizes=(--batch 512 --response-len 1024 --mean-len 400 --updates 4 --steps 4) seqs=256 stales="1 4" more=()
shapes=${SHAPES:-$shapes}
if [ -n "$TINY" ]; then
  simulated 2
  sizes=(--batch 16 --response-len 16 --updates 2 --steps 2) seqs=8 stales=1
  more=(model.attention=xla rollout.engine.kv_cache_gb=0.1 rollout.engine.threads=1)
fi

# steps NAME CARDS OVERRIDES...: of the learner, by their number, the first ones.
steps() {
  local name=$1 cards=$2 watch="" code=0
  shift 2
  [ -z "$TINY" ] || cards=2
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=index,utilization.gpu,memory.used --format=csv,noheader,nounits -l 1 >"$RESULTS/busy_$name.csv" &
    watch=$!
  fi
  on "$(seq -s , 0 $((cards - 1)))" limited "steps_$name" 280 $PYTHON -m benchmarks.step_gpu --shapes $shapes \
    --folder "$MODELS/steps_$shapes" --case w8a8 --cards "$cards" --optimizer adamw "${sizes[@]}" --limit-s 260 \
    --log "$RESULTS/run_$name.log" --out "$RESULTS/steps.jsonl" optimizer.offload=false "${more[@]}" "$@" || code=$?
  [ -z "$watch" ] || {
    kill "$watch"
    # The second half of its seconds: steps, and not the start.
    tail -n "$(($(wc -l <"$RESULTS/busy_$name.csv") / 2))" "$RESULTS/busy_$name.csv" |
      awk -F , -v name="$name" '{n[$1]++; s[$1] += $2} END {for (i in n) printf "%s: card %s busy %.0f %%\n", name, i, s[i] / n[i]}'
  }
  return $code
}
steps synchronous "$gpus"
half=$((gpus / 2))
for staleness in $stales; do
  apart=(rollout.engine.replicas=$half "rollout.engine.visible_gpus=$(seq -s ';' $half $((gpus - 1)))" rollout.engine.shares_gpus=false)
  apart+=(rollout.engine.max_num_seqs=$seqs train.asynchronous.max_staleness=$staleness)
  steps stale$staleness $half "${apart[@]}" || steps stale${staleness}_host $half "${apart[@]}" rollout.engine.transport=host
done
until grep -q "^step 1/" "$RESULTS/run_killed.log" 2>/dev/null; do sleep 1; done && pkill -9 -o -f "qarl_bridge --socket" &
apart=("${apart[@]/max_staleness=*/max_staleness=1}")
[ -z "$TINY" ] || sizes+=(--steps 60) # a step takes half a second
steps killed $half "${apart[@]}"
grep -h "engine" "$RESULTS/run_killed.log" | cut -c 1-200 | tail -n 5
