# The tests that need a GPU: products, attention, experts, CUDA IPC and NCCL publishing.
JAX_PLATFORMS=cuda,cpu python3 -m pytest -q -m gpu tests/gpu tests/kernels tests/quant -p no:cacheprovider | tail -n 40
