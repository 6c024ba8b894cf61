# Arms of experiments/qwen25_coder/PLAN_WORKBENCH.md beside their neighbours, two on a GPU of 141 GB: on four some 25 minutes.
# ARMS ("bands_spread:1 ...") runs others. MODELS holds qwen25-coder-0.5b, and qwen25-coder-1.5b for the arm that has a teacher.
# TINY=1 RESULTS=DIR MODELS=DIR QUEUE=DIR tries them on a CPU with SmolLM2-135M.
tiny=${TINY:-} model=$MODELS/qwen25-coder-0.5b teacher=$MODELS/qwen25-coder-1.5b gpus=1 more=()
neighbours=(qarl_w4a16:1 aligned_grpo_w4a16:1 rollout_w4a16_grpo:1)
arms=(bands_spread:1 bands_length:1 dppo_tv:1 dppo_kl:1 ais:1 self_distillation:1 distillation:1)
[ -z "${ARMS:-}" ] || read -r -a arms <<<"$ARMS"
if [ -n "$tiny" ]; then
  export JOBS=1 LEAST=1
  model=$MODELS/smollm2-135m teacher=$model neighbours=()
  source experiments/qwen25_coder/tiny.sh
  more=("${tiny_step[@]}" quant.group_size=64 train.steps=1 eval.every=0 eval.at_end=false)
else
  bash benchmarks/offline_host.sh await "$model/model.safetensors" "$teacher/model.safetensors"
  gpus=$(nvidia-smi --list-gpus | wc -l)
fi

some() { # GPU CONFIG RUN... [-- override...]: an empty CONFIG: each arm is a file
  local gpu=$1 config=$2 these=() left
  shift 2
  while [ $# -gt 0 ] && [ "$1" != -- ]; do these+=("$1") && shift; done
  [ $# -eq 0 ] || shift
  left=$(($(bash benchmarks/offline_host.sh left) - 5))
  [ ${#these[@]} -eq 0 ] || CARDS=$gpu CONFIG=$config MODEL=$model bash experiments/qwen25_coder/plan_1p5b.sh \
    "$RESULTS/$gpu" "$((left < 100000 ? left : 100000))" "${these[@]}" -- "${more[@]}" "$@"
}
all=("${neighbours[@]}" "${arms[@]}")
for gpu in $(seq 0 $((gpus - 1))); do
  files=() named=() taught=()
  mkdir -p "$RESULTS/$gpu"
  [ -e "$RESULTS/$gpu/questions.jsonl" ] ||
    tar xJf experiments/qwen25_coder/results_1p5b_plan.tar.xz -O runs/questions/questions.jsonl >"$RESULTS/$gpu/questions.jsonl"
  for number in "${!all[@]}"; do
    [ $((number % gpus)) = "$gpu" ] || continue
    case ${all[number]} in
    distillation:*) taught+=("${all[number]}") ;;
    *w4a16*) files+=("${all[number]}") ;;
    *) named+=("${all[number]}") ;;
    esac
  done
  { some "$gpu" "" "${files[@]}" && some "$gpu" workbench "${named[@]}" &&
    some "$gpu" workbench "${taught[@]}" -- kl.reference="$teacher"; } &
done
wait
