for scheme in w4a16 fp8 w4a8_fp8; do
  timeout 150 python3 -m qarl_jax.parity --model "$MODELS/1.7b" --scheme $scheme --engine cuda --kv-cache-gb 4 --json \
    >"$RESULTS/parity_$scheme.json"
done
