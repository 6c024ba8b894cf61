# 4B, all parameters: old log-probs by the learner's pass, and from the sampler.
for proximal in auto learner; do
  python3 -m benchmarks.step_gpu --shapes 4b --folder "$MODELS/4b" --case w8a8 --proximal $proximal --steps 3 \
    --limit-s 200 --log "$RESULTS/proximal.$proximal.log" --out "$RESULTS/steps.jsonl"
done
