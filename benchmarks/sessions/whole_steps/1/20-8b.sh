bash benchmarks/sessions/whole_steps/8b.bash w8a8 w8a8-rollout
