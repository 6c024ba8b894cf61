# What the 1.5B's plan lacks: three runs a GPU, the third when one of the first two ends. While the model arrives,
# two runs of one step with random weights and short responses compile what the runs will need.
model=$MODELS/qwen25-coder-1.5b
until [ -e "$SITE/installed" ]; do sleep 0.5; done
for warm in 0:qarl_w4a16 1:rollout_w4a16_grpo; do
  CUDA_VISIBLE_DEVICES=${warm%:*} timeout -s KILL 110 python3 -m qarl_jax.train \
    --config "configs/qwen25_coder_0p5b/${warm#*:}.yaml" model.path="$model" model.init=random run_dir="/tmp/warm/$warm" \
    train.steps=1 rollout.max_response_len=32 eval.at_start=false eval.at_end=false eval.every=0 \
    checkpoint.every=0 checkpoint.at_end=false log.view=lines >"$QUEUE/warm_$warm.log" 2>&1 &
done
wait
until [ -e "$model/ready" ]; do sleep 0.5; done
arms=(aligned_grpo_w4a16 bf16_grpo rollout_w4a16_tbpo) runs=()
for seed in 1 2 3; do for arm in "${arms[@]}"; do runs+=("$arm:$seed"); done; done
runs+=(base:w4a16 base:bf16)
gpus=$(nvidia-smi --list-gpus | wc -l) share=$(($(nproc) / gpus))
for gpu in $(seq 0 $((gpus - 1))); do
  work=$RESULTS/$gpu these=()
  mkdir -p "$work" && cp /tmp/in/questions.jsonl "$work"
  for number in "${!runs[@]}"; do [ $((number % gpus)) != "$gpu" ] || these+=("${runs[number]}"); done
  CARDS=$gpu MODEL=$model taskset -c $((gpu * share))-$(((gpu + 1) * share - 1)) bash \
    experiments/qwen25_coder/plan_1p5b.sh "$work" $(($(bash benchmarks/offline_host.sh left) - 5)) "${these[@]}" &
done
wait
