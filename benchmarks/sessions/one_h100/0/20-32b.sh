# QeRL's headline: Qwen2.5-32B shapes, adapters of rank 32 on an NVFP4 base, learner and engine on one GPU of 80 GB.
pkill -f experiments/qat || true # goes on after the timed jobs
pkill -f qarl_jax.qat || true
python3 -m benchmarks.step_gpu --shapes qwen2.5-32b --folder "$MODELS/32b" --case nvfp4 --lora-rank 32 --batch 64 \
  --response-len 2048 --mean-len 400 --steps 5 --limit-s 420 --log "$RESULTS/step_32b.log" --out "$RESULTS/steps.jsonl"
