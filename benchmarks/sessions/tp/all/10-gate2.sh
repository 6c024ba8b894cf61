# Two shards on two cards, 1.7B shapes, in CUDA graphs: 0 mismatched tokens of 131,072 a scheme, two schemes side by
# side. First four layers of it, which say within a minute whether such an engine starts. TINY=1 tries it on a CPU.
source benchmarks/sessions/tp/common.sh
shapes=1.7b few=1.7b-4 sizes=(--sequences 128) small=(--sequences 16 --response-len 64)
pairs=("bf16 w8a8" "w4a16 fp8" "nvfp4 -")
if [ -n "$TINY" ]; then
  shapes=tiny few=tiny sizes=(--sequences 4 --prompt-len 12 --response-len 8 --kv-cache-gb 0.2 --threads 1)
  small=("${sizes[@]}") pairs=("nvfp4 -")
else
  bash benchmarks/offline_host.sh await
fi
for folder in $few $shapes; do
  layers=0
  [ "$folder" != 1.7b-4 ] || layers=4
  [ -e "$MODELS/$folder/config.json" ] ||
    $PYTHON -m benchmarks.random_folder "$MODELS/$folder" --shapes "$shapes" --layers $layers
done

# gate NAME CARDS FOLDER SCHEME OPTIONS...: the learner on the first of the cards.
gate() {
  local name=$1 cards=$2 folder=$3 scheme=$4
  shift 4
  # XLA's own programs and the learner's fp32 masters share the first card with a shard.
  limited "$name" 300 $PYTHON -m benchmarks.gate --model "$MODELS/$folder" --schemes "$scheme" --tensor-parallel 2 \
    --visible-gpus "$([ -n "$TINY" ] || echo "$cards")" --engine-log "$RESULTS/$name.engine" --json "$RESULTS/$name.json" "$@"
}
on 0 gate tp2_few_w8a8 0,1 $few w8a8 "${small[@]}" --updates 1 --readback full &
on 2 gate tp2_few_bf16 2,3 $few bf16 "${small[@]}" --updates 1 --readback full &
wait
for pair in "${pairs[@]}"; do
  read -r first second <<<"$pair"
  on 0 gate "tp2_$first" 0,1 $shapes "$first" "${sizes[@]}" --updates 1 &
  [ "$second" = - ] || on 2 gate "tp2_$second" 2,3 $shapes "$second" "${sizes[@]}" --updates 1 &
  wait
done
