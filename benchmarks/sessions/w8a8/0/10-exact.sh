# Kernels between an engine's products: their bits beside vLLM's, and their times. TINY=1 skips it: nothing of it runs
# on a CPU.
[ -z "${TINY:-}" ] || exit 0
bash benchmarks/offline_host.sh await
JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false timeout 120 python3 -m pytest -q -m gpu \
  tests/gpu/test_cuda_norm_ops.py -p no:cacheprovider | tail -n 12
timeout 60 python3 -m benchmarks.engine_norms --out "$RESULTS/norms.jsonl"
