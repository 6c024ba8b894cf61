# Whole steps of adapters of rank 32 on an NVFP4 base, learner and engine on one card, random weights that are quantized one
# by one: 32B first, then 14B and 7B, with BF16 LoRA beside the last two. Responses end by chance after 400 tokens in the
# mean, a geometric distribution, at most 2,048; one step of 32B has full lengths. TINY=1 tries the commands on a CPU.
steps=5 batch=64 length=2048 mean=400 more=() sizes=(32b 14b 7b) family=qwen2.5
if [ -n "${TINY:-}" ]; then
  steps=1 batch=16 length=8 mean=4 sizes=(qwen2.5) family=tiny
  more=(model.attention=xla rollout.engine.kv_cache_gb=0.1 rollout.engine.threads=1 train.row_len=80)
else
  bash benchmarks/offline_host.sh await
fi
run() { # shape, case, mean length, steps
  python3 -m benchmarks.step_gpu --shapes "$family-$1" --folder "$MODELS/$family-$1-$3" --case "$2" --lora-rank 32 \
    --batch "$batch" --response-len "$length" --mean-len "$3" --steps "$4" --log "$RESULTS/step_$1_$2_$3.log" \
    --out "$RESULTS/steps.jsonl" "${more[@]}"
}
for size in "${sizes[@]}"; do run "$size" nvfp4 "$mean" "$steps"; done
[ -n "${TINY:-}" ] || run 32b nvfp4 0 1
for size in "${sizes[@]}"; do [ "$size" = 32b ] || run "$size" bf16 "$mean" "$steps"; done
