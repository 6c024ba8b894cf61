# Every token of 1.7B shapes, in CUDA graphs: adapters of rank 32 on an NVFP4 base that learner and engine hold once, three
# versions. The memory of the card, twice a second, is in gate_once.memory. TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU.
shapes=1.7b sizes=(--sequences 64 --response-len 256 --kv-cache-gb 4 --gpu-memory-utilization 0.25)
if [ -n "${TINY:-}" ]; then
  shapes=tiny-qwen2.5 sizes=(--sequences 8 --prompt-len 12 --response-len 8 --kv-cache-gb 0.2 --threads 1)
else
  bash benchmarks/offline_host.sh await
  nvidia-smi -i "${CARD:-0}" --query-gpu=timestamp,memory.used --format=csv,noheader -lms 500 >"$RESULTS/gate_once.memory" &
  watch=$!
fi
[ -e "$MODELS/$shapes/config.json" ] || timeout 120 python3 -m benchmarks.random_folder "$MODELS/$shapes" --shapes "$shapes"
code=0
timeout 420 python3 -m benchmarks.gate --model "$MODELS/$shapes" --schemes nvfp4 --lora-rank 32 --updates 2 "${sizes[@]}" \
  --engine-log "$RESULTS/engine_gate_once.log" --json "$RESULTS/gate_once.json" >"$RESULTS/gate_once.log" 2>&1 || code=$?
[ -z "${watch:-}" ] || kill "$watch"
tail -n 12 "$RESULTS/gate_once.log"
if [ "$code" != 0 ]; then
  echo "gate, base held once: $code"
  tail -n 30 "$RESULTS/engine_gate_once.log"
fi
[ -n "${TINY:-}" ] || sort -t , -k 2 -n "$RESULTS/gate_once.memory" | sed -n '1p;$p' # least and most
exit "$code"
