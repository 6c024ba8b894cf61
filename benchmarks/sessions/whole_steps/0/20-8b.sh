bash benchmarks/sessions/whole_steps/8b.bash bf16
