JAX_PLATFORMS=cpu setsid python3 -m benchmarks.random_folder $MODELS/4b --shapes 4b --no-weights &
