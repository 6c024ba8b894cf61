# Adapters of rank 32 at 8B shapes on four bases; 128 responses of 1,024 tokens.
for case in w4a16 bf16 nvfp4 w8a8; do
  python3 -m benchmarks.step_gpu --shapes 8b --folder "$MODELS/8b" --case $case --lora-rank 32 --steps 2 \
    --limit-s 200 --log "$RESULTS/lora.$case.log" --out "$RESULTS/steps.jsonl"
done
