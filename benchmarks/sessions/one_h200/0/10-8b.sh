# 8B, 128 responses of 1,024 tokens, from the plan's own settings to those that leave room for less recomputation: moments
# in int8, masters in bfloat16 rounded stochastically, a low-bit backward; the fastest first, and bf16 beside it.
bash benchmarks/offline_host.sh await
step() {
  python3 -m benchmarks.step_gpu --shapes 8b --folder "$MODELS/8b" --log "$RESULTS/step.$((++count)).log" --steps 3 \
    --limit-s $(($(bash benchmarks/offline_host.sh left) - 20)) --out "$RESULTS/steps.jsonl" "$@"
}
rounded=(model.param_dtype=bfloat16 optimizer.master_rounding=stochastic optimizer.moment_dtype=int8)
fast=("${rounded[@]}" optimizer.matmul_precision=bfloat16 quant.code_flips=false)
step --case w8a8 "${fast[@]}"
step --case w8a8 "${fast[@]}" quant.backward=int8
step --case bf16 "${fast[@]}"
step --case w4a16 "${fast[@]}"
step --case w8a8 "${rounded[@]}"
step --case w8a8
step --case w8a8 optimizer.moment_dtype=int8
