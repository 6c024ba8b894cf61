# The one drawn setting that fits by the plan and has made no step yet: it was cut off after 290 s, without an error.
JAX_PLATFORMS=cpu python3 -m benchmarks.random_folder "$MODELS/4b" --shapes 4b --no-weights
JAX_PLATFORMS=cpu python3 -m benchmarks.memory_draws draw --model "$MODELS/4b" --count 5 --seed 11 --card-gb 139.80072021484375 >"$RESULTS/draws_11.jsonl"
bash benchmarks/offline_host.sh await
python3 -m benchmarks.memory_draws run "$RESULTS/draws_11.jsonl" --only 2 --limit-s 570 >"$RESULTS/draw_11_2.jsonl"
