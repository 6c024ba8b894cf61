# dX and dW of 8B's layers, 16,384 tokens: cuBLAS' bfloat16, then int8 and fp8 codes, rounding included.
# TINY=1 tries the command on a CPU.
model=8b sizes=(--tokens 16384)
if [ -n "${TINY:-}" ]; then
  model=tiny sizes=(--tokens 128 --repeats 1)
fi
python3 -m benchmarks.backward products --model "$model" "${sizes[@]}" --out "$RESULTS/backward_products_$model.json"
[ -n "${TINY:-}" ] || JAX_PLATFORMS=cuda,cpu python3 -m pytest -q -m gpu tests/quant/test_backward.py -p no:cacheprovider | tail -n 20
