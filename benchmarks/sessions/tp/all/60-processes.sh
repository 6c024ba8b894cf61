# One process with all GPUs beside one process a GPU, each with an engine on its own: whole steps, 1.7B shapes (or
# SHAPES=8b) under w8a8, two updates. A line of one.jsonl and of processes.jsonl; seconds of steps and of publishing.
# Then a process is killed after two steps, and the same command goes on.
source benchmarks/sessions/tp/common.sh
sizes=(--batch 512 --response-len 1024 --mean-len 400 --updates 2 --steps 4) more=()
shapes=${SHAPES:-$shapes} processes=$gpus
if [ -n "$TINY" ]; then
  processes=2 sizes=(--batch 16 --response-len 16 --updates 2 --steps 2)
  more=(model.attention=xla rollout.engine.kv_cache_gb=0.1 rollout.engine.threads=1)
  simulated 2
fi
limited one_process 300 $PYTHON -m benchmarks.step_gpu --shapes $shapes --folder "$MODELS/steps_$shapes" --case w8a8 \
  --cards $processes --optimizer adamw "${sizes[@]}" --limit-s 280 --log "$RESULTS/one_process.run.log" \
  --out "$RESULTS/one.jsonl" optimizer.offload=false "${more[@]}"
[ -z "$TINY" ] || simulated 1
processes() { # NAME RUN OVERRIDES...
  limited "$1" 300 $PYTHON -m benchmarks.step_processes "$RESULTS/one.jsonl" --processes $processes --limit-s 280 \
    --run-dir "$RESULTS/$2" ${TINY:+--cpu} --out "$RESULTS/processes.jsonl" "${@:3}"
}
processes processes run_processes
until grep -q "^step 1/" "$RESULTS/run_killed.0.log" 2>/dev/null; do sleep 1; done &&
  pkill -9 -f "run_dir=[^ ]*run_killed .*distributed.process_id=1" &
processes killed run_killed checkpoint.every=1 || true
processes goes_on run_killed checkpoint.every=1
