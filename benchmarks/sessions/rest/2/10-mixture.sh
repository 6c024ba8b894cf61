# Qwen3-30B-A3B over cards 2 and 3: LAYERS CASE RESPONSES TOKENS UPDATES STEPS [SETTING...]. First versions in
# parts, whose pieces were joined many times over when they were last timed.
step() {
  left=$(($(bash benchmarks/offline_host.sh left) - 20))
  [ $left -gt 110 ] || { echo "no time for $*" && return; }
  name=a$1_$2_$3_$4
  CUDA_VISIBLE_DEVICES=2,3 taskset -c $(($(nproc) / 2))-$(($(nproc) - 1)) \
    python3 -m benchmarks.step_gpu --shapes 30b-a3b --layers $1 --cards 2 --folder "$MODELS/a$1" --case $2 --batch $3 \
    --response-len $4 --updates $5 --steps $6 --limit-s $left --run-dir "/tmp/run_$name" --log "$RESULTS/step_$name.log" \
    --out "$RESULTS/step_mixture.jsonl" checkpoint.every=0 optimizer.matmul_precision=bfloat16 "${@:7}"
  cp "/tmp/run_$name/metrics.jsonl" "$RESULTS/step_$name.metrics.jsonl"
}
bash benchmarks/offline_host.sh await
step 48 w8a8 128 1024 4 2 rollout.engine.staging_buffers=0
step 48 w4a16 128 4096 16 1
step 40 bf16 128 1024 8 1 rollout.engine.staging_buffers=0
step 40 w4a16 128 1024 8 1
step 48 fp8 128 1024 4 1 rollout.engine.staging_buffers=0
