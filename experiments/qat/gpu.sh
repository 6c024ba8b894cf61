# SmolLM2-135M through all of its layers on one GPU; beside it GPTQ and end-to-end training, on equal text with equal groups.
# MODELS holds smollm2-135m. RESULTS gets receipts, logs and, as each arm is done, a line of perplexities. A killed run goes on
# with the same command. Arguments are overrides of all arms. PARTS chooses arms: parts run side by side, and the arms of a part,
# joined by commas, one after the other. An arm may be overrides joined by plus signs: PARTS="train.optimizer.lr=3e-4+distill=null".
# FRACTION of the GPU is what each part may take (0.15; 20 GB). TINY=1 tries it on a CPU.
# XLA's search for the fastest kernels took more than four minutes of an arm's start, and changed no speed that was seen.
export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
export XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_MEM_FRACTION=${FRACTION:-0.15} JAX_COMPILATION_CACHE_DIR=$MODELS/xla
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
config=configs/qat/smollm2_135m_gpu.yaml model=$MODELS/smollm2-135m text=$RESULTS/text.jsonl tiny=()
if [ -n "${TINY:-}" ]; then
  model=assets/tiny-qwen3
  tiny=(data=null text.rows=16 text.row_len=32 text.heldout=4 distill.optimizer.schedule.warmup_updates=2)
elif [ ! -e "$text" ]; then
  python3 experiments/qat/text.py "$text.partial" --stdlib --packages numpy jax torch && mv "$text.partial" "$text"
fi
settings=("$config" model.path="$model" data.source.path="$text" "${tiny[@]}" "$@")
qat() { # name, overrides
  [ ! -e "$RESULTS/qat_$1.json" ] || return 0
  python3 -m qarl_jax.qat --config "${settings[@]}" out="$MODELS/qat/$1" "${@:2}" >>"$RESULTS/qat_$1.log" 2>&1 || return 0
  cp "$MODELS/qat/$1/qat.json" "$RESULTS/qat_$1.json"
  python3 -c 'import json, sys; found = json.load(open(sys.argv[1])); print(json.dumps({"arm": sys.argv[2],
    "stages": found["config"]["stages"], **found["perplexity"]}))' "$RESULTS/qat_$1.json" "$1" >>"$RESULTS/qat.jsonl"
}
gptq() { python3 experiments/qat/gptq.py "${settings[@]}" --out "$RESULTS/gptq.jsonl" >>"$RESULTS/gptq.log" 2>&1; }
arm() { # NAME
  case $1 in
  gptq) gptq ;;
  end_to_end) qat $1 train=null distill.epochs=5 ;;
  end_to_end_faster) qat $1 train=null distill.epochs=5 distill.optimizer.lr=0.0003 ;;
  direct) qat $1 'stages=["w2a16_asym:g32"]' train.epochs=3 ;;
  progressive) qat $1 ;;
  split) qat $1 split=0.05 ;;
  nested) qat $1 'stages=["w8a16_asym:g32"]' 'widths=[8, 4, 2]' ;;
  w3) qat $1 'stages=["w8a16_asym:g32", "w4a16_asym:g32", "w3a16_asym:g32"]' ;;
  w4) qat $1 'stages=["w8a16_asym:g32", "w4a16_asym:g32"]' ;;
  midpoint | shift) qat "$1" 'stages=["w2a16_'"$1"':g32"]' distill=null ;;
  *=*) qat "$1" ${1//+/ } ;;
  *) echo "unknown arm: $1" >&2 && exit 2 ;;
  esac
}
part() { for each in ${1//,/ }; do arm "$each"; done; }
for each in ${PARTS:-gptq end_to_end,end_to_end_faster,direct progressive,split nested,w3,w4,midpoint,shift}; do
  if [ -n "${TINY:-}" ]; then part "$each"; else part "$each" & fi
done
wait
