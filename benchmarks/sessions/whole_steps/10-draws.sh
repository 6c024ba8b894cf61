# Ten settings that fit this card by the plan and ten that do not, half of them on each card.
bash benchmarks/offline_host.sh await "$MODELS/4b/config.json"
draws=$RESULTS/draws_$CARD.jsonl
JAX_PLATFORMS=cuda python3 -m benchmarks.memory_draws draw --model "$MODELS/4b" --count 5 --seed "1$CARD" >"$draws"
for number in 0 1 2 3 4 5 6 7 8 9; do
  [ "$(bash benchmarks/offline_host.sh left)" -gt 1250 ] || break
  timeout 150 python3 -m benchmarks.memory_draws run "$draws" --only $number >>"$RESULTS/draws_run_$CARD.jsonl"
done
