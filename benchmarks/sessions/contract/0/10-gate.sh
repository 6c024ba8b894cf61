until [ -e "$MODELS/made" ] && python3 -c 'import vllm' 2>/dev/null; do sleep 2; done
python3 -m benchmarks.gate --model "$MODELS/1.7b" --schemes w4a16 w4a8_fp8 --json "$RESULTS/gate_int4.json"
