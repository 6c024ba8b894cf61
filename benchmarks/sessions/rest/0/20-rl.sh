# What the 0.5B has not been trained on: programs, and QuRL's PPO under int8. The model must come to MODELS, and the suites'
# questions to data/packages.
bash benchmarks/offline_host.sh await "$MODELS/qwen25-coder-0.5b/config.json"
MODEL=$MODELS/qwen25-coder-0.5b CARDS=$CARD JOBS=2 EVAL_S=150 \
  bash experiments/qwen25_coder/stretch.sh "$RESULTS/work" $(($(bash benchmarks/offline_host.sh left) - 30)) \
  code_qarl_w4a16:0 qurl_ppo_w8a8:0 base:w8a8
