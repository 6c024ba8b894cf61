# An 8B with all parameters on four GPUs, responses of up to 16,384 tokens.
source benchmarks/sessions/recipes/common.sh
long 8b 0,1,2,3
