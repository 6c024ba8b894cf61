# What no record in benchmarks/results has yet of recipes at their own lengths, random weights, three steps of an update of 64
# responses each: on four GPUs of 141 GB or of 80, or `2x80` alone on two of 80 GB. On two of 141 GB QaRL's runs with
# responses of 16,384 tokens, 8B with all parameters and 30B-A3B with adapters.
# TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU, in nine minutes.
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

if [ -n "$TINY" ]; then
  recipe 1x24 0 $recipes arm=1x24
  exit
fi
bash benchmarks/offline_host.sh await
nvidia-smi --query-gpu=timestamp,index,memory.used --format=csv,noheader,nounits -lms 500 >"$RESULTS/memory.csv" &
watch=$!
disown "$watch" # nobody waits for it
memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits -i 0)
if [ "$memory" -gt 100000 ] && [ "$gpus" = 2 ]; then
  EACH=1 long 8b 0 & # its KV cache holds eight such responses
  long 30b_a3b 1 lora.rank=32 optimizer.name=adamw optimizer.offload=false &
  wait
elif [ "$memory" -gt 100000 ]; then
  for arm in 4x141_moe 4x141; do recipe $arm 0,1,2,3 $recipes arm=$arm; done
  long 8b 0,1,2,3
elif [ "$gpus" = 2 ]; then
  recipe 2x80 0,1 $recipes arm=2x80
else
  recipe 2x80 0,1 $recipes arm=2x80 &
  recipe 1x80_lora 2 $recipes arm=1x80_lora &
  wait
  recipe 4x80 0,1,2,3 $recipes arm=4x80
  long 8b 0,1,2,3
fi
kill "$watch"
