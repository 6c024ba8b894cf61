# Whole 8B steps under w8a8, 128 responses of 1,024 tokens: backward in bfloat16, int8 and fp8, alternately, twice each.
# TINY=1 tries the commands on a CPU.
shapes=8b more=() sizes=(--steps 3)
if [ -n "${TINY:-}" ]; then
  shapes=tiny sizes=(--steps 1 --batch 16 --response-len 8)
  more=(model.attention=xla rollout.engine.kv_cache_gb=0.1 rollout.engine.threads=1)
else
  bash benchmarks/offline_host.sh await
fi
for round in 1 2; do
  for backward in bf16 int8 fp8; do
    left=$(($(bash benchmarks/offline_host.sh left) - 20))
    [ "$left" -gt 60 ] || exit 0
    python3 -m benchmarks.step_gpu --shapes "$shapes" --folder "$MODELS/$shapes" --case w8a8 "${sizes[@]}" \
      --limit-s "$left" --log "$RESULTS/step.$backward.$round.log" --out "$RESULTS/steps.jsonl" \
      "quant.backward=$backward" "${more[@]}"
  done
done
