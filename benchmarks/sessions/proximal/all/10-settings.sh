# Whole steps whose old log-probs are the learner's, and the sampler's: alternately on one card, twice each.
bash benchmarks/offline_host.sh await
for shapes in 8b 4b 1.7b; do
  for case in w8a8 bf16 w4a16 fp8; do
    for proximal in learner auto learner auto; do
      left=$(($(bash benchmarks/offline_host.sh left) - 20))
      [ "$left" -gt 60 ] || exit 0
      CUDA_VISIBLE_DEVICES=0 python3 -m benchmarks.step_gpu --shapes "$shapes" --folder "$MODELS/$shapes" --case "$case" \
        --proximal "$proximal" --steps 4 --limit-s "$left" --log "$RESULTS/step.log" --out "$RESULTS/step.jsonl"
    done
  done
done
