# Four shards on four cards, 1.7B shapes, in CUDA graphs: 0 mismatched tokens; under all conditions for w8a8, which two
# shards meet, too. TINY=1 tries it on a CPU.
source benchmarks/sessions/tp/common.sh
shapes=1.7b sizes=(--sequences 128) conditions="long samples stop cool chunks preempted" schemes="bf16 w8a8 w4a16 fp8"
cards=0,1,2,3 shards=4
if [ -n "$TINY" ]; then
  # Its shapes have two heads of keys.
  shapes=tiny cards="" shards=2 schemes=bf16 conditions="samples"
  sizes=(--sequences 8 --prompt-len 12 --long-prompt 171 --response-len 8 --kv-cache-gb 0.2 --threads 1)
fi
for scheme in $schemes; do
  on 0 limited "tp4_$scheme" 240 $PYTHON -m benchmarks.gate --model "$MODELS/$shapes" --schemes "$scheme" \
    --tensor-parallel $shards --visible-gpus "$cards" "${sizes[@]}" --updates 1 \
    --engine-log "$RESULTS/tp4_$scheme.engine" --json "$RESULTS/tp4_$scheme.json"
done
on 0 limited tp4_conditions 300 $PYTHON -m benchmarks.gate --model "$MODELS/$shapes" --schemes w8a8 --updates 0 \
  --tensor-parallel $shards --visible-gpus "$cards" "${sizes[@]}" --conditions $conditions \
  --engine-log "$RESULTS/tp4_conditions.engine" --json "$RESULTS/tp4_conditions.json"
