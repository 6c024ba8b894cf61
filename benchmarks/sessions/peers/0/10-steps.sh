# Whole steps of TRL and verl beside ours on one H200, 128 responses of 512 tokens, two updates of AdamW: at each size
# ours in bf16, TRL's best settings, ours under w8a8, verl's best, both peers' defaults, ours under w4a16, verl with FP8
# rollouts. A line of lines.jsonl each. SIZES="1.7b 4b 8b" and ONLY="ours_bf16 trl_best ..." choose; LENGTH, LABEL and MORE
# overrides make ours other steps of another name. Float32 masters
# of 8B do not fit beside vLLM: there masters and moments are bfloat16 in all three. The wheels: benchmarks/beside_peers.
# TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU: TRL without vLLM, verl's overrides alone.
source benchmarks/sessions/tp/common.sh
site=${SITE:-/tmp/site}
own() { # CASE
  local name=$size.ours_$1${LABEL:-}
  wanted "ours_$1" || return 0
  rm -rf "$RESULTS/run.$name" # else a second try would go on in it
  limited "$name" 330 $PYTHON -m benchmarks.step_gpu --shapes "$shapes" --folder "$folder" --case "$1" "${ours[@]}" \
    --limit-s 310 --run-dir "$RESULTS/run.$name" --log "$RESULTS/run.$name.log" --out "$RESULTS/steps.jsonl" \
    model.init=pretrained checkpoint.every=0 optimizer.name=adamw optimizer.lr=1e-6 optimizer.weight_decay=0.01 \
    optimizer.offload=auto "${masters[@]}" ${MORE:-} || true
  $PYTHON -m benchmarks.beside_peers.lines "$RESULTS/run.$name" --name "$name" --out "$RESULTS/lines.jsonl" || true
}
peer() { # PEER NAME SECONDS OPTIONS...: with packages of its own, which the other peer does not see
  local peer=$1 name=$2 most=$3 packages=$site-$1
  shift 3
  wanted "$name" || return 0
  [ -n "$TINY" ] || SITE=$packages timeout 120 bash benchmarks/offline_host.sh await "$packages/$peer" ||
    { echo "$name: $packages is not there" && return 0; }
  PYTHONPATH="$packages:${PYTHONPATH:-$PWD:$PWD/bridge}" limited "$size.$name" "$most" $PYTHON \
    -m "benchmarks.beside_peers.${peer}_steps" "$folder" --name "$size.$name" --out "$RESULTS/lines.jsonl" \
    --dtype "$dtype" "${peers[@]}" "$@" || true
}
wanted() { [[ " ${ONLY:-$1} " = *" $1 "* ]]; }
for size in ${SIZES:-4b 8b}; do
  shapes=$size folder=$MODELS/$size-peers dtype=float32 masters=(train.grad_dtype=float32) trl=() verl=(--limit-s 500)
  peers=() ours=(--batch 128 --response-len "${LENGTH:-512}" --steps 4) best=(--liger --no-checkpointing --micro 8)
  [ "$size" = 1.7b ] || trl=(--sleep) # else vLLM does not fit beside the update
  [ "$size" != 8b ] || {
    dtype=bfloat16 masters=(model.param_dtype=bfloat16 optimizer.master_rounding=stochastic)
    masters+=(optimizer.moment_dtype=bfloat16 optimizer.second_moment_dtype=bfloat16)
  }
  [ -z "$TINY" ] || {
    shapes=tiny trl=(--engine hf --cpu) verl=(--print-only)
    peers=(--prompts 2 --response-len 8 --steps 4 --micro 4) best=(--no-checkpointing)
    ours=(--batch 16 --response-len 8 --rows 1 --steps 3)
    masters+=(model.attention=xla rollout.engine.memory=given rollout.engine.kv_cache_gb=0.2 rollout.engine.threads=1)
  }
  [ -n "$TINY" ] || bash benchmarks/offline_host.sh await
  [ -e "$folder/train.parquet" ] || $PYTHON -m benchmarks.beside_peers.folder "$folder" --shapes "$shapes"
  own bf16
  peer trl trl_best 420 "${best[@]}" "${trl[@]}"
  own w8a8
  peer verl verl_best 540 "${best[@]}" "${verl[@]}"
  peer trl trl 420 "${trl[@]}"
  peer verl verl 540 "${verl[@]}"
  own w4a16
  peer verl verl_fp8 540 --fp8 "${best[@]}" "${verl[@]}"
done
