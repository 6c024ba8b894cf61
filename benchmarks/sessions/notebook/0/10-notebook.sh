# The GPU notebook from top to bottom on one card, its outputs saved: copy $RESULTS/gpu_vllm.ipynb over examples/gpu_vllm.ipynb.
# Needs vLLM, matplotlib and reasoning-gym, no Jupyter. TINY=1 RESULTS=DIR bash FILE tries it on a CPU.
values=()
if [ -n "${TINY:-}" ]; then
  values=("OVERRIDES=[train.prompts_per_step=8, train.prompts_per_update=8, train.micro_batch_rows=8]" STEPS=2)
else
  bash benchmarks/offline_host.sh await
fi
python3 examples/execute.py examples/gpu_vllm.ipynb "$RESULTS/gpu_vllm.ipynb" "${values[@]}"
