bash benchmarks/offline_host.sh await "$MODELS/made"
timeout 240 python3 -m benchmarks.engine_price --shapes 4b --schemes bf16 --response-len 256 --apart \
  --out "$RESULTS/engine_price_4b_bf16.jsonl"
timeout 300 python3 -m benchmarks.engine_price --shapes 8b --schemes bf16 --response-len 256 --apart --transport host \
  --out "$RESULTS/engine_price_8b_bf16.jsonl"
