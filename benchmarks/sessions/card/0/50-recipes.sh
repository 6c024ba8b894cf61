# Recipes of one GPU, two steps each at their own lengths; arms of this GPU's size come first.
bash benchmarks/offline_host.sh await
size=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits -i "$CARD")
arms="1x80 1x80_bf16 1x80_lora"
[ "$size" -lt 100000 ] || arms="1x141 1x141_bf16 $arms"
for arm in $arms; do
  python3 -m benchmarks.step_gpu --recipe configs/gpu/recipes.yaml --folder "$MODELS/recipe_$arm" --steps 1 \
    --limit-s $(($(bash benchmarks/offline_host.sh left) - 20)) --log "$RESULTS/recipe.$arm.log" \
    --out "$RESULTS/recipes.jsonl" "arm=$arm"
done
