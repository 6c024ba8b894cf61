# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/adding.md is true: a scheme, a loss, a family, an option and a reward are built from the page's blocks, and run.

The blocks go into a copy of the tree, where programs use what they add. A new file is a block of Python that begins
with its path; a change to a file is a diff whose hunks begin with a context or a removed line.
"""

import collections
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

import pytest

from tests.reference import forks, tiny

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "adding.md").read_text()
COPIED = (
    "qarl_jax",
    "bridge/qarl_bridge",
    "benchmarks",
    "configs",
    "assets/tiny-qwen3",
    "docs/schemes.md",
    "tests/reference",
    "tests/conftest.py",
    "tests/quant/test_schemes.py",
    "tests/quant/test_dot.py",
    "tests/bridge/test_formats.py",
    "tests/loss/test_loss_battery.py",
    "pyproject.toml",
)
# What the programs import, of which several take seconds; no JAX backend starts before a fork.
IMPORTED = """
import contextlib, pytest, transformers
with contextlib.suppress(ImportError):
    import torch
import qarl_bridge, qarl_jax
from qarl_jax import models, quant
from qarl_jax.rollout.vllm import engine
from qarl_jax.run import config, export
del config, engine, export
"""
SECTIONS = {
    "scheme": "A quantization scheme",
    "loss": "A loss",
    "family": "A model family",
    "option": "An option of vLLM's engine",
    "reward": "A reward",
}


def blocks(section):
    """(language, path, text below the path) of a section's code blocks."""
    text = PAGE.split(f"\n## {SECTIONS[section]}\n")[1].split("\n## ")[0]
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        if language in ("python", "diff"):
            head, _, rest = block.partition("\n")
            assert head.startswith("# "), block
            yield language, head.removeprefix("# "), rest


def hunks(diff):
    """(old, new) text of each hunk."""
    found = []
    for line in diff.splitlines():
        if line[:1] != "+" and (not found or found[-1][-1][:1] == "+"):
            found.append([])
        found[-1].append(line)
    for lines in found:
        old, new = ([line[1:] for line in lines if line[:1] in (" ", sign) or not line] for sign in "-+")
        yield "\n".join(old) + "\n", "\n".join(new) + "\n"


def changed(tree, section):
    """The files that a section's blocks add or change, in `tree`."""
    for language, path, text in blocks(section):
        file = tree / path
        if language == "python":
            assert not file.exists(), path
            file.write_text("# Copyright 2026 The qarl_jax authors.\n# SPDX-License-Identifier: Apache-2.0\n" + text)
        for old, new in hunks(text) if language == "diff" else ():
            before = file.read_text()
            assert before.count(old) == 1, (path, old)
            file.write_text(before.replace(old, new))
        yield path


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the tree with all of the page's blocks in it; `files`: those of each section."""
    copy = tmp_path_factory.mktemp("tree")
    for name in COPIED:
        source, target = ROOT / name, copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        ignored = shutil.ignore_patterns("__pycache__", "results", "*.json.gz", "*.xz")
        shutil.copytree(source, target, ignore=ignored) if source.is_dir() else shutil.copy(source, target)
    files = {section: list(changed(copy, section)) for section in SECTIONS}
    return collections.namedtuple("Tree", "path files")(copy, files)


@pytest.fixture(scope="module")
def run(tree, tmp_path_factory):
    """Runs a program on the copy, in a fork of one process that has imported it: the words that it printed."""
    env = tiny.environment(str(tmp_path_factory.mktemp("compiled"))) | {
        "PYTHONPATH": os.pathsep.join([str(tree.path), str(tree.path / "bridge")]),
        "JAX_PLATFORMS": "cpu",
    }
    imports = f"import os\nos.chdir({str(tree.path)!r})\n" + IMPORTED
    with forks.forks(imports, tmp_path_factory.mktemp("programs"), env) as forked:

        def words(program):
            said = forked("print(qarl_jax.__file__, qarl_bridge.__file__)\n" + textwrap.dedent(program))
            head, _, said = said.partition("\n")
            assert head.split() == [
                str(tree.path / name / "__init__.py") for name in ("qarl_jax", "bridge/qarl_bridge")
            ]
            return said.split()

        yield words


