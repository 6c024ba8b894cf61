# Products of weights with codes on a Hopper GPU: microseconds by tile and by scheme, then the learner's bits beside the gate
# at 1.7B with activations of two and four bits, and with embedding and head in four.
# TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU.
source benchmarks/sessions/tp/common.sh
export JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false
model=$MODELS/$shapes products=(--shapes 8b qwen2.5-32b --rows 1 8 64 128 256 --layers 2
  --repeats 15 --schemes nvfp4 w4a16 w2a16_asym:g32 w3a16_asym:g32 w2a2:g32)
if [ -n "$TINY" ]; then
  export JAX_PLATFORMS=cpu
  products=(--shapes tiny --rows 1 8 --layers 2 --repeats 3 --schemes w2a16_asym:g32 w2a2:g32)
else
  bash benchmarks/offline_host.sh await
fi
tiles() { # NAME SECONDS OPTIONS...
  local name=$1 most=$2
  shift 2
  [ -n "$TINY" ] || limited "$name" "$most" $PYTHON -m benchmarks.low_bit_products --tiles --layers 2 --repeats 7 --processes 14 \
    "$@" || true
}
tiles tiles4 110 --shapes 4b qwen2.5-32b 8b qwen2.5-7b qwen2.5-14b --schemes nvfp4 w4a16 --rows 8 32 64 128 256
tiles tiles_asym 50 --shapes qwen2.5-32b 8b --schemes w2a16_asym:g32 w3a16_asym:g32 --rows 128 256
limited products 120 $PYTHON -m benchmarks.low_bit_products "${products[@]}" --out "$RESULTS/products.jsonl" || true
if [ -z "$TINY" ]; then
  limited exact 240 $PYTHON -m pytest -q -m gpu -p no:cacheprovider tests/gpu/test_cuda_ops.py \
    tests/gpu/test_cuda_expert_ops.py tests/gpu/test_cuda_norm_ops.py || true &
fi
[ -e "$model/config.json" ] || $PYTHON -m benchmarks.random_folder "$model" --shapes "$shapes"
gate_of() { # NAME OPTIONS...
  limited "gate.$1" 200 $PYTHON -m benchmarks.gate --model "$model" "${@:2}" "${sizes[@]}" --json "$RESULTS/gate.$1.json" || true
}
gate_of w2a2 --schemes w2a2:g32 &
gate_of w4a4 --schemes w4a4:g32 &
wait
gate_of tables_w4a16 --schemes w4a16 --tables w4a16:g128 &
gate_of tables_w4a16_asym --schemes w4a16 --tables w4a16_asym:g32 &
wait
