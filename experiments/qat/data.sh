# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
# Prints `data` of a training on a file of answers, in the chat format of RL: `bash experiments/qat/data.sh ANSWERS.jsonl`.
system=$(sed -n 's/^  system: //p' "$(dirname "$0")/../../configs/qwen25_coder_0p5b/qarl_w4a16.yaml") # with its quotes
echo '{"source": {"name": "jsonl", "path": "'"$1"'"}, "template": "chat", "system": '"$system"', "holdout": 0.1}'
