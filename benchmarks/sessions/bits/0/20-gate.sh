# Every token of 1.7B shapes at two and three bits, in CUDA graphs, under all conditions of the gate; a slice of the 8-bit
# grid; and activations of few bits. TINY=1 tries the commands on a CPU.
set -e
shapes=1.7b sizes=(--sequences 128) conditions=all
if [ -n "${TINY:-}" ]; then
  shapes=tiny sizes=(--sequences 8 --prompt-len 12 --long-prompt 40 --response-len 8 --kv-cache-gb 0.2 --threads 1)
  conditions=plain
else
  bash benchmarks/offline_host.sh await
fi
model=$MODELS/$shapes
[ -e "$model/config.json" ] || python3 -m benchmarks.random_folder "$model" --shapes "$shapes"
for scheme in w2a16_asym:g32 w3a16_asym:g64 w2a16_midpoint:g32 w2a2:g32 w4a4:g32; do
  python3 -m benchmarks.gate --model "$model" --schemes "$scheme" --conditions "$conditions" --updates 1 \
    "${sizes[@]}" --json "$RESULTS/gate_$shapes-${scheme%:*}.json"
done
