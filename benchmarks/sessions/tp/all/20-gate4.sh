# Four shards on four cards, 1.7B shapes, in CUDA graphs: 0 mismatched tokens of 131,072 a scheme.
source benchmarks/sessions/tp/common.sh
for scheme in bf16 w8a8 w4a16; do
  gate tp4_$scheme 4 0,1,2,3 $shapes $scheme "${sizes[@]}" --updates 1
  [ -z "$TINY" ] || break
done
