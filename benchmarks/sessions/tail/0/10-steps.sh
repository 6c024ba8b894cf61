# 1.7B, w8a8, responses that end by chance after 400 tokens in the mean, a geometric distribution, at most 2,048: updates
# that begin while the last groups are decoded, beside the same run that waits, alternately. First 128 responses that are
# all decoded at once, then 1,024 of which the engine decodes 256 at a time (ONLY=128 or ONLY=1024 runs one of them). Then
# the same with the engine on a GPU of its own, where there is a second one. TINY=1 RESULTS=DIR MODELS=DIR bash FILE tries
# it on a CPU.
shapes=1.7b sizes=(--response-len 2048 --mean-len 400 --steps 4) batches=(128 1024) slots=256 more=() cards=1
if [ -n "${TINY:-}" ]; then
  shapes=tiny sizes=(--response-len 32 --mean-len 8 --steps 2) batches=(32) slots=16
  more=(model.attention=xla rollout.engine.kv_cache_gb=0.1 rollout.engine.threads=1)
else
  bash benchmarks/offline_host.sh await
  cards=$(nvidia-smi --list-gpus | wc -l)
fi
run() { # name, first words of the run's settings; the rest are step_gpu's options
  local name=$1 left
  shift
  left=$(($(bash benchmarks/offline_host.sh left) - 20))
  [ "$left" -gt 60 ] || exit 0
  python3 -m benchmarks.step_gpu --shapes "$shapes" --folder "$MODELS/$shapes-drawn" --case w8a8 "${sizes[@]}" \
    --limit-s "$left" --log "$RESULTS/step.$name.log" --out "$RESULTS/steps.jsonl" "$@" "${more[@]}"
}
for place in one two; do
  if [ $place = two ]; then
    [ "$cards" -gt 1 ] || exit 0
    export CUDA_VISIBLE_DEVICES=0 # the learner's; the engine is given the other
    more+=(rollout.engine.visible_gpus=1)
  fi
  for batch in ${ONLY:-"${batches[@]}"}; do
    for updates in 4 2; do
      for waits in "" --waits; do
        # shellcheck disable=SC2086
        run "$place.$batch.$updates$waits" --batch "$batch" --updates $updates $waits \
          "rollout.engine.max_num_seqs=$((batch < slots ? batch : slots))"
      done
    done
  done
done
