JAX_PLATFORMS=cuda timeout 240 python3 -m pytest -q -m gpu tests/gpu/test_fixed_order.py tests/gpu/test_fixed_order_experts.py