def test_a_scheme_takes_five_files_at_most_and_what_is_built_is_clean(tree):
    files = tree.files["scheme"]
    assert files[0] == "qarl_jax/quant/schemes/w5a16.py"
    assert len(set(files)) <= 5
    python = [str(tree.path / file) for found in tree.files.values() for file in set(found) if file.endswith(".py")]
    ruff = [sys.executable, "-m", "ruff"]
    for arguments in (["check"], ["format", "--check"]):
        command = [*ruff, *arguments, "--config", str(ROOT / "pyproject.toml"), *python]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


SCHEME = """
import dataclasses, json, pathlib, sys
import jax, jax.numpy as jnp, numpy as np
from qarl_jax import models, quant
from qarl_jax.rollout import PolicyWeights, SamplingConfig

jax.config.update("jax_disable_most_optimizations", True)  # in a tenth of the time: no claim is about the compiler
MODEL = "assets/tiny-qwen3"
config = quant.parse_scheme("w5a16")
assert str(config) == "w5a16" and "w5a16" in quant.scheme_names()

def policy(engine="plain"):
    model = models.load_hf(MODEL, dtype="float32", scheme="w5a16", engine=engine)
    graphdef, params, _ = models.split(model)
    return PolicyWeights(graphdef=graphdef, params=params, qweights=models.quantize_params(graphdef, params))
"""


@pytest.mark.slow
def test_the_scheme_has_its_grid_and_is_published_read_back_and_sampled(run):
    said = run(
        SCHEME
        + """
from qarl_bridge.client import sender
from qarl_jax.rollout.vllm import engine as vllm
from qarl_jax.verify import ladder
from benchmarks import gate, jax_bridge
from qarl_jax.rollout.embedded import engine as embedded
from qarl_bridge.protocol import messages
from qarl_jax.types import Completion, VersionSpan

w = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
served = np.asarray(quant.dequantize(quant.quantize(w, config), jnp.float32))
error = np.linalg.norm(served - w) / np.linalg.norm(w)
assert 0.03 < error < 0.06, error  # between int4's 0.11 and int8's 0.007

weights = policy()
assert [rung.ok for rung in ladder.exact_rungs(weights)] == [True, True]

# Over the bridge's protocol into an engine that keeps what it is given, and back.
bridge = vllm.VllmEngine(dataclasses.replace(vllm.Config(readback="full"), engine="fake"))
try:
    report = bridge.publish(weights, 0)
    count = len(dict(vllm.engine_tensors(weights)))
    assert report["tensors"] == report["weights_read_back"] == count, report
finally:
    bridge.close()

# And into one that computes with the bytes: its tokens are scored by the learner.
sampler = embedded.Config(batch_size=8, min_slots=8)
engine = jax_bridge.JaxEngine(weights.graphdef, sampler, max_model_len=64)
tensors = dict(vllm.engine_tensors(weights, stacked=True))
leaves = {name.rpartition(".")[2] for name in tensors}
assert {"weight_codes", "weight_block_scale", "weight_scale"} <= leaves
engine.load([tensors])
engine.read_back([tensors], "full", 0)
for i in range(8):
    engine.submit(str(i), messages.Draw(prompt=[5, 6, 7 + i], seed=i), messages.Sampling(max_tokens=12))
drawn = {}
while engine.running():
    drawn |= {one.request_id: one for one in engine.step()}
found = [
    Completion(prompt_tokens=(5, 6, 7 + i), tokens=tuple(one.tokens.tolist()), logprobs=one.logprobs,
               finish_reason="length", versions=(VersionSpan(version=0, start=0, end=12),))
    for i, one in ((i, drawn[str(i)]) for i in range(8))
]
sampled = ladder.Sampled.of(found)

def k3(scorer):
    logprobs, entropy = ladder.score(scorer, sampled)
    return ladder.mismatch(logprobs, sampled.logprobs, entropy, sampled.response)["k3"]

aligned, control, plain = k3(weights), k3(gate.one_weight_changed(weights)), k3(ladder.load(MODEL, "bf16", "plain"))
print(aligned, control, plain)
""",
    )
    aligned, control, unaligned = map(float, said)
    assert aligned < 1e-10 < 1e-4 < unaligned
    assert control > 10 * aligned


