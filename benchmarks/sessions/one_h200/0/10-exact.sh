# The GPU's bits after a change of kernels: the tests that need a GPU, then gates: 1.7B under four schemes, and 4 layers of
# Qwen3-30B-A3B's shapes. TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU.
source benchmarks/sessions/tp/common.sh
export JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false
experts=30b-a3b layers=4 gates=("1.7b bf16" "1.7b w4a16" "30b-a3b w4a16" "1.7b w8a8" "1.7b nvfp4" "30b-a3b bf16") apart=3
if [ -n "$TINY" ]; then
  export JAX_PLATFORMS=cpu
  experts=tiny-moe layers=0 gates=("tiny bf16" "tiny-moe w4a16") apart=1
else
  bash benchmarks/offline_host.sh await
  for tests in sampling norm_ops expert_ops ops; do
    (limited "tests.$tests" 300 $PYTHON -m pytest -q -m gpu -p no:cacheprovider "tests/gpu/test_cuda_$tests.py" || true) &
  done
fi
for each in "$shapes 0" "$experts $layers"; do
  [ -e "$MODELS/${each% *}.gate/config.json" ] ||
    $PYTHON -m benchmarks.random_folder "$MODELS/${each% *}.gate" --shapes "${each% *}" --layers "${each#* }"
done
wait
for number in "${!gates[@]}"; do
  read -r folder scheme <<<"${gates[number]}"
  # Three side by side: each engine takes a fifth of the GPU.
  (limited "gate.$folder.$scheme" 200 $PYTHON -m benchmarks.gate --model "$MODELS/$folder.gate" --schemes "$scheme" "${sizes[@]}" \
    --gpu-memory-utilization 0.2 --json "$RESULTS/gate.$folder.$scheme.json" || true) &
  [ $(((number + 1) % apart)) != 0 ] || wait
done
wait
