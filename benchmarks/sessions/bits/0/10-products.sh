# Weights with zero points on a Hopper GPU: the learner's bits under any number of rows; a layer's products at Qwen3-8B's
# shapes beside cuBLAS in bf16; then the tiles of each product at two bits. TINY=1 tries the command on a CPU.
shapes=8b sizes=(--rows 1 8 256)
if [ -n "${TINY:-}" ]; then
  shapes=tiny sizes=(--rows 1 8 --layers 2 --repeats 3 --schemes w2a16_asym:g32 w3a16_asym:g64 w2a2:g32)
else
  bash benchmarks/offline_host.sh await
  JAX_PLATFORMS=cuda timeout 400 python3 -m pytest -q -m gpu tests/gpu/test_cuda_ops.py -k "zero_points or on_a_grid" \
    >"$RESULTS/exact.log" 2>&1
fi
python3 -m benchmarks.low_bit_products --shapes "$shapes" "${sizes[@]}" --out "$RESULTS/products_$shapes.jsonl"
[ -n "${TINY:-}" ] || python3 -m benchmarks.low_bit_products --shapes "$shapes" --rows 1 8 256 --layers 4 --tiles \
  --schemes w2a16_asym:g32 --out "$RESULTS/tiles_$shapes.jsonl"
