# MODELS/qwen25-coder-0.5b must be there, and the suites' questions in data/packages (make data, or offline_host.sh unpack).
until [ -e "$MODELS/qwen25-coder-0.5b/config.json" ] && python3 -c 'import vllm' 2>/dev/null; do sleep 2; done
seconds=$(($(bash benchmarks/offline_host.sh left) - 30))
MODEL=$MODELS/qwen25-coder-0.5b CARDS=$CARD JOBS=2 EVAL_S=150 LEAST=400 \
  bash experiments/qwen25_coder/stretch.sh "$RESULTS/work_$CARD" $seconds \
  rollout_w4a16_grpo:2 rollout_w4a16_tbpo:2 positive_grpo_w4a16:0 bf16_tbpo:0 base:w4a16 base:fp8
