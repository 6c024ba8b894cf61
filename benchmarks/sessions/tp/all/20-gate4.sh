# Four shards on four cards, 1.7B shapes, in CUDA graphs: 0 mismatched tokens of 131,072 a scheme. Then four layers of
# Qwen3-30B-A3B, whose experts are split over two shards.
source benchmarks/sessions/tp/common.sh
for scheme in bf16 w8a8 w4a16; do
  gate tp4_$scheme 4 0,1,2,3 $shapes $scheme "${sizes[@]}" --updates 1
  [ -z "$TINY" ] || break
done
moe=30b-a3b
[ -z "$TINY" ] || moe=tiny-moe
[ -e "$MODELS/$moe-4/config.json" ] ||
  $PYTHON -m benchmarks.random_folder "$MODELS/$moe-4" --shapes $moe $([ -n "$TINY" ] || echo --layers 4)
for pair in "0,1 w8a8" "2,3 w4a16"; do
  gate "tp2_experts_${pair#* }" 2 ${pair% *} $moe-4 ${pair#* } "${sizes[@]}" --updates 1 --replay &
  [ -z "$TINY" ] || break
done
wait
