# Whole steps of adapters of rank 32, learner and engine on one card, random weights that are quantized one by one: an NVFP4 base
# at 32B, 14B and 7B, and BF16 LoRA beside the last two. Responses end by chance after 400 tokens in the mean, a geometric
# distribution, at most 2,048; one step of 32B has full lengths (a mean of 0). RUNS, SIZE:CASE:MEAN..., and STEPS choose.
# TINY=1 tries the commands on a CPU.
runs=${RUNS:-32b:nvfp4:400 14b:nvfp4:400 7b:nvfp4:400 32b:nvfp4:0 14b:bf16:400 7b:bf16:400}
batch=64 length=2048 more=() family=qwen2.5
if [ -n "${TINY:-}" ]; then
  runs="qwen2.5:nvfp4:4 qwen2.5:bf16:0" STEPS=1 batch=16 length=8 family=tiny
  more=(model.attention=xla rollout.engine.kv_cache_gb=0.1 rollout.engine.threads=1 train.row_len=80)
else
  bash benchmarks/offline_host.sh await
fi
for run in $runs; do
  IFS=: read -r size case mean <<<"$run"
  left=420 steps=${STEPS:-5}
  [ -n "${TINY:-}" ] || left=$(($(bash benchmarks/offline_host.sh left) - 20))
  [ "$left" -gt 150 ] || { echo "$run: only $left s are left" && continue; }
  [ "$mean" != 0 ] || steps=1
  python3 -m benchmarks.step_gpu --shapes "$family-$size" --folder "$MODELS/$family-$size-$mean" --case "$case" --lora-rank 32 \
    --batch "$batch" --response-len "$length" --mean-len "$mean" --steps "$steps" --limit-s "$left" \
    --log "$RESULTS/step_$size.$case.$mean.log" --out "$RESULTS/steps.jsonl" "${more[@]}" || tail -n 30 "$RESULTS/step_$size.$case.$mean.log"
done
