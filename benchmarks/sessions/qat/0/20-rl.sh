# RL of the real 0.5B at two bits (experiments/qat/PLAN.md) in the time that is left: from training, about ten minutes of it, then from
# rounding (START), three runs at a time. START=nested: training for 8, 4 and 2 bits, then RL with WIDTHS ([8,4,2]). RUNS chooses arms
# and seeds. MODELS holds qwen25-coder-0.5b. TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU.
model=$MODELS/qwen25-coder-0.5b
export JOBS=${JOBS:-3}
if [ -n "${TINY:-}" ]; then
  export JOBS=1 LEAST=1
else
  bash benchmarks/offline_host.sh await "$model/ready"
fi
for start in ${START:-training rounding}; do
  runs=(base:w2a16_asym:g32 qarl_w4a16:{1,2,3} rollout_w4a16_grpo:{1,2,3}) more=()
  [ "$start" != nested ] || {
    runs=(base:{w2a16_midpoint,w4a16_midpoint,w8a16_asym}:g32 qarl_w4a16:{1,2,3})
    more=(-- "train.widths=${WIDTHS:-[8,4,2]}")
  }
  [ -z "${RUNS:-}" ] || read -r -a runs <<<"$RUNS"
  left=$(($(bash benchmarks/offline_host.sh left) - 5))
  MODEL=$model bash experiments/qat/rl.sh "$RESULTS/$start" $((left < 100000 ? left : 100000)) "$start" "${runs[@]}" "${more[@]}"
done
