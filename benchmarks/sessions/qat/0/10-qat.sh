# A real model trained down to two bits, GPTQ and end-to-end training beside it: up to 15 minutes of one GPU that other jobs
# may share (up to 0.15 of its memory a part, 45 GB of disk). TINY=1 RESULTS=DIR MODELS=DIR bash FILE tries it on a CPU.
exec bash experiments/qat/gpu.sh
