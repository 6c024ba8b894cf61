# Whole steps of an 8B on one card: 8b.bash CASE...
for case in "$@"; do
  python3 -m benchmarks.step_gpu --shapes 8b --folder "$MODELS/8b-$case" --case "$case" --batch 128 --steps 2 --limit-s 320 \
    --log "$RESULTS/step_8b_$case.log" --out "$RESULTS/step_8b_$CARD.jsonl" model.param_dtype=bfloat16 \
    optimizer.moment_dtype=int8 optimizer.offload=true quant.code_flips=false rollout.engine.staging_buffers=1
done
