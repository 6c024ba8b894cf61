# The rest of QAT of the real 135M.
exec bash experiments/qat/gpu.sh
