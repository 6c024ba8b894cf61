# Whole steps with rows of a micro-batch by the plan: 8B in the settings of the session `peers`, then 8B `w8a8` with 1,024
# tokens a response, its backward in bf16 and in fp8. TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU.
export SIZES=8b
steps() { bash benchmarks/sessions/peers/0/10-steps.sh; }
ONLY="ours_bf16 ours_w8a8 ours_w4a16" steps
[ -n "${TINY:-}" ] || export LENGTH=1024
ONLY=ours_w8a8 LABEL=_1024 steps
ONLY=ours_w8a8 LABEL=_1024_fp8 MORE="quant.backward=fp8" steps
