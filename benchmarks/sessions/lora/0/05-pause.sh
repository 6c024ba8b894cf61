# 8B on one H100 of 80 GB: fifty versions of adapters of rank 32 in a row, published while the engine decodes.
# TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU.
source benchmarks/sessions/tp/common.sh
small=(--shapes 8b --rank 32 --publishes 50)
[ -z "$TINY" ] || small=(--shapes tiny --rank 8 --publishes 5 --sequences 4 --response-len 8 --kv-cache-gb 0.2 --threads 1)
[ -n "$TINY" ] || bash benchmarks/offline_host.sh await
limited pause 420 $PYTHON -m benchmarks.publish_adapters "${small[@]}" \
  --engine-log "$RESULTS/pause.engine" --out "$RESULTS/pause.jsonl" || true
