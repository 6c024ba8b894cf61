# Not one token may differ: every scheme at 1.7B, then adapters of rank 32 that alone move.
bash benchmarks/offline_host.sh await
python3 -m benchmarks.random_folder "$MODELS/1.7b" --shapes 1.7b
for more in "--schemes bf16 w8a8 w4a16 nvfp4" "--schemes bf16 w8a8 w4a16 nvfp4 --lora-rank 32 --updates 2"; do
  # shellcheck disable=SC2086
  python3 -m benchmarks.gate --model "$MODELS/1.7b" $more --sequences 64 --response-len 256 \
    --engine-log "$RESULTS/gate.log" --json "$RESULTS/gate$((++count)).json" || echo "the gate refused: $more"
done
