# Adapters of rank 32 at 8B shapes, on three bases; the same batch as 30-steps.sh.
bash benchmarks/offline_host.sh await
for case in w4a16 w8a8 bf16; do
  python3 -m benchmarks.step_gpu --shapes 8b --folder "$MODELS/8b" --case $case --log "$RESULTS/lora.$case.log" \
    --limit-s $(($(bash benchmarks/offline_host.sh left) - 20)) --out "$RESULTS/lora.jsonl" \
    "lora={rank: 32, alpha: 32}" optimizer.name=adamw optimizer.lr=1e-5
done
