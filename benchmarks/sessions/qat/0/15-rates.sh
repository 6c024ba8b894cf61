# Which learning rates train the real 0.5B to two bits: the trainings that experiments/qat/PLAN.md lists, two at once, products in
# TF32. RESULTS gets their receipts, and the one with the lowest KL on held-out rows as training/model, from which 20-rl.sh begins.
# ARMS chooses. Five at once filled a disk of 64 GB.
# LIMIT: seconds for the trainings; one that has not ended by then is not chosen. MODELS holds qwen25-coder-0.5b. TINY=1 RESULTS=DIR
# MODELS=DIR tries it on a CPU.
export JAX_DEFAULT_MATMUL_PRECISION=tensorfloat32 FRACTION=${FRACTION:-0.19}
model=$MODELS/qwen25-coder-0.5b rates=$RESULTS/rates
[ -n "${TINY:-}" ] || bash benchmarks/offline_host.sh await "$model/ready"
MODEL=$model bash experiments/qat/rl.sh "$RESULTS/training" 600 answers || exit
mkdir -p "$rates"
ln -sfn "$RESULTS/training/answers.jsonl" "$rates/text.jsonl"
size=(text.rows=1024)
[ -z "${TINY:-}" ] || size=(text.rows=16 text.row_len=64 text.heldout=2 data.holdout=0.3)
lanes=() at=0
for arm in ${ARMS:-8:3e-4:1e-5 8:3e-4:3e-5 2:1e-4:1e-5 2:1e-4:3e-5 2:3e-5:1e-5}; do # rows an update, two rates
  IFS=: read -r rows layers whole <<<"$arm"
  lanes[at++ % 2]+=",train.batch=$rows+distill.batch=$rows+train.optimizer.lr=$layers+distill.optimizer.lr=$whole"
done
RESULTS=$rates MODELS=$MODELS PARTS=${lanes[*]} timeout -k 5 "${LIMIT:-100000}" bash experiments/qat/gpu.sh model.path="$model" \
  "data=$(bash experiments/qat/data.sh "$rates/text.jsonl")" "${size[@]}"
best=$(python3 - "$rates"/qat_*.json <<'END'
import json, math, pathlib, sys

found = {path: json.loads(pathlib.Path(path).read_text())["heldout_kl"] for path in sys.argv[1:]}
for path, (before, after) in sorted(found.items(), key=lambda one: one[1][1]):
    print(f"{before:.4f} {after:.4f} {path}", file=sys.stderr)
print(pathlib.Path(min(found, key=lambda path: found[path][1] if math.isfinite(found[path][1]) else math.inf)).stem[4:])
END
) || exit
echo "$best" | tee "$rates/best"
cp -r "$MODELS/qat/$best" "$RESULTS/training/model"
