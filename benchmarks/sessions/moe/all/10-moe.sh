# Qwen3-30B-A3B's shapes with all 48 layers on four GPUs of 141 GB: whole steps under w4a16 and in bf16, both with int8 moments
# on the GPU, then the recipes of four such GPUs. Random weights. A step of 256 responses takes some 25 s.
# TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU, in three minutes.
source benchmarks/sessions/recipes/common.sh

# compare RESPONSES LENGTH UPDATES STEPS OVERRIDES...: the same steps under both schemes.
compare() {
  local responses=$1 length=$2 updates=$3 steps=$4 shapes=30b-a3b gpus=0,1,2,3 cards=4 case more=()
  shift 4
  [ -z "$TINY" ] || {
    simulated 2
    responses=16 length=8 shapes=tiny-moe cards=2
    more=(model.attention=xla rollout.engine.kv_cache_gb=0.1 rollout.engine.threads=1)
  }
  for case in w4a16 bf16; do
    name=${shapes}_${responses}_${length}_$case
    on "$gpus" limited "$name" 560 $PYTHON -m benchmarks.step_gpu --shapes $shapes --cards "$cards" --folder "$MODELS/$shapes" \
      --case $case --batch "$responses" --response-len "$length" --updates "$updates" --steps "$steps" --limit-s 540 \
      --run-dir "$RESULTS/runs/$name" --log "$RESULTS/run_$name.log" --out "$RESULTS/moe.jsonl" \
      checkpoint.every=0 optimizer.offload=auto optimizer.matmul_precision=bfloat16 "$@" "${more[@]}" || true
  done
}

if [ -n "$TINY" ]; then
  compare 16 8 2 1
  exit
fi
bash benchmarks/offline_host.sh await
memory
compare 256 1024 4 4
compare 128 4096 4 2 train.micro_batch_rows=16
for arm in 4x141_moe 4x141; do recipe $arm 0,1,2,3 $recipes arm=$arm; done
compare 128 1024 2 4
kill "$watch"
