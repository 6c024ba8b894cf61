for shapes in 8b 4b; do
  timeout 300 python3 -m benchmarks.engine_price --shapes $shapes --schemes w4a16 --response-len 256 --apart \
    --out "$RESULTS/engine_price_$shapes.jsonl"
done
