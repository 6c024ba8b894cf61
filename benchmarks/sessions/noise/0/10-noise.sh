# The runs of experiments/qwen25_coder/PLAN_noise.md with the 0.5B, five at a time on an H200 (JOBS), seed by seed. RUNS
# ("nvfp4_aqn:1 ...") runs others. MODELS holds qwen25-coder-0.5b.
# TINY=1 RESULTS=DIR MODELS=DIR QUEUE=DIR tries an arm of each base on a CPU.
model=$MODELS/qwen25-coder-0.5b runs=({nvfp4_aqn,nvfp4,w4a16,bf16}:1 {nvfp4_aqn,nvfp4,w4a16,bf16}:2 {nvfp4_aqn,nvfp4,w4a16,bf16}:3)
more=() least=${LEAST:-450}
[ -z "${RUNS:-}" ] || read -r -a runs <<<"$RUNS"
if [ -n "${TINY:-}" ]; then
  runs=(nvfp4_aqn:1 w4a16:1 bf16:1) least=1
  source experiments/qwen25_coder/tiny.sh
  more=("${tiny_step[@]}" train.steps=2 eval.num_samples=2)
else
  bash benchmarks/offline_host.sh await "$model/model.safetensors"
  # On a GPU of 141 GB each of five runs has 11.2 GiB for its learner, which is planned to take 7.
  export JOBS=${JOBS:-5} FRACTION=${FRACTION:-0.08}
fi
left=$(($(bash benchmarks/offline_host.sh left) - 5))
CONFIG=noise SUITES=none EVAL_S=0 LEAST=$least MODEL=$model bash experiments/qwen25_coder/stretch.sh "$RESULTS/noise" \
  $((left < 100000 ? left : 100000)) "${runs[@]}" -- "${more[@]}"
