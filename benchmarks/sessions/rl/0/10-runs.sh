# The model must come to MODELS, and the suites' questions to data/packages (make data, or offline_host.sh unpack). Two
# runs on a card take 460 s on an H200, and 150 s to be judged.
bash benchmarks/offline_host.sh await "$MODELS/qwen25-coder-0.5b/config.json"
seconds=$(($(bash benchmarks/offline_host.sh left) - 30))
MODEL=$MODELS/qwen25-coder-0.5b CARDS=$(nvidia-smi --query-gpu=index --format=csv,noheader | xargs) JOBS=2 EVAL_S=150 LEAST=400 \
  bash experiments/qwen25_coder/stretch.sh "$RESULTS/work" $seconds \
  rollout_w4a16_{grpo,tbpo}:1 bf16_grpo:2 rollout_w4a16_{grpo,tbpo}:2 \
  {seqmis,opsm,positive}_grpo_w4a16:0 bf16_tbpo:0 base:{bf16,w4a16,fp8}
