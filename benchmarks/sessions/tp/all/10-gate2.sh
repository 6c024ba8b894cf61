# Two shards on two cards, 1.7B shapes, in CUDA graphs: 0 mismatched tokens of 131,072 a scheme, two schemes side by
# side. First four layers of it with a full read-back, which say within a minute or two whether such an engine runs.
source benchmarks/sessions/tp/common.sh
few=1.7b-4 small=(--sequences 16 --response-len 64)
if [ -n "$TINY" ]; then few=tiny small=("${sizes[@]}"); else bash benchmarks/offline_host.sh await; fi
df -h /dev/shm | tail -n 1 # where NCCL and vLLM's shards meet
nvidia-smi topo -m 2>/dev/null | head -n 8 || true
[ -e "$MODELS/$few/config.json" ] ||
  $PYTHON -m benchmarks.random_folder "$MODELS/$few" --shapes "$shapes" $([ -n "$TINY" ] || echo --layers 4)
[ -e "$MODELS/$shapes/config.json" ] || $PYTHON -m benchmarks.random_folder "$MODELS/$shapes" --shapes "$shapes" &
gate tp2_few_w8a8 2 0,1 $few w8a8 "${small[@]}" --updates 1 --readback full &
[ -n "$TINY" ] || gate tp2_few_bf16 2 2,3 $few bf16 "${small[@]}" --updates 1 --readback full &
wait
[ -z "$TINY" ] || exit 0
gate tp2_bf16 2 0,1 $shapes bf16 "${sizes[@]}" --updates 1 &
gate tp2_w8a8 2 2,3 $shapes w8a8 "${sizes[@]}" --updates 1 &
wait
gate tp2_w4a16 2 0,1 $shapes w4a16 "${sizes[@]}" --updates 1 &
gate tp2_fp8 2 2,3 $shapes fp8 "${sizes[@]}" --updates 1 &
wait
