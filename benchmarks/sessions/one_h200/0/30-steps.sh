# Whole steps with rows of a micro-batch by the plan, in the settings of the session `peers`: 8B, bf16 twice, then 4B.
# TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU.
steps() { bash benchmarks/sessions/peers/0/10-steps.sh; }
export SIZES=8b
ONLY="ours_bf16 ours_w4a16" steps
ONLY=ours_bf16 LABEL=_again steps
SIZES=4b ONLY="ours_bf16 ours_w8a8 ours_w4a16" steps
