# Updates of the learner alone at 1.7B shapes under w8a8, 16,384 tokens: backward in bfloat16, int8 and fp8.
# TINY=1 tries the commands on a CPU.
sizes=(--model 1.7b --rows 4 --seq 4096)
if [ -n "${TINY:-}" ]; then
  sizes=(--model tiny --rows 2 --seq 64 --attention xla --steps 1)
fi
for backward in bf16 int8 fp8; do
  python3 -m benchmarks.learner --schemes w8a8 --backward "$backward" "${sizes[@]}" \
    --out "$RESULTS/backward_learner_$backward.json"
done
