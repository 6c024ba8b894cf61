# Rollouts at 7B shapes (SIZE=14b: 14B's) with adapters of rank 32: NVFP4, BF16 and int4 by the bridge's kernels, 8 to 256
# sequences. SCHEMES chooses. TINY=1 tries the command on a CPU.
shapes=qwen2.5-${SIZE:-7b} sizes=(--sequences 8 64 256 --lora-rank 32 --staging-buffers 0)
if [ -n "${TINY:-}" ]; then
  shapes=tiny-qwen2.5 sizes=(--sequences 4 --response-len 8 --lora-rank 8)
else
  bash benchmarks/offline_host.sh await
fi
python3 -m benchmarks.engine_price --shapes "$shapes" --schemes ${SCHEMES:-nvfp4 bf16 w4a16} "${sizes[@]}" --apart --transport host \
  --arithmetics batch_invariant --out "$RESULTS/rollout.$shapes.jsonl"
