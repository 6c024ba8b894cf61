# Qwen2.5-32B with adapters on an NVFP4 base that learner and engine hold once, the whole in 60 GiB.
# TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU.
ONLY=full_in_60 bash benchmarks/sessions/onebase/0/20-32b.sh
