# The GPU's bits after a change of kernels: the tests that need a GPU, and the gate at 1.7B under four schemes.
# TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU.
source benchmarks/sessions/tp/common.sh
export JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false
model=$MODELS/$shapes
if [ -n "$TINY" ]; then
  export JAX_PLATFORMS=cpu
else
  bash benchmarks/offline_host.sh await
  limited norms 120 $PYTHON -m pytest -q -m gpu -p no:cacheprovider tests/gpu/test_cuda_sampling.py \
    tests/gpu/test_cuda_norm_ops.py || true
fi
[ -e "$model/config.json" ] || $PYTHON -m benchmarks.random_folder "$model" --shapes "$shapes"
gate_of() { # SCHEME
  limited "gate.$1" 200 $PYTHON -m benchmarks.gate --model "$model" --schemes "$1" "${sizes[@]}" --json "$RESULTS/gate.$1.json" || true
}
for pair in "bf16 w8a8" "w4a16 nvfp4"; do
  for scheme in $pair; do gate_of $scheme & done
  wait
  [ -z "$TINY" ] || break
done
[ -n "$TINY" ] || limited exact 300 $PYTHON -m pytest -q -m gpu -p no:cacheprovider tests/gpu/test_cuda_ops.py \
  tests/gpu/test_cuda_expert_ops.py || true
