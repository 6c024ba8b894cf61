# 8B steps of 128 responses of 1,024 tokens with rounded masters (the "fast" rows of docs/operations/steps.md): w8a8 of an
# older tree (OLD, a folder; none: left out), w8a8, bf16, w4a16 of this one. ONLY="w8a8 bf16" runs these alone.
# TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU.
source benchmarks/sessions/tp/common.sh
shapes=8b sizes=(--batch 128 --response-len 1024 --steps 3) more=()
if [ -n "$TINY" ]; then
  shapes=tiny sizes=(--batch 16 --response-len 8 --steps 2 --rows 1)
  more=(model.attention=xla rollout.engine.kv_cache_gb=0.1 rollout.engine.threads=1)
fi
fast() { # NAME CASE
  [[ " ${ONLY:-$1} " = *" $1 "* ]] || return 0
  limited "$1" 230 $PYTHON -m benchmarks.step_gpu --shapes $shapes --folder "$MODELS/$shapes" --case "$2" "${sizes[@]}" \
    --limit-s 210 --log "$RESULTS/$1.run.log" --out "$RESULTS/steps.jsonl" model.param_dtype=bfloat16 \
    optimizer.master_rounding=stochastic optimizer.moment_dtype=int8 optimizer.second_moment_dtype=int8 \
    optimizer.matmul_precision=bfloat16 quant.code_flips=false checkpoint.every=0 "${more[@]}" || true
}
[ -z "${OLD:-}" ] || (cd "$OLD" && PYTHONPATH=$OLD:$OLD/bridge:${SITE:-/tmp/site} fast old_w8a8 w8a8)
fast w8a8 w8a8
fast bf16 bf16
fast w4a16 w4a16
