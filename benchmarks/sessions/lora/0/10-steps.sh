# 8B on one H100 of 80 GB, 128 responses of 1,024 tokens: adapters of rank 32 on two bases, all parameters, then
# responses of 16,384 tokens, then a third base. TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU.
source benchmarks/sessions/tp/common.sh
small=(--shapes 8b --batch 128 --rows 1)
[ -z "$TINY" ] || {
  small=(--shapes tiny --batch 8 --response-len 8 --rows 1 --layers 1)
  more=(model.attention=xla rollout.engine.memory=given rollout.engine.kv_cache_gb=0.2 rollout.engine.threads=1)
}
[ -n "$TINY" ] || bash benchmarks/offline_host.sh await
step() { # NAME OPTIONS...
  local name=$1
  shift
  limited "$name" 400 $PYTHON -m benchmarks.step_gpu "${small[@]}" --folder "$MODELS/8b" --limit-s 380 --steps 2 \
    --log "$RESULTS/run_$name.log" --out "$RESULTS/steps.jsonl" "$@" "${more[@]}" || true
}
step lora_w4a16 --case w4a16 --lora-rank 32
step lora_bf16 --case bf16 --lora-rank 32
step full_w4a16 --case w4a16 model.param_dtype=bfloat16 optimizer.master_rounding=stochastic
[ -n "$TINY" ] || limited long 560 $PYTHON -m benchmarks.step_gpu --recipe configs/papers/qwen3_8b_base.yaml --steps 2 \
  --folder "$MODELS/long" --updates 1 --limit-s 550 --log "$RESULTS/run_long.log" --out "$RESULTS/recipes.jsonl" \
  arm=tbpo lora.rank=32 train.micro_batch_rows=1 train.prompts_per_step=1 train.prompts_per_update=1 || true
step lora_w8a8 --case w8a8 --lora-rank 32
