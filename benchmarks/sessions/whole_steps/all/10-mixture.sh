# Qwen3-30B-A3B over two cards: LAYERS CASE RESPONSES TOKENS UPDATES STEPS [NAME SETTING...], in the order of what is
# missed most.
step() {
  left=$(($(bash benchmarks/offline_host.sh left) - 25))
  [ $left -gt 90 ] || return 0
  name=a$1_$2_$3_$4${7:+_$7}
  python3 -m benchmarks.step_gpu --shapes 30b-a3b --layers $1 --cards 2 --folder "$MODELS/a$1" --case $2 --batch $3 \
    --response-len $4 --updates $5 --steps $6 --limit-s $left --run-dir "/tmp/run_$name" --log "$RESULTS/step_$name.log" \
    --out "$RESULTS/step_mixture.jsonl" checkpoint.every=0 "${@:8}"
  cp "/tmp/run_$name/metrics.jsonl" "$RESULTS/step_$name.metrics.jsonl"
}
VLLM_USE_V2_MODEL_RUNNER=1 step 24 w4a16 128 1024 4 2 v2 optimizer.matmul_precision=bfloat16
step 24 w8a8 128 1024 4 2
step 24 fp8 128 1024 4 1
step 48 w4a16 256 1024 8 1
step 24 bf16 128 1024 4 2 profiled "rollout.engine.profile=$RESULTS/profile"
step 48 w4a16 128 4096 16 1
