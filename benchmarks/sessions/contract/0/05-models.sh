JAX_PLATFORMS=cpu setsid bash -c '
python3 -m benchmarks.random_folder $MODELS/4b --shapes 4b --no-weights
python3 -m benchmarks.random_folder $MODELS/1.7b --shapes 1.7b --deviation 0.03 && touch $MODELS/made' &
JAX_PLATFORMS=cuda timeout 240 python3 -m pytest -q -m gpu tests/gpu/test_fixed_order.py tests/gpu/test_fixed_order_experts.py
