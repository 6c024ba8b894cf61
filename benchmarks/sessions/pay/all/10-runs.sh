# What the 1.5B's plan lacks: runs that share a GPU, the next when one of them ends. While the model arrives, two runs of one
# step with random weights and short responses compile what the runs will need.
# FORMAT=w3a16: the plan's next part, in its order. RUNS="base:w3a16 base:w4a16:g-1" first says which format that is.
# LORA=1: the runs of PLAN_lora.md, three on a GPU of 141 GB (JOBS=4: four) or two on one of 80 GB, STEPS (20) each. RUNS: other runs.
# TINY=1 LORA=1 RESULTS=DIR MODELS=DIR QUEUE=DIR tries every arm on a CPU with the real 0.5B.
tiny=${TINY:-} lora=${LORA:-} python=${PYTHON:-python3} configs=configs/qwen25_coder_0p5b more=()
model=$MODELS/qwen25-coder-1.5b
arms=(aligned_grpo_w4a16 bf16_grpo rollout_w4a16_tbpo) runs=()
for seed in 1 2 3; do for arm in "${arms[@]}"; do runs+=("$arm:$seed"); done; done
runs+=(base:w4a16 base:bf16)
if [ -n "${FORMAT:-}" ]; then
  pairs=()
  for seed in 1 2 3 4 5 6; do pairs+=("qarl_w4a16:$seed" "rollout_w4a16_grpo:$seed"); done
  runs=("${pairs[@]}" {aligned_grpo_w4a16,rollout_w4a16_tbpo,bf16_grpo}:{1,2,3})
fi
if [ -n "$lora" ]; then
  mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits -i 0 2>/dev/null || echo 0)
  [ "$mib" -gt 100000 ] || export JOBS=${JOBS:-2} FRACTION=${FRACTION:-0.24} # the learner is planned to take 15.2 GiB
  export CONFIG=lora JOBS=${JOBS:-3} LEAST=${LEAST:-400}
  more=(train.steps="${STEPS:-20}")
  [ "$JOBS" -lt 4 ] || { # four on a GPU of 141 GB: each has 17.5 GiB for its learner
    export FRACTION=${FRACTION:-0.125}
    more+=(rollout.engine.kv_cache_gb=4.5 rollout.engine.gpu_memory_utilization=0.1)
  }
  # What results_lora.tar.xz lacks.
  runs=(rollout_w4a16_grpo:{1,2,3} bf16_grpo:1 qarl_w8a8:1 base:w4a16 base:bf16 base:w8a8 {bf16_grpo,qarl_w8a8}:{2,3})
fi
if [ -n "$tiny" ]; then
  export JOBS=1 LEAST=1
  model=$MODELS/qwen25-coder-0.5b runs=(qarl_w4a16:1 rollout_w4a16_grpo:1 bf16_grpo:1 qarl_w8a8:1 base:w8a8)
  source experiments/qwen25_coder/tiny.sh
  more=("${tiny_step[@]}" train.steps=1)
  gpus=1
else
  until [ -e "$SITE/installed" ]; do sleep 0.5; done
  gpus=$(nvidia-smi --list-gpus | wc -l)
  for warm in 0:qarl_w4a16 1:rollout_w4a16_grpo; do
    arm=${warm#*:}
    CUDA_VISIBLE_DEVICES=$((${warm%:*} % gpus)) timeout -s KILL 110 env ${lora:+XLA_PYTHON_CLIENT_MEM_FRACTION=0.33} "$python" \
      -m qarl_jax.train --config "$configs/${CONFIG:-$arm}.yaml" ${CONFIG:+"arm=$arm"} model.path="$model" \
      model.init=random run_dir="/tmp/warm/$arm" train.steps=1 rollout.max_response_len=32 \
      rollout.engine.gpu_memory_utilization=0.13 eval.at_start=false eval.at_end=false eval.every=0 \
      checkpoint.every=0 checkpoint.at_end=false log.view=lines >"$QUEUE/warm_$arm.log" 2>&1 &
  done
  wait
  until [ -e "$model/ready" ]; do sleep 0.5; done
fi
[ -z "${RUNS:-}" ] || read -r -a runs <<<"$RUNS"
share=$(($(nproc) / gpus))
for gpu in $(seq 0 $((gpus - 1))); do
  work=$RESULTS/$gpu these=()
  mkdir -p "$work"
  [ -e "$work/questions.jsonl" ] ||
    tar xJf experiments/qwen25_coder/results_1p5b_plan.tar.xz -O runs/questions/questions.jsonl >"$work/questions.jsonl"
  for number in "${!runs[@]}"; do [ $((number % gpus)) != "$gpu" ] || these+=("${runs[number]}"); done
  CARDS=$gpu MODEL=$model taskset -c $((gpu * share))-$(((gpu + 1) * share - 1)) bash \
    experiments/qwen25_coder/plan_1p5b.sh "$work" $(($(bash benchmarks/offline_host.sh left) - 5)) "${these[@]}" -- "${more[@]}" &
done
wait
