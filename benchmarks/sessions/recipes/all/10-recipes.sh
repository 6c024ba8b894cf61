# What no record in benchmarks/results has yet of recipes at their own lengths, random weights, three steps of an update of 64
# responses each: on four GPUs of 141 GB or of 80, or `2x80` alone on two of 80 GB. On one or two of 141 GB QaRL's runs with
# responses of 16,384 tokens, 8B with all parameters and 30B-A3B with adapters; on one the small recipes first.
# TINY=1 RESULTS=DIR MODELS=DIR tries it on a CPU, in nine minutes.
source benchmarks/sessions/recipes/common.sh

if [ -n "$TINY" ]; then
  recipe 1x24 0 $recipes arm=1x24
  exit
fi
bash benchmarks/offline_host.sh await
memory
total=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits -i 0)
if [ "$total" -gt 100000 ] && [ "$gpus" = 1 ]; then
  for arm in 1x24 1x48 1x80_lora; do recipe $arm 0 $recipes arm=$arm; done
  EACH=1 long 8b 0
  long 30b_a3b 0 lora.rank=32 optimizer.name=adamw optimizer.offload=false
elif [ "$total" -gt 100000 ] && [ "$gpus" = 2 ]; then
  EACH=1 long 8b 0 & # its KV cache holds eight such responses
  long 30b_a3b 1 lora.rank=32 optimizer.name=adamw optimizer.offload=false &
  wait
elif [ "$total" -gt 100000 ]; then
  for arm in 4x141_moe 4x141; do recipe $arm 0,1,2,3 $recipes arm=$arm; done
  long 8b 0,1,2,3
elif [ "$gpus" = 2 ]; then
  recipe 2x80 0,1 $recipes arm=2x80
else
  recipe 2x80 0,1 $recipes arm=2x80 &
  recipe 1x80_lora 2 $recipes arm=1x80_lora &
  wait
  recipe 4x80 0,1,2,3 $recipes arm=4x80
  long 8b 0,1,2,3
fi
kill "$watch"
