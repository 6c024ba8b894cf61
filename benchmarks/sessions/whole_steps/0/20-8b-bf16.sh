timeout 330 python3 -m benchmarks.step_gpu --shapes 8b --folder "$MODELS/8b-bf16" --case bf16 --batch 128 --steps 2 --limit-s 320 \
  --log "$RESULTS/step_8b_bf16.log" --out "$RESULTS/step_8b_$CARD.jsonl" model.param_dtype=bfloat16 optimizer.moment_dtype=int8 \
  optimizer.offload=true quant.code_flips=false rollout.engine.staging_buffers=1
