# Qwen2.5-32B shapes, adapters of rank 32 on an NVFP4 base, learner and engine on one GPU of 80 GB, the load of
# one_h100/0/20-32b.sh: the base held once; each with a copy (transport=host); once, and the whole in 60 GiB. A line of
# steps.jsonl each, with the plan by part beside what JAX held and what the card did (*.memory, twice a second), seven
# minutes each at most. The last recomputes whole layers. ONLY="once full_in_60" runs these alone.
# TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU.
shapes=qwen2.5-32b sizes=(--batch 64 --response-len 2048 --mean-len 400 --steps 5 --rows 1) more=()
if [ -n "${TINY:-}" ]; then
  shapes=tiny-qwen2.5 sizes=(--batch 16 --response-len 8 --mean-len 4 --steps 2 --rows 2)
  more=(model.attention=xla rollout.engine.kv_cache_gb=0.1 rollout.engine.threads=1 train.row_len=80)
else
  bash benchmarks/offline_host.sh await
fi
run() { # name, further overrides
  [[ " ${ONLY:-$1} " = *" $1 "* ]] || return 0
  local left=420 code=0 watch=
  [ -n "${TINY:-}" ] || left=$(($(bash benchmarks/offline_host.sh left) - 20))
  [ "$left" -gt 150 ] || { echo "$1: only $left s are left" && return; }
  if [ -z "${TINY:-}" ]; then
    nvidia-smi -i "${CARD:-0}" --query-gpu=timestamp,memory.used --format=csv,noheader -lms 500 >"$RESULTS/step_$1.memory" &
    watch=$!
  fi
  python3 -m benchmarks.step_gpu --shapes "$shapes" --folder "$MODELS/$shapes" --case nvfp4 --lora-rank 32 "${sizes[@]}" \
    --limit-s "$((left < 420 ? left : 420))" --log "$RESULTS/step_$1.log" --out "$RESULTS/steps.jsonl" \
    "${@:2}" "${more[@]}" || code=$?
  [ -z "$watch" ] || kill "$watch"
  [ "$code" = 0 ] || { echo "$1: $code" && tail -n 30 "$RESULTS/step_$1.log"; }
}
run once
run twice rollout.engine.transport=host
small=(rollout.engine.memory=given rollout.engine.kv_cache_gb=6 rollout.engine.max_num_seqs=32)
small+=(rollout.engine.gpu_memory_utilization=0.22)
# JAX's pool, 28 GiB at once: one that grows took regions of up to 16 GiB, 32 in all for 21 in use. The base lies beside it.
mib=$(nvidia-smi -i "${CARD:-0}" --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null || echo 143771)
XLA_PYTHON_CLIENT_MEM_FRACTION=$(awk -v mib="$mib" 'BEGIN { printf "%.3f", 28 * 1024 / mib }')
export XLA_PYTHON_CLIENT_PREALLOCATE=true XLA_PYTHON_CLIENT_MEM_FRACTION
run once_in_60 "${small[@]}"
run full_in_60 "${small[@]}" model.remat=full
