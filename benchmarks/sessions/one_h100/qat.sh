# SmolLM2-135M through all of its layers, GPTQ beside it: progressive, two bits at once, nested widths, three and four bits.
# A killed run goes on with the same command.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
config=configs/qat/smollm2_135m_gpu.yaml here=(model.path="$MODELS/smollm2-135m" data.source.path="$RESULTS/../reference.jsonl")
python3 experiments/qat/text.py "$RESULTS/../reference.jsonl" --stdlib
python3 experiments/qat/gptq.py $config "${here[@]}" >"$RESULTS/gptq.jsonl" 2>"$RESULTS/gptq.log" &
qat() { # name, overrides
  python3 -m qarl_jax.qat --config $config out="$MODELS/qat/$1" "${here[@]}" "${@:2}" >"$RESULTS/qat_$1.log" 2>&1
  cp "$MODELS/qat/$1/qat.json" "$RESULTS/qat_$1.json"
}
qat progressive
qat direct 'stages=["w2a16_asym:g64"]'
qat nested 'stages=["w8a16_asym:g64"]' 'widths=[8, 4, 2]'
qat w3 'stages=["w8a16_asym:g64", "w4a16_asym:g64", "w3a16_asym:g64"]'
qat w4 'stages=["w8a16_asym:g64", "w4a16_asym:g64"]'
