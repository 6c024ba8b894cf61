# Whole steps with rows of a micro-batch by the plan: 8B and 4B in the settings of the session `peers`, then 8B `w8a8` with
# rounded masters, 128 responses of 1,024 tokens. TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU.
for size in 8b 4b; do
  SIZES=$size ONLY="ours_bf16 ours_w8a8 ours_w4a16" bash benchmarks/sessions/peers/0/10-steps.sh
done
ONLY=w8a8 bash benchmarks/sessions/w8a8/0/20-steps.sh