@pytest.mark.slow
def test_the_scheme_is_planned_and_exported_byte_for_byte(run, tmp_path):
    run(
        SCHEME
        + f"""
from qarl_jax.memory import learner
from qarl_jax.run import config as run_config
from qarl_jax.run import export
from safetensors.numpy import load_file

cfg = run_config.load("configs/quickstart.yaml", ["quant.forward=w5a16"])
weights = policy()
held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights.qweights))
assert learner.parts(cfg)["QTensors"] == held
n_k = [q.shape for q in jax.tree.leaves(weights.qweights, is_leaf=lambda x: isinstance(x, quant.QTensor))]
assert held == sum(int(np.prod(s)) + int(np.prod(s)) // 32 + 4 * int(np.prod(s[:-1])) for s in n_k)

out = pathlib.Path({str(tmp_path / "out")!r})
out.mkdir()
export.write_quantized(weights.graphdef, weights.params, weights.qweights, out)
section = json.loads((out / "config.json").read_text())["quantization_config"]
assert section["format"] == "w5-quantized"
assert section["config_groups"]["group_0"]["weights"]["num_bits"] == 5
files = {{}}
for file in sorted(out.glob("*.safetensors")):
    from qarl_jax.models.hf import safetensors
    opened = safetensors.SafetensorsFile(file)
    files |= {{name: opened.tensor(name) for name in opened.entries}}
first = models.by_path(weights.qweights)["stacks.0.mlp.down.kernel"]
name = "model.layers.0.mlp.down_proj"
for array in config.wire.arrays:
    mine = np.asarray(first.arrays[array.name][0])
    assert files[f"{{name}}.{{array.leaf}}"].tobytes() == mine.tobytes(), array
""",
    )


@pytest.mark.slow
def test_the_scheme_is_read_back_through_a_live_layer_and_one_wrong_code_is_found(run):
    pytest.importorskip("torch")
    run(
        SCHEME
        + """
import contextlib
import torch
from qarl_bridge.engine.readback import linear
from qarl_bridge.protocol import formats
from qarl_bridge.protocol.errors import BridgeError

class Live(torch.nn.Module):
    class Method:
        @staticmethod
        def apply(layer, x, bias):
            return (x.float() @ layer.held.float().t()).bfloat16()

    def __init__(self, held):
        super().__init__()
        self.held, self.quant_method = held, self.Method

def torch_of(array):
    if array.dtype == formats.FLOAT8:
        return torch.from_numpy(array.view(np.uint8).copy()).view(torch.float8_e4m3fn)
    return torch.from_numpy(np.array(array))

prefix, tensors, served = "model.layers.0.self_attn", {}, []
for seed, part in enumerate("qkv"):
    w = np.random.default_rng(seed).normal(size=(16, 64)).astype(np.float32)
    qt = quant.quantize(w, config)
    arrays = {name: np.asarray(array) for name, array in qt.arrays.items()}
    packed = formats.pack(f"{prefix}.{part}_proj", arrays, config.wire)
    tensors |= {name: torch_of(array) for name, array in packed.items()}
    served.append(np.array(quant.dequantize(qt, jnp.float32)))
live = Live(torch.from_numpy(np.concatenate(served)).bfloat16())
reader = linear.ReadBack({f"{prefix}.qkv_proj": live}, {}, device=torch.device("cpu"), activations="bf16",
                         context=contextlib.nullcontext)
assert reader.compare([tensors], "full", 0) == (1, 64)
tensors[f"{prefix}.k_proj.weight_codes"][3, 5] += 1
try:
    reader.compare([tensors], "full", 0)
except BridgeError as error:
    assert "qkv_proj holds" in str(error) and "[19, 5]" in str(error), error
else:
    raise AssertionError("a wrong code was not found")
""",
    )


def passed(run, *arguments):
    """The number of tests that pass; none may fail."""
    options = ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments]
    return int(re.findall(r"(\d+) passed", " ".join(run(f"assert pytest.main({options}) == 0")))[0])


