# Products of weights with codes on a Hopper GPU: the learner's bits, microseconds by scheme, and the gate at 1.7B with
# activations of two and four bits, and with embedding and head in four. TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU.
source benchmarks/sessions/tp/common.sh
schemes=(w2a2:g32 w4a4:g32) model=$MODELS/$shapes products=(--shapes 8b qwen2.5-32b --rows 1 8 64 128 256 --layers 2
  --repeats 15 --schemes nvfp4 w4a16 w2a16_asym:g32 w3a16_asym:g32 w2a2:g32)
if [ -n "$TINY" ]; then
  products=(--shapes tiny --rows 1 8 --layers 2 --repeats 3 --schemes w2a16_asym:g32 w2a2:g32)
else
  bash benchmarks/offline_host.sh await
  JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false limited exact 240 $PYTHON -m pytest -q -m gpu \
    -p no:cacheprovider tests/gpu/test_cuda_ops.py tests/gpu/test_cuda_expert_ops.py tests/gpu/test_cuda_norm_ops.py || true
fi
limited products 150 $PYTHON -m benchmarks.low_bit_products "${products[@]}" --out "$RESULTS/products.jsonl" || true
[ -e "$model/config.json" ] || $PYTHON -m benchmarks.random_folder "$model" --shapes "$shapes"
for scheme in "${schemes[@]}"; do
  limited "gate.$scheme" 130 $PYTHON -m benchmarks.gate --model "$model" --schemes "$scheme" "${sizes[@]}" \
    --json "$RESULTS/gate.${scheme%:*}.json" || true
done
for tables in w4a16:g128 w4a16_asym:g32; do
  limited "gate.$tables" 130 $PYTHON -m benchmarks.gate --model "$model" --schemes w4a16 --tables "$tables" "${sizes[@]}" \
    --json "$RESULTS/gate.tables.${tables%:*}.json" || true
done
