# Rollouts at 7B shapes (SIZE=14b: 14B's): NVFP4, int4 and BF16 by the bridge's kernels and by vLLM's own, 8 to 256 sequences, no adapters.
# TINY=1 tries the command on a CPU.
shapes=qwen2.5-${SIZE:-7b} sizes=(--sequences 8 64 128 256)
if [ -n "${TINY:-}" ]; then
  shapes=tiny-qwen2.5 sizes=(--sequences 4 --response-len 8)
else
  bash benchmarks/offline_host.sh await
fi
python3 -m benchmarks.engine_price --shapes "$shapes" --schemes nvfp4 w4a16 bf16 "${sizes[@]}" --apart --transport host \
  --out "$RESULTS/rollout.$shapes.jsonl"
