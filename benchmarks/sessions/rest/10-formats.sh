# A real policy under a format that it was not trained with: k3 and equal tokens of two steps, aligned and not.
formats=(w8a8 fp8)
bash benchmarks/offline_host.sh await "$MODELS/qwen25-coder-0.5b/config.json"
FORMAT=${formats[$CARD]} MODEL=$MODELS/qwen25-coder-0.5b CARDS=$CARD JOBS=2 SUITES=gsm8k EVAL_S=60 \
  bash experiments/qwen25_coder/stretch.sh "$RESULTS/work_$CARD" 240 qarl_w4a16:0 rollout_w4a16_grpo:0 -- train.steps=2
