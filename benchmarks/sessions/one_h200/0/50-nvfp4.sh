# NVFP4 at 8B: the gate, then the price of batch-invariance over vLLM's own kernel.
# TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU.
source benchmarks/sessions/tp/common.sh
export XLA_PYTHON_CLIENT_PREALLOCATE=false
shapes=8b priced=(--sequences 64 128 --apart --arithmetics batch_invariant vllm)
if [ -n "$TINY" ]; then
  shapes=tiny priced=(--sequences 4 --response-len 8 --arithmetics batch_invariant)
else
  bash benchmarks/offline_host.sh await
fi
model=$MODELS/$shapes
[ -e "$model/config.json" ] || $PYTHON -m benchmarks.random_folder "$model" --shapes "$shapes"
# The second version's staging buffer of 6 GiB finds no room where JAX grows to three quarters of the GPU.
XLA_PYTHON_CLIENT_MEM_FRACTION=0.65 limited gate.8b.nvfp4 240 $PYTHON -m benchmarks.gate --model "$model" --schemes nvfp4 --gpu-memory-utilization 0.2 "${sizes[@]}" \
  --json "$RESULTS/gate.8b.nvfp4.json" || true
limited price.8b.nvfp4 300 $PYTHON -m benchmarks.engine_price --shapes "$shapes" --schemes nvfp4 "${priced[@]}" \
  --out "$RESULTS/price.jsonl" || true
