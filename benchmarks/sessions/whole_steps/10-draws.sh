# What fits this card by the plan, half of it on each card; what does not fit was refused before (memory_draws_h200.json).
bash benchmarks/offline_host.sh await "$MODELS/4b/config.json"
draws=$RESULTS/draws_$CARD.jsonl
JAX_PLATFORMS=cuda python3 -m benchmarks.memory_draws draw --model "$MODELS/4b" --count 5 --seed "1$CARD" >"$draws"
for number in $(grep -n '"fits": true' "$draws" | cut -d : -f 1); do
  [ "$(bash benchmarks/offline_host.sh left)" -gt 800 ] || break
  timeout 290 python3 -m benchmarks.memory_draws run "$draws" --only $((number - 1)) >>"$RESULTS/draws_run_$CARD.jsonl"
done
