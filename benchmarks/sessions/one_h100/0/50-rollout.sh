# Rollouts at 7B shapes: NVFP4, int4 and BF16 by the bridge's kernels and by vLLM's own, 8 to 256 sequences.
timeout 280 python3 -m benchmarks.engine_price --shapes qwen2.5-7b --schemes nvfp4 w4a16 bf16 --sequences 8 64 256 --apart \
  --transport host --out "$RESULTS/rollout.jsonl"
