# Whole steps of 1.7B shapes under w8a8 through one engine over two GPUs, which the learner shares.
source benchmarks/sessions/tp/common.sh
sizes=(--batch 256 --response-len 1024 --mean-len 400 --updates 2 --steps 3) gpus=0,1 more=()
if [ -n "$TINY" ]; then
  simulated 2
  sizes=(--batch 16 --response-len 16 --updates 2 --steps 2) gpus=""
  more=(model.attention=xla rollout.engine.kv_cache_gb=0.1 rollout.engine.threads=1)
fi
on 0,1 limited steps_tp2 300 $PYTHON -m benchmarks.step_gpu --shapes $shapes --folder "$MODELS/steps_$shapes" --case w8a8 \
  --cards 2 --optimizer adamw "${sizes[@]}" --limit-s 280 --log "$RESULTS/run_tp2.log" --out "$RESULTS/steps.jsonl" \
  optimizer.offload=false rollout.engine.tensor_parallel_size=2 rollout.engine.replicas=0 \
  rollout.engine.visible_gpus="$gpus" "${more[@]}"
