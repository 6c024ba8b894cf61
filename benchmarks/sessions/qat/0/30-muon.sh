# Loss curves of Muon with Newton-Schulz's products in TF32 (high) and in bfloat16, a GPU's default: end-to-end training of the
# real 0.5B to three bits, two learning rates, four trainings at once (qat.json has the KL of every update). MODELS holds
# qwen25-coder-0.5b, RESULTS the answers of 20-rl.sh. TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU.
export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
export XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_MEM_FRACTION=${FRACTION:-0.2}
answers=${ANSWERS:-$RESULTS/training/answers.jsonl} model=$MODELS/qwen25-coder-0.5b size=(text.rows=1024)
[ -z "${TINY:-}" ] || size=(text.rows=24 text.row_len=64 text.heldout=2 data.holdout=0.3 distill.epochs=1)
mkdir -p "$RESULTS/muon"
for lr in 0.0001 0.0005; do
  for precision in high bfloat16; do
    name=$precision.$lr
    { "${PYTHON:-python3}" -m qarl_jax.qat --config configs/qat/smollm2_135m_gpu.yaml "data=$(bash experiments/qat/data.sh "$answers")" \
      model.path="$model" train=null \
      'stages=["w3a16_asym:g32"]' "${size[@]}" distill.optimizer='{"name": "muon", "lr": '$lr', "matmul_precision": "'$precision'",
      "weight_decay": 0, "schedule": {"kind": "cosine", "warmup_updates": 2}}' out="$MODELS/muon/$name" >"$RESULTS/muon/$name.log" 2>&1 &&
      cp "$MODELS/muon/$name/qat.json" "$RESULTS/muon/$name.json"; } &
    [ -z "${TINY:-}" ] || wait
  done
done
wait
