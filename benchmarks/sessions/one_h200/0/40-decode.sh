# Decode steps of 4B with a profile of host and kernels.
# TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU.
source benchmarks/sessions/tp/common.sh
shapes=4b sizes=(--sequences 128)
if [ -n "$TINY" ]; then
  shapes=tiny sizes=(--sequences 4 --response-len 8)
else
  bash benchmarks/offline_host.sh await
fi
for scheme in bf16 w4a16 w8a8; do
  limited "decode_$scheme" 90 $PYTHON -m benchmarks.engine_price --shapes $shapes --schemes $scheme "${sizes[@]}" --repeats 1 \
    --arithmetics batch_invariant --profile "$RESULTS/decode_$scheme.profile" --out "$RESULTS/decode.jsonl" || true
done
