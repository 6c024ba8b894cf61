# Tokens per second of 8B w8a8: one card, two and four (compare N engines of one card with an engine over N); then
# Qwen3-32B's shapes in bf16, which one card does not hold, over four, published in chunks. Two cards: the 8B, vLLM's own
# arithmetic beside it, and the 32B over both.
source benchmarks/sessions/tp/common.sh
price price_8b_2 200 0,1 8b w8a8 2 "128 256 512" &
[ "$gpus" -gt 2 ] || wait
[ -n "$TINY" ] || price price_8b_1 200 $((gpus > 2 ? 2 : 0)) 8b w8a8 1 "64 128 256" &
wait
if [ -z "$TINY" ] && [ "$gpus" -lt 4 ]; then
  price price_8b_vllm_2 200 0,1 8b w8a8 2 "128 256 512" --arithmetics vllm
  price price_32b_2 330 0,1 32b bf16 2 "64 128 256" --staging-buffers 0 --repeats 1
  exit
fi
[ -n "$TINY" ] || price price_8b_4 200 0,1,2,3 8b w8a8 4 "128 256 512"
price price_32b_4 330 0,1,2,3 32b bf16 4 "64 128 256" --staging-buffers 0 --repeats 1
