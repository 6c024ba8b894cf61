# Before vLLM is there: kernels, and QAT of the real 135M, which goes on beside jobs that measure no time.
if [ -e "$MODELS/smollm2-135m/config.json" ]; then setsid bash benchmarks/sessions/one_h100/qat.sh & fi
JAX_PLATFORMS=cuda timeout 170 python3 -m pytest -q -m gpu tests/kernels tests/quant/test_gpu.py -p no:cacheprovider \
  -n 3 >"$RESULTS/kernels.log" 2>&1
