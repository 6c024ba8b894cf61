# A recipe's run at its own lengths: random weights, a step that warms up and STEPS more, an update each of 8 * PROMPTS responses.
source benchmarks/sessions/tp/common.sh
recipes=configs/gpu/recipes.yaml papers=configs/papers

# recipe NAME GPUS CONFIG OVERRIDES...: the arm is among the overrides.
recipe() {
  local name=$1 gpus=$2 config=$3 count more=() prompts=${PROMPTS:-8}
  shift 3
  count=$(($(tr -cd , <<<"$gpus" | wc -c) + 1))
  [ -z "$TINY" ] || {
    count=1 prompts=1
    more=(model.attention=xla rollout.max_response_len=8 rollout.engine.max_model_len=640 rollout.engine.max_num_seqs=8)
    more+=(rollout.engine.memory=given rollout.engine.kv_cache_gb=0.2 rollout.engine.threads=1 train.micro_batch_rows=1)
  }
  on "$gpus" limited "recipe_$name" "${LIMIT:-560}" $PYTHON -m benchmarks.step_gpu --recipe "$config" --steps "${STEPS:-2}" \
    --folder "$MODELS/$name" ${TINY:+--layers 1} --cards "$count" --updates 1 --limit-s $((${LIMIT:-560} - 20)) \
    --log "$RESULTS/run_$name.log" --out "$RESULTS/recipes.jsonl" "$@" \
    train.prompts_per_step="$prompts" train.prompts_per_update="$prompts" "${more[@]}" || true
}

long() { # MODEL GPUS OVERRIDES...: responses of the paper's length
  local gpus=$2 count=$(($(tr -cd , <<<"$2" | wc -c) + 1))
  local left=$(bash benchmarks/offline_host.sh left)
  PROMPTS=$((${EACH:-2} * count)) LIMIT=900 STEPS=$((left > 700 ? 2 : 1)) recipe "$1_16k_$count" "$gpus" "$papers/qwen3_$1_base.yaml" arm=tbpo \
    train.micro_batch_rows="$count" "${@:3}"
}

memory() { # every half second, into memory.csv; nobody waits for it
  nvidia-smi --query-gpu=timestamp,index,memory.used --format=csv,noheader,nounits -lms 500 >"$RESULTS/memory.csv" &
  watch=$!
  disown "$watch"
}
