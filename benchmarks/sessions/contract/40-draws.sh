# Ten settings that fit this card by the plan and ten that do not, half of them on each card.
draws=$RESULTS/draws_$CARD.jsonl
python3 -m benchmarks.memory_draws draw --model "$MODELS/4b" --count 5 --seed "1$CARD" >"$draws"
for number in 0 1 2 3 4 5 6 7 8 9; do
  [ "$(bash benchmarks/offline_host.sh left)" -gt 100 ] || break
  python3 -m benchmarks.memory_draws run "$draws" --only $number >>"$RESULTS/draws_run_$CARD.jsonl"
done
