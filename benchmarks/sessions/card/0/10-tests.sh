# The tests that need a GPU: products, attention, experts, CUDA IPC and NCCL publishing, states on the host.
JAX_PLATFORMS=cuda,cpu python3 -m pytest -q -m gpu tests/gpu tests/kernels tests/quant tests/optim \
  tests/run -p no:cacheprovider | tail -n 40
