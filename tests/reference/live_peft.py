# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python live_peft.py MODEL ADAPTERS ID...`: log-probs of a prompt by vLLM's own LoRA, without the bridge.

Prints a JSON list of two: those of the base, and with the PEFT folder.
"""

import json
import os
import sys

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    model, adapters, *ids = sys.argv[1:]
    settings = {"enforce_eager": True, "max_model_len": 64, "max_num_seqs": 2, "skip_tokenizer_init": True}
    engine = LLM(model=model, dtype="float32", enable_lora=True, max_lora_rank=8, **settings)
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0, detokenize=False)
    found = []
    for request in (None, LoRARequest("adapters", 1, adapters)):
        (answer,) = engine.generate({"prompt_token_ids": list(map(int, ids))}, asked, lora_request=request)
        found.append([one[int(token)].logprob for one, token in zip(answer.prompt_logprobs[1:], ids[1:], strict=True)])
    print(json.dumps(found))


if __name__ == "__main__":  # vLLM may import this file again
    main()
