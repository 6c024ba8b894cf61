# Tokens per second of 8B w8a8: one card, two and four (compare N engines of one card with an engine over N); then
# Qwen3-32B's shapes in bf16, which one card does not hold, over four, published in chunks. TINY=1 tries it on a CPU.
source benchmarks/sessions/tp/common.sh
shapes=8b large=32b length=256 some="64 128 256" many="128 256 512"
if [ -n "$TINY" ]; then shapes=tiny large=tiny length=8 some=4 many=4; fi

# price NAME SECONDS SHAPES SCHEME SHARDS SEQUENCES OPTIONS...
price() {
  local name=$1 most=$2 shape=$3 scheme=$4 shards=$5 sequences=$6
  shift 6
  [ -z "$TINY" ] || { [ "$shards" -lt 4 ] || shards=2; }
  limited "$name" "$most" $PYTHON -m benchmarks.engine_price --shapes "$shape" --schemes "$scheme" --tensor-parallel \
    "$shards" --sequences $sequences --response-len $length --arithmetics batch_invariant --out "$RESULTS/price.jsonl" \
    --engine-log "$RESULTS/$name.engine" "$@"
}
on 0,1 price price_8b_2 240 $shapes w8a8 2 "$many" &
on 2 price price_8b_1 240 $shapes w8a8 1 "$some" &
wait
on 0,1,2,3 price price_8b_4 240 $shapes w8a8 4 "$many"
on 0,1,2,3 price price_32b_4 400 $large bf16 4 "64 128 256" --staging-buffers 0 --repeats 1
on 0,1 price price_8b_bf16_2 240 $shapes bf16 2 "$many" &
on 2 price price_8b_bf16_1 240 $shapes bf16 1 "$some" &
wait
