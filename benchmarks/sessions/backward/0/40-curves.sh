# RL of the real 0.5B under w8a8, 30 steps: three seeds with the backward in bfloat16, then three in int8, three runs at a time.
# FORMS chooses; each takes some 600 s of an H200. MODELS holds qwen25-coder-0.5b. TINY=1 tries it on a CPU.
export FORMAT=w8a8 MODEL=$MODELS/qwen25-coder-0.5b JOBS=${JOBS:-3} LEAST=200
seeds=(1 2 3) more=()
if [ -n "${TINY:-}" ]; then
  source experiments/qwen25_coder/tiny.sh
  seeds=(1) more=("${tiny_step[@]}" train.steps=2 eval.num_prompts=0 eval.at_end=false)
else
  bash benchmarks/offline_host.sh await
fi
for form in ${FORMS:-bf16 int8}; do
  left=900
  [ -n "${TINY:-}" ] || left=$(($(bash benchmarks/offline_host.sh left) - 20))
  [ "$left" -gt 300 ] || exit 0
  bash experiments/qwen25_coder/plan_1p5b.sh "$RESULTS/curves/$form" "$left" "${seeds[@]/#/qarl_w4a16:}" -- \
    train.steps=30 eval.every=30 "quant.backward=$form" "${more[@]}"
done
