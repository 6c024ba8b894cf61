# nvfp4's layers and experts on a Hopper GPU: decoded words, any number of rows, the learner's bits.
bash benchmarks/offline_host.sh await
JAX_PLATFORMS=cuda,cpu timeout 300 python3 -m pytest -q -m gpu tests/gpu/test_cuda_ops.py tests/gpu/test_cuda_expert_ops.py \
  -k nvfp4 >"$RESULTS/exact.log" 2>&1
