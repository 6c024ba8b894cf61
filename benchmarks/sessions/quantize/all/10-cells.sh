# Cells of experiments/when_to_quantize/PLAN.md, on every GPU, two runs at a time where one has 141 GB: a run, then the cells
# that deploy it. The longest first; WORK is RESULTS/quantize. SEEDS (1 2 3), RUNS ("bf16:1 w4a16:2 ...") choose others.
# CELLS: overrides in place of the plan's. A session that ends early goes on where MODELS and RESULTS are kept.
# GPTQ (/tmp/gptq): llm-compressor and what it imports, some 70 MB, beside the packages of vLLM:
#   SMALL="llmcompressor compressed-tensors==0.19.0 loguru datasets accelerate pandas pyarrow dill multiprocess xxhash
#   python-dateutil nvidia-ml-py" FROM_SOURCE= bash benchmarks/offline_host.sh wheels DIR     # then there:
#   SITE=/tmp/gptq bash benchmarks/offline_host.sh install DIR
# TINY=1 RESULTS=DIR MODELS=DIR bash FILE tries every cell of seed 1 on a CPU with the quickstart's policy.
tiny=${TINY:-} python=${PYTHON:-python3} gptq=${GPTQ:-/tmp/gptq} work=$RESULTS/quantize jobs=1 gpus=0
cells=(model.path="$MODELS/qwen25-coder-0.5b" train.steps=28 eval.num_prompts=2000 eval.num_samples=1 data.source.size=60000)
config=configs/qwen25_coder_0p5b/bf16_tbpo.yaml seeds=${SEEDS:-1 2 3}
if [ -n "$tiny" ]; then
  config=configs/quickstart_vllm.yaml seeds=${SEEDS:-1}
  cells=(train.steps=1 eval.num_prompts=16 eval.num_samples=1 rollout.engine.threads=1)
else
  bash benchmarks/offline_host.sh await "$gptq/llmcompressor" "$MODELS/qwen25-coder-0.5b/model.safetensors"
  mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits -i 0)
  gpus=$(seq 0 $(($(nvidia-smi --list-gpus | wc -l) - 1)))
  if [ "$mib" -gt 100000 ]; then
    jobs=2 cells+=(rollout.engine.gpu_memory_utilization=0.1 rollout.engine.kv_cache_gb=4.5)
    export XLA_PYTHON_CLIENT_MEM_FRACTION=0.34
  fi
fi
[ -z "${CELLS:-}" ] || read -r -a cells <<<"$CELLS"
mkdir -p "$work"
printf '#!/bin/sh\nPYTHONPATH=%s:$PYTHONPATH exec %s "$@"\n' "$gptq" "$python" >"$work/with_gptq" && chmod +x "$work/with_gptq"

cell() { # ARM GRID SEED: recorded once
  grep -qs "\"arm\": \"$1\", \"grid\": \"$2\", \"seed\": $3," "$work/cells.jsonl" && return
  [ "$(bash benchmarks/offline_host.sh left)" -gt 60 ] || return
  timeout -s INT -k 60 $(($(bash benchmarks/offline_host.sh left) - 20)) "$python" -m experiments.when_to_quantize.cell \
    "$work" "$@" --config "$config" --gptq-python "$work/with_gptq" "${cells[@]}" >>"$work/$1_$2_$3.log" 2>&1 ||
    echo "ended with $?: $*"
}
run() { # SCHEME SEED: the cells of a run
  local grid
  case $1 in
  base) for grid in w4a16 w3a16 w8a8; do cell untrained $grid "$2"; done ;;
  bf16) for grid in w4a16 w3a16 w8a8; do cell rtn $grid "$2" && cell gptq $grid "$2"; done ;;
  w8a8) cell qarl w8a8 "$2" && cell qarl_elsewhere w4a16 "$2" ;;
  w3a16) cell qarl w3a16 "$2" ;;
  w4a16)
    cell qarl w4a16 "$2" && cell qarl_elsewhere w3a16 "$2" && cell qarl_elsewhere w8a8 "$2"
    [ "$2" != 1 ] || cell stock w4a16 "$2"
    ;;
  esac
}
runs=()
for scheme in bf16 w4a16 w3a16 w8a8 base; do for seed in $seeds; do runs+=("$scheme:$seed"); done; done
[ -z "${RUNS:-}" ] || read -r -a runs <<<"$RUNS"
rm -f "$work/places" && mkfifo "$work/places" && exec 5<>"$work/places"
for ((i = 0; i < jobs; i++)); do for gpu in $gpus; do echo "$gpu" >&5; done; done
for each in "${runs[@]}"; do
  read -r -u 5 gpu
  { CUDA_VISIBLE_DEVICES=$gpu run "${each%:*}" "${each#*:}" || true; echo "$gpu" >&5; } &
done
wait
"$python" -m experiments.when_to_quantize.table "$work" | tee "$work/table.md"
