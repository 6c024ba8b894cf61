# Every test that needs a GPU, a process for each file: an illegal access fails all later tests of its process. Each file has
# a log with the seconds of its tests, and a junit file. A failed test is a result, and ends nothing. FILES and KEEP (pytest's
# -k) choose. The host needs pytest, pytest-timeout and hypothesis. TINY=1 tries it on a CPU, where tests skip themselves.
export JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false
if [ -n "${TINY:-}" ]; then
  export JAX_PLATFORMS=cpu
  FILES=${FILES:-tests/kernels/test_offsets.py tests/quant/test_gpu.py}
else
  bash benchmarks/offline_host.sh await
fi
out=$RESULTS/gpu_tests
mkdir -p "$out"
longest=tests/gpu/test_one_function.py # and so the last
for file in ${FILES:-$(grep -rl "pytest.mark.gpu" tests --include='test_*.py' | grep -v "$longest" | sort -r) $longest}; do
  left=$(($(bash benchmarks/offline_host.sh left) - 20))
  [ "$left" -gt 60 ] || break
  name=$(basename "$file" .py)
  # SIGINT lets pytest write what it has.
  timeout --signal=INT --kill-after=15 "$((left < 900 ? left : 900))" python3 -m pytest -q -m gpu -p no:cacheprovider \
    -k "${KEEP:-}" --durations=0 --durations-min=0.1 --junit-xml="$out/$name.xml" "$file" >"$out/$name.log" 2>&1 ||
    echo "$file: exit $?"
  tail -n 1 "$out/$name.log" | sed "s|^|$file: |"
done
# The slowest tests of all files, and the tests that failed.
cat "$out"/*.log | grep -E '^[0-9.]+s (call|setup|teardown)' | sort -rn >"$out/durations.txt" || true
head -n 10 "$out/durations.txt"
grep -hE '^(FAILED|ERROR) ' "$out"/*.log || true
