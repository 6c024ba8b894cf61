# Where a step's time goes: a GPU's kernels in 32 decode steps (*/steps.kernels.txt), and in an update (the trainer's trace,
# summed up by kernel): Qwen2.5-32B shapes with adapters on an NVFP4 base, 8B with adapters on w4a16, then 8B w8a8 with
# float32 masters and with rounded ones. ONLY="32b 8blora 8b 8bfast" chooses. TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU, which has no such kernels.
source benchmarks/sessions/tp/common.sh
profiled() { # NAME SECONDS OPTIONS...
  local name=$1 most=$2
  shift 2
  [[ " ${ONLY:-${name%%_*}} " = *" ${name%%_*} "* ]] || return 0
  rm -rf "$RESULTS/run.$name"
  limited "$name" "$most" $PYTHON -m benchmarks.step_gpu --limit-s $((most - 20)) --run-dir "$RESULTS/run.$name" \
    --log "$RESULTS/run.$name.log" --out "$RESULTS/steps.jsonl" "$@" checkpoint.every=0 train.profile_steps=[1] \
    rollout.engine.profile="$RESULTS/$name" "${more[@]}" || true
  $PYTHON -m benchmarks.trace_summary "$RESULTS/run.$name/profile" --top 40 >"$RESULTS/$name.update.txt" || true
  rm -rf "$RESULTS/run.$name/profile"
}
shapes=qwen2.5-32b lora=(--batch 64 --response-len 2048 --mean-len 400 --steps 1 --rows 1) more=()
dense=8b full=(--batch 128 --response-len 1024 --steps 2)
if [ -n "$TINY" ]; then
  shapes=tiny-qwen2.5 lora=(--batch 16 --response-len 8 --mean-len 4 --steps 2 --rows 2)
  dense=tiny full=(--batch 16 --response-len 8 --steps 2 --rows 1)
  more=(model.attention=xla rollout.engine.kv_cache_gb=0.1 rollout.engine.threads=1)
else
  bash benchmarks/offline_host.sh await
fi
profiled 32b_nvfp4 420 --shapes $shapes --folder "$MODELS/$shapes" --case nvfp4 --lora-rank 32 "${lora[@]}"
profiled 8blora_w4a16 240 --shapes $dense --folder "$MODELS/$dense" --case w4a16 --lora-rank 32 "${full[@]}"
profiled 8b_w8a8 280 --shapes $dense --folder "$MODELS/$dense" --case w8a8 "${full[@]}"
profiled 8bfast_w8a8 260 --shapes $dense --folder "$MODELS/$dense" --case w8a8 "${full[@]}" model.param_dtype=bfloat16 \
  optimizer.master_rounding=stochastic optimizer.moment_dtype=int8 optimizer.second_moment_dtype=int8 \
  optimizer.matmul_precision=bfloat16 quant.code_flips=false
