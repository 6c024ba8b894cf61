timeout 420 python3 -m benchmarks.gate --model "$MODELS/1.7b" --conditions all --updates 0 --response-len 256 \
  --schemes w4a16 w8a8 --json "$RESULTS/conditions_0.json"
