# TBPO's bands on Qwen3-30B-A3B's shapes with 40 layers, on two GPUs of 141 GB: fixed and by spread, under fp8 and in bf16, three
# steps each. `dropped` in bands.CASE.BANDS.jsonl is the share of responses that a later update drops. TINY=1 RESULTS=DIR MODELS=DIR
# tries it on a CPU, where vLLM has no fp8 experts: under w4a16.
source benchmarks/sessions/tp/common.sh
shapes=30b-a3b sizes=(--layers 40 --cards 2 --batch 128 --response-len 1024 --steps 3) updates=8 more=() limit=540 cases=(fp8 bf16)
if [ -n "$TINY" ]; then
  simulated 2
  shapes=tiny-moe sizes=(--cards 2 --batch 16 --response-len 8 --steps 1) updates=2 cases=(w4a16 bf16)
  more=(model.attention=xla rollout.engine.kv_cache_gb=0.1 rollout.engine.threads=1)
else
  bash benchmarks/offline_host.sh await
fi
for case in "${cases[@]}"; do
  for bands in spread fixed; do
    left=$(($(bash benchmarks/offline_host.sh left) - 20))
    [ "$left" -gt 120 ] || exit 0
    CUDA_VISIBLE_DEVICES=0,1 "$PYTHON" -m benchmarks.step_gpu --shapes $shapes --folder "$MODELS/$shapes-40" --case $case \
      "${sizes[@]}" --updates "$updates" --limit-s $((left < limit ? left : limit)) --log "$RESULTS/bands.$case.$bands.log" \
      --out "$RESULTS/bands.$case.$bands.jsonl" loss.bands=$bands "${more[@]}" || true
  done
done
