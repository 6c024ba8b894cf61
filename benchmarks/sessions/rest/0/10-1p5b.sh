# The 1.5B, QaRL beside bf16, as many steps as there is time for. Their names are those of the 0.5B's: not to be merged.
bash benchmarks/offline_host.sh await "$MODELS/qwen25-coder-1.5b/config.json"
MODEL=$MODELS/qwen25-coder-1.5b CARDS=$CARD JOBS=2 EVAL_S=200 LEAST=300 \
  bash experiments/qwen25_coder/stretch.sh "$RESULTS/work_1.5b" $(($(bash benchmarks/offline_host.sh left) - 30)) \
  qarl_w4a16:0 bf16_grpo:0 -- rollout.engine.kv_cache_gb=9 rollout.engine.gpu_memory_utilization=0.15
