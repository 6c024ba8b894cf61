# 8B, 128 responses of 1,024 tokens: BF16, then w8a8 with the proximal pass and without it.
bash benchmarks/offline_host.sh await
step() {
  python3 -m benchmarks.step_gpu --shapes 8b --folder "$MODELS/8b" --log "$RESULTS/step.$((++count)).log" \
    --limit-s $(($(bash benchmarks/offline_host.sh left) - 20)) --out "$RESULTS/steps.jsonl" "$@"
}
step --case w8a8 train.proximal=auto
step --case w8a8 train.proximal=learner
step --case bf16 train.proximal=auto
step --case w4a16 train.proximal=auto
