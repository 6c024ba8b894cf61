# SmolLM2-135M through all of its layers on one GPU, GPTQ beside it. Arms: progressive, two bits at once, nested widths, three
# bits, four bits. MODELS holds smollm2-135m, RESULTS gets receipts and logs. A killed run goes on with the same command.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
config=configs/qat/smollm2_135m_gpu.yaml text=$RESULTS/python_reference.jsonl
here=(model.path="$MODELS/smollm2-135m" data.source.path="$text")
[ -e "$text" ] || python3 experiments/qat/text.py "$text" --stdlib
gptq() { python3 experiments/qat/gptq.py $config "${here[@]}" >"$RESULTS/gptq.jsonl" 2>"$RESULTS/gptq.log"; }
[ -s "$RESULTS/gptq.jsonl" ] || gptq &
qat() { # name, overrides
  [ ! -e "$RESULTS/qat_$1.json" ] || return 0
  python3 -m qarl_jax.qat --config $config out="$MODELS/qat/$1" "${here[@]}" "${@:2}" >>"$RESULTS/qat_$1.log" 2>&1
  cp "$MODELS/qat/$1/qat.json" "$RESULTS/qat_$1.json"
}
qat progressive
qat direct 'stages=["w2a16_asym:g64"]'
qat nested 'stages=["w8a16_asym:g64"]' 'widths=[8, 4, 2]'
qat w3 'stages=["w8a16_asym:g64", "w4a16_asym:g64", "w3a16_asym:g64"]'
qat w4 'stages=["w8a16_asym:g64", "w4a16_asym:g64"]'
wait
