# What the first jobs leave: every condition of a rollout over four shards; nvfp4 and adapters over two; 8B in bf16.
source benchmarks/sessions/tp/common.sh
gate tp4_conditions 4 0,1,2,3 $shapes w8a8 "${sizes[@]}" --updates 0 --conditions long samples stop cool chunks preempted
[ -z "$TINY" ] || exit 0
gate tp2_nvfp4 2 0,1 $shapes nvfp4 "${sizes[@]}" --updates 1 &
gate tp2_lora 2 2,3 $shapes w4a16 "${sizes[@]}" --updates 1 --lora-rank 32 &
wait
for scheme in fp8 nvfp4; do gate tp4_$scheme 4 0,1,2,3 $shapes $scheme "${sizes[@]}" --updates 1; done
price price_8b_bf16_2 200 0,1 8b bf16 2 "128 256 512" &
price price_8b_bf16_1 200 2 8b bf16 1 "64 128 256" &
wait
price price_8b_bf16_4 200 0,1,2,3 8b bf16 4 "128 256 512"
price price_8b_vllm_4 280 0,1,2,3 8b w8a8 4 "128 256 512" --arithmetics vllm
