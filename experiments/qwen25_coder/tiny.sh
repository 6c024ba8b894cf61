# What TINY=1 tries a script with, where it is sourced: steps of four short responses, two test questions, for a CPU.
tiny_step=(train.prompts_per_step=2 train.prompts_per_update=1 rollout.num_samples_per_prompt=2 rollout.max_response_len=8
  rollout.engine.max_model_len=400 rollout.engine.max_num_seqs=8 rollout.engine.kv_cache_gb=0.3 rollout.engine.threads=1
  train.micro_batch_rows=1 train.row_len=512 train.logprob_chunk=128 eval.num_prompts=2
  train.entropy_coef=0.01) # a gradient, whatever the reward
