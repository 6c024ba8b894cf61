timeout 420 python3 -m benchmarks.gate --model "$MODELS/1.7b" --conditions all --updates 0 --response-len 256 \
  --schemes fp8 bf16 w4a8_fp8 --json "$RESULTS/conditions_1.json"
