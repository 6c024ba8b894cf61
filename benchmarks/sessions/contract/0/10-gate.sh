bash benchmarks/offline_host.sh await "$MODELS/made"
python3 -m benchmarks.gate --model "$MODELS/1.7b" --schemes w4a16 w4a8_fp8 --json "$RESULTS/gate_int4.json"