@pytest.mark.nightly
def test_the_battery_greets_the_scheme(run):
    files = ["tests/quant/test_schemes.py", "tests/quant/test_dot.py", "tests/bridge/test_formats.py"]
    assert passed(run, "-k", "w5a16", *files) > 15


@pytest.mark.slow
def test_the_battery_greets_a_loss_without_a_ratio(run):
    assert passed(run, "-k", "reinforce", "-m", "not slow", "tests/loss/test_loss_battery.py") > 5


@pytest.mark.slow
def test_the_option_goes_from_the_config_to_vllm_and_is_refused_by_name(run):
    said = run(
        """
        from qarl_bridge.engine import versions
        from qarl_jax.run import config
        from qarl_jax.types import UserError

        def arguments(*overrides):
            cfg = config.load("configs/quickstart.yaml", ["rollout.engine={name: vllm}", *overrides])
            options = type(cfg.rollout.engine).from_json(cfg.rollout.engine.to_json())
            return versions.engine_arguments(options, path="/m", has_weights=False, on_gpu=False)

        assert "long_prefill_token_threshold" not in arguments()
        assert arguments("rollout.engine.max_prefill_tokens=64")["long_prefill_token_threshold"] == 64
        try:
            arguments("rollout.engine.max_prefill_tokens=-1")
        except UserError as error:
            print("refused" if "max_prefill_tokens must not be negative" in str(error) else error)
        """,
    )
    assert said == ["refused"]


@pytest.mark.slow
def test_the_reward_grades_with_its_option(run):
    said = run(
        """
        from qarl_jax.rewards import function
        from qarl_jax.rewards.sample import Sample
        from qarl_jax.types import Prompt

        cfg = function.Config(path="my_rewards.py:digits", options={"scale": 0.5})
        prompt = Prompt(uid="a", tokens=(1,), text="1+2=", answer="3", meta={})
        reward = function.Reward(cfg, 8)
        try:
            print(*reward.score([Sample(prompt=prompt, text=text, num_tokens=2) for text in ("3", "a3", "")]))
        finally:
            reward.pool.close()
        """,
    )
    assert said == ["0.5", "0.25", "0.0"]


@pytest.mark.slow
def test_the_loss_trains_and_is_found_by_its_name(run):
    said = run(
        """
        import jax, numpy as np
        from qarl_jax.loss import get_loss, normalized
        from qarl_jax.run import config
        from tests.reference.loss_batches import inputs, make_batch, value_and_grad

        cfg = config.load("configs/quickstart.yaml", ["loss={name: reinforce}"])
        assert cfg.loss.name == "reinforce"
        batch = make_batch()
        value, grad, mean, metrics = value_and_grad(get_loss("reinforce"), inputs(batch))
        counted = batch.mask & (batch.adv != 0)
        assert np.isfinite(grad).all() and (grad[~batch.mask] == 0).all() and (grad[counted] != 0).all()
        # The gradient of -mean(A logprob): -A over the number of tokens.
        np.testing.assert_allclose(grad[counted], -batch.adv[counted] / batch.mask.sum(), rtol=1e-5)
        print("ok")
        """,
    )
    assert said == ["ok"]


@pytest.mark.slow
def test_the_family_computes_what_transformers_computes_and_refuses_a_window(run, tmp_path):
    pytest.importorskip("transformers")
    said = run(
        f"""
        import json, pathlib, warnings
        import numpy as np, torch, transformers
        from qarl_jax import models
        from qarl_jax.types import UserError

        folder = pathlib.Path({str(tmp_path / "mistral")!r})
        shape = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=16, sliding_window=None, max_position_embeddings=64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            reference = transformers.MistralForCausalLM(transformers.MistralConfig(**shape)).eval()
            reference.save_pretrained(folder)
        model = models.load_hf(folder, dtype="float32")
        tokens = np.random.default_rng(0).integers(0, 97, (2, 11)).astype(np.int32)
        with torch.no_grad():
            want = reference(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
        got = np.asarray(model(tokens))
        assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
        values = json.loads((folder / "config.json").read_text()) | {{"sliding_window": 8}}
        try:
            models.read_config(values)
        except UserError as error:
            print("refused" if "sliding_window" in str(error) else error)
        """,
    )
    assert said[-1] == "refused"
