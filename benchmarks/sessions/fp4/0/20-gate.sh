# Every token of 1.7B shapes, in CUDA graphs: nvfp4 alone, then with adapters, under all conditions of the gate.
# TINY=1 tries the commands on a CPU.
set -e
shapes=1.7b sizes=(--sequences 128)
if [ -n "${TINY:-}" ]; then
  shapes=tiny sizes=(--sequences 8 --prompt-len 12 --long-prompt 40 --response-len 8 --kv-cache-gb 0.2 --threads 1)
else
  bash benchmarks/offline_host.sh await
fi
model=$MODELS/$shapes
[ -e "$model/config.json" ] || python3 -m benchmarks.random_folder "$model" --shapes "$shapes"
conditions=all
[ -z "${TINY:-}" ] || conditions=plain
for rank in 0 32; do
  python3 -m benchmarks.gate --model "$model" --schemes nvfp4 --conditions "$conditions" --updates 1 --lora-rank "$rank" \
    "${sizes[@]}" --json "$RESULTS/gate_$shapes-$rank.json"
done
