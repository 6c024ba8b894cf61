# Qwen3-30B-A3B over both cards, 256 responses of 4,096 tokens: some 270 s a step, by what 128 took.
bash benchmarks/offline_host.sh await
python3 -m benchmarks.step_gpu --shapes 30b-a3b --layers 48 --cards 2 --folder "$MODELS/a48" --case w4a16 --batch 256 \
  --response-len 4096 --updates 32 --steps 1 --limit-s $(($(bash benchmarks/offline_host.sh left) - 20)) \
  --log "$RESULTS/step.log" --out "$RESULTS/step.jsonl" checkpoint.every=0 optimizer.matmul_precision=bfloat16
