# The 1.5B before any RL, then programs with the 0.5B, which made six steps while a program that never ends was waited for
# 10 s. Models must come to MODELS, and the suites' questions to data/packages.
bash benchmarks/offline_host.sh await "$MODELS/qwen25-coder-0.5b/config.json" "$MODELS/qwen25-coder-1.5b/config.json"
MODEL=$MODELS/qwen25-coder-1.5b CARDS=$CARD JOBS=2 bash experiments/qwen25_coder/stretch.sh "$RESULTS/work_1.5b_base" 400 \
  base:bf16 base:w4a16 -- rollout.engine.kv_cache_gb=9 rollout.engine.gpu_memory_utilization=0.15
MODEL=$MODELS/qwen25-coder-0.5b CARDS=$CARD JOBS=1 EVAL_S=150 \
  bash experiments/qwen25_coder/stretch.sh "$RESULTS/work" $(($(bash benchmarks/offline_host.sh left) - 30)) code_qarl_w4a16:0
