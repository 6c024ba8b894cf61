JAX_PLATFORMS=cuda timeout 400 python3 -m pytest -q -m gpu tests/gpu/test_one_function.py \
  -k "dense and (w4a16 or w4a8) and (single or eight or accumulated or gradients)"
