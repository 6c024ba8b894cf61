# Before vLLM is there: kernels. QAT of the real 135M begins by hand when its model has arrived (experiments/qat/gpu.sh).
JAX_PLATFORMS=cuda,cpu timeout 170 python3 -m pytest -q -m gpu tests/kernels tests/quant/test_gpu.py -p no:cacheprovider \
  >"$RESULTS/kernels.log" 2>&1
