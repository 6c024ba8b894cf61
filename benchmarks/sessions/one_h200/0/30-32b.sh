# Qwen2.5-32B with adapters on an NVFP4 base that learner and engine hold once, the whole in 60 GiB; then rollouts of NVFP4,
# int4 and BF16 at 7B and 14B. TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU.
ONLY=full_in_60 bash benchmarks/sessions/onebase/0/20-32b.sh
for size in 7b 14b; do
  SIZE=$size bash benchmarks/sessions/fp4/0/40-rollout.sh
done
