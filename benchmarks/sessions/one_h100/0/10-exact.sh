# Bits, none of these processes timed: gates of adapters at 1.7B shapes two at a time, then nvfp4's beside its layers' tests.
bash benchmarks/offline_host.sh await
python3 -m benchmarks.random_folder "$MODELS/1.7b" --shapes 1.7b
gate() { # name, words
  timeout 420 python3 -m benchmarks.gate --model "$MODELS/1.7b" --sequences 64 --response-len 256 --kv-cache-gb 4 \
    --gpu-memory-utilization 0.25 "${@:2}" --json "$RESULTS/gate_$1.json" >"$RESULTS/gate_$1.log" 2>&1 || echo "gate $1: $?"
}
gate lora_a --schemes nvfp4 w8a8 --lora-rank 32 --updates 2 --engine-log "$RESULTS/engine_lora_a.log" &
gate lora_b --schemes w4a16 bf16 --lora-rank 32 --updates 2 --engine-log "$RESULTS/engine_lora_b.log" &
wait
gate nvfp4 --schemes nvfp4 --engine-log "$RESULTS/engine_nvfp4.log" &
JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false timeout 400 python3 -m pytest -q -m gpu \
  tests/gpu/test_cuda_ops.py tests/gpu/test_cuda_expert_ops.py -p no:cacheprovider >"$RESULTS/exact.log" 2>&1 || echo "exact: $?"
wait
