# Whole steps on four cards, 1.7B shapes under w8a8: synchronous, the learner over all four with an engine on each;
# then staleness 1 and 4, the learner on two and engines on the other two. Tokens per second are in the lines, the busy
# share of each card, once a second, in busy_*.csv. TINY=1 tries it on a CPU.
source benchmarks/sessions/tp/common.sh
shapes=1.7b sizes=(--batch 512 --response-len 1024 --mean-len 400 --updates 4 --steps 4) seqs=256 stales="1 4"
more=()
if [ -n "$TINY" ]; then
  export XLA_FLAGS=--xla_force_host_platform_device_count=2
  shapes=tiny sizes=(--batch 16 --response-len 16 --updates 2 --steps 2) seqs=8 stales=1
  more=(model.attention=xla rollout.engine.kv_cache_gb=0.1 rollout.engine.threads=1)
fi

# steps NAME CARDS_OF_THE_LEARNER OVERRIDES...
steps() {
  local name=$1 cards=$2 watch=
  shift 2
  [ -z "$TINY" ] || cards=2
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=timestamp,index,utilization.gpu,memory.used --format=csv,noheader -l 1 >"$RESULTS/busy_$name.csv" &
    watch=$!
  fi
  limited "steps_$name" 330 $PYTHON -m benchmarks.step_gpu --shapes $shapes --folder "$MODELS/steps_$shapes" --case w8a8 \
    --cards $cards --optimizer adamw "${sizes[@]}" --limit-s 310 --log "$RESULTS/run_$name.log" \
    --out "$RESULTS/steps.jsonl" optimizer.offload=false "${more[@]}" "$@"
  [ -z "$watch" ] || kill $watch
}
on 0,1,2,3 steps synchronous 4
for staleness in $stales; do
  on 0,1 steps stale$staleness 2 train.asynchronous.max_staleness=$staleness rollout.engine.replicas=2 \
    "rollout.engine.visible_gpus=2;3" rollout.engine.shares_gpus=false rollout.engine.max_num_seqs=$seqs
done
