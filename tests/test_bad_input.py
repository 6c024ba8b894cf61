# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Every kind of bad input ends `python -m qarl_jax.train` with exit code 2 and one clear sentence, and no traceback.

Each row is a mistake that a user can make, what they would have typed, and what the sentence must contain: where the
mistake is and what would be right. All but a few run in this process, against a folder with a tiny random policy.
"""

import errno
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
import yaml
from qarl_bridge.client import sender
from qarl_bridge.protocol.messages import BridgeError
from safetensors.numpy import load_file, save_file

from qarl_jax import data, train
from qarl_jax.rollout.vllm import engine
from qarl_jax.run.checkpoint import Checkpoints

pytestmark = pytest.mark.usefixtures("shared_learners")

ALPHABET = "0123456789+-*= "
HIDDEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
LAYER = {
    "input_layernorm": (64,),
    "post_attention_layernorm": (64,),
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "self_attn.q_norm": (32,),
    "self_attn.k_norm": (32,),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A model folder with weights and tokenizer."""
    folder = tmp_path_factory.mktemp("policy")
    vocab = len(data.make_char_tokenizer(ALPHABET, folder))
    values = HIDDEN | {"vocab_size": vocab, "eos_token_id": 1, "bos_token_id": None}
    (folder / "config.json").write_text(json.dumps(values))
    shapes = {"model.embed_tokens.weight": (vocab, 64), "model.norm.weight": (64,)} | {
        f"model.layers.0.{name}.weight": shape for name, shape in LAYER.items()
    }
    rng = np.random.default_rng(0)
    save_file({name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}, folder / WEIGHTS)
    return folder


class World:
    """A good config and policy of one's own to break, and the command line."""

    def __init__(self, folder, policy):
        self.folder = folder
        self.model = folder / "model"
        shutil.copytree(policy, self.model)
        self.run_dir = folder / "run"
        self.tree = {
            "run_dir": str(self.run_dir),
            "model": {"path": str(self.model), "dtype": "float32"},
            "quant": {"forward": "w4a16:g32", "engine": "plain"},
            "data": {
                "source": {"name": "reasoning_gym", "dataset": "chain_sum", "size": 64, "config": {"max_terms": 2}},
                "template": "{{ meta.expression }}=",
                "max_prompt_len": 16,
                "holdout": 0.2,
            },
            "rollout": {"max_response_len": 8, "num_samples_per_prompt": 2},
            "train": {"steps": 1, "prompts_per_step": 2, "micro_batch_rows": 4},
            "eval": {"num_prompts": 2, "at_start": False, "at_end": False},
            "log": {"view": "off", "trackers": []},
        }

    def write(self, name, text):
        path = self.folder / name
        path.write_text(text)
        return path

    def command(self, *overrides):
        path = self.write("run.yaml", yaml.safe_dump(self.tree))
        return ["--config", str(path), *overrides]


@pytest.fixture
def world(tmp_path, policy):
    return World(tmp_path, policy)


@pytest.fixture
def refused(world, capsys):
    """Runs the command; asserts the exit code and that one sentence was said; returns it."""

    def run(*overrides, command=None):
        code = train.main(command or world.command(*overrides))
        said = capsys.readouterr().err
        assert code == 2, said
        assert said.startswith("error: ")
        assert said.count("error: ") == 1
        assert "Traceback" not in said
        return said.removeprefix("error: ").strip()

    return run


# ---- what the config file or the command line says -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.stps=3"], ["override 'train.stps=3'", "unknown key", "Did you mean train.steps?"]),
        (["clip_high=0.3"], ["unknown key", "Did you mean loss.clip_high?"]),
        (["lr=1e-3"], ["unknown key", "Did you mean optimizer.lr?"]),
        (["reward.name=math"], ["unknown name 'math'", "Did you mean math_verify?"]),
        (["train.steps=many"], ["train.steps", "expected an integer", "'many'"]),
        (["optimizer.lr=fast"], ["optimizer.lr", "expected a number", "'fast'"]),
        (["model.dtype=float16"], ["model.dtype", "bfloat16, float32", "'float16'"]),
        (["train.steps"], ["override 'train.steps'", "expected key=value"]),
        (["train..steps=3"], ["not a dotted key"]),
        (["loss.name=tbop"], ["loss.name", "'tbop'", "Did you mean tbpo?", "grpo"]),
        (["loss.name=grpo", "loss.neg_clip_low=1e-3"], ["loss.neg_clip_low", "loss.name=tbpo", "loss.name is grpo"]),
        (["optimizer.name=adam"], ["optimizer.name", "Did you mean adamw?"]),
        (["rollout.engine.name=sglang"], ["rollout.engine.name", "jax, vllm"]),
        (["train.steps=-3"], ["train", "steps must be at least 1, got -3"]),
        (["train.prompts_per_update=3"], ["prompts_per_update=3", "prompts_per_step=2"]),
        (["train.row_len=10"], ["train.row_len=10", "24", "never split"]),
        (["rollout.num_samples_per_prompt=1"], ["num_samples_per_prompt=1", "Use at least 2"]),
        (["quant.forward=w5a16"], ["quant", "'w5a16'", "w4a16"]),
        (["quant.forward=W8A8:g32"], ["'W8A8:g32'", "Did you mean w8a8?"]),
        (["quant.group_size=0"], ["group_size must be at least 1"]),
        (["optimizer.lr=inf"], ["optimizer.lr", "expected a finite number"]),
        (["quant.rules=[{match: '[', scheme: bf16}]"], ["quant", "regular expression"]),
        (
            ["quant.rules=[{match: self_atn, scheme: bf16}]"],
            ["quant.rules[0]", "'self_atn'", "layers.0.self_attn.q_proj"],
        ),
        (["reward.name=python", "reward.path=nowhere"], ["reward", "package.module:function", "'nowhere'"]),
        (["rollout.stages=[{until: 3, max_response_len: 9}]"], ["stages.0", "9", "rollout.max_response_len=8"]),
        (["rollout.partial.over_provision=3"], ["rollout.partial", "[1, 2]", "max_lag"]),
        (["rollout.partial={over_provision: 2, chunk: 8}"], ["partial.chunk=8", "max_response_len=8", "Lower it"]),
        (["rollout.router_replay=true"], ["router_replay=true", "rollout.engine.name=vllm"]),
        (["rollout.norm_noise={end: 0}"], ["rollout.norm_noise", "end must be positive", "norm_noise=null"]),
        (["rollout.norm_noise={start: 100}"], ["start=100.0 is larger than the norm gains", "0.01"]),
        (["rollout.norm_noise={start: 1e-4, end: 1e-2}"], ["start=0.0001 is below end=0.01", "exchange the two"]),
        (["rollout.norm_noise={stages: 2}"], ["rollout.norm_noise", "stages must be at least 3, got 2"]),
        (["rollout.norm_noise={}", "loss.name=grpo"], ["rollout.norm_noise", "set loss.mismatch=tis"]),
        (["rollout.norm_noise={}", "loss.mismatch=none"], ["loss.name=tbpo does not correct", "with its weight"]),
        (
            ["rollout.engine.name=vllm", "rollout.router_replay=true", "rollout.partial.over_provision=2"],
            ["router_replay=true", "partial rollouts"],
        ),
        (["rollout.engine.name=vllm", "rollout.router_replay=true"], ["router_replay=true", "no MoE model"]),
        (["mesh.fsdp=3"], ["train.micro_batch_rows=4", "3"]),
        (["loss.name=ppo"], ["loss.name=ppo", "set advantage.name=gae and `critic: {}`"]),
        (
            [
                "loss.name=ppo",
                "seed=1",
                "train.steps=1",
                *(f"eval.{o}=2" for o in ("num_prompts", "temperature", "every", "max_response_len")),
            ],
            ["override 'loss.name=ppo': loss.name=ppo"],
        ),
        (["loss.name=ppo", "advantage.name=gae", "critic.path=nowhere"], ["nowhere", "no such folder"]),
    ],
)
def test_a_wrong_setting_is_told_with_place_and_remedy(refused, overrides, expected):
    said = refused(*overrides)
    for part in expected:
        assert part in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["run.yaml", "empty"]),
        ("model: [\n", ["run.yaml:2", "not valid YAML"]),
        ("seed: 0\nseed: 1\n", ["run.yaml:2", "'seed' is given twice"]),
        ("seed: 0\n", ["model is required"]),
        ("base: missing.yaml\n", ["missing.yaml", "no such config file"]),
        (
            "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
            + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in itertools.pairwise("abcdefghij")),
            ["run.yaml", "more than 100,000 values", "alias"],
        ),
        ("a: " + "[" * 5000, ["run.yaml", "nested too deeply"]),
    ],
)
def test_a_broken_config_file_is_told_by_line(world, refused, text, expected):
    path = world.write("run.yaml", text)
    said = refused(command=["--config", str(path)])
    for part in expected:
        assert part in said


def test_a_missing_config_file_suggests_a_neighbour(world, refused):
    world.command()
    said = refused(command=["--config", str(world.folder / "rum.yaml")])
    assert "no such config file" in said
    assert "run.yaml" in said


def test_a_setting_written_as_an_option_is_told_how_it_is_written(world, capsys):
    with pytest.raises(SystemExit) as caught:
        train.main([*world.command(), "--train.steps", "3"])
    assert caught.value.code == 2
    assert "train.steps=10" in capsys.readouterr().err


def test_settings_may_stand_before_and_behind_options(world):
    assert train.main([*world.command("train.steps=2"), "--dry-run", "seed=3"]) == 0


def test_a_config_of_another_command_is_told_apart(refused):
    assert "a config of another command?" in refused(command=["--config", "assets/make/tiny_qwen3.yaml"])


def test_no_config_at_all_shows_the_usage(capsys):
    with pytest.raises(SystemExit) as caught:
        train.main([])
    assert caught.value.code == 2
    assert "--config" in capsys.readouterr().err


# ---- the model folder ----------------------------------------------------------------------------------------------


def edit_config(world, **changes):
    path = world.model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def truncate(path, share=0.5):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def remove(world, *names):
    for name in names:
        (world.model / name).unlink()


def drop_tensor(world):
    path = world.model / WEIGHTS
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path)


def change_tensor(world, name, value):
    path = world.model / WEIGHTS
    tensors = load_file(path)
    tensors[name][3, 5] = value
    save_file(tensors, path)


MODEL_CASES = {
    "no folder": (lambda w: shutil.rmtree(w.model), ["model", "no such folder"]),
    "no tokenizer": (lambda w: remove(w, "tokenizer.json"), ["no tokenizer here", "tokenizer.json"]),
    "broken tokenizer": (lambda w: truncate(w.model / "tokenizer.json"), ["cannot read the tokenizer"]),
    "no config.json": (lambda w: remove(w, "config.json"), ["no config.json"]),
    "broken config.json": (lambda w: truncate(w.model / "config.json"), ["config.json", "JSON"]),
    "foreign architecture": (
        lambda w: edit_config(w, architectures=["GPT2LMHeadModel"]),
        ["GPT2LMHeadModel", "Qwen3ForCausalLM"],
    ),
    "no architecture": (lambda w: edit_config(w, architectures=None), ["'architectures' is None", "Qwen3ForCausalLM"]),
    "architecture as text": (lambda w: edit_config(w, architectures="Qwen3ForCausalLM"), ["expected a list"]),
    "broken end token": (
        lambda w: (w.model / "generation_config.json").write_text('{"eos_token_id": "x"}'),
        ["generation_config.json", "eos_token_id is 'x'", "number"],
    ),
    "other activation": (lambda w: edit_config(w, hidden_act="gelu"), ["hidden_act", "'gelu'", "silu"]),
    "key missing": (lambda w: edit_config(w, hidden_size=None), ["hidden_size"]),
    "no weights": (lambda w: remove(w, WEIGHTS), ["no weights", WEIGHTS]),
    "truncated weights": (lambda w: truncate(w.model / WEIGHTS), [WEIGHTS]),
    "not safetensors": (lambda w: (w.model / WEIGHTS).write_text("x"), [WEIGHTS]),
    "config disagrees with weights": (lambda w: edit_config(w, intermediate_size=128), ["shape", "config.json"]),
    "layer missing": (lambda w: edit_config(w, num_hidden_layers=2), ["missing", "layers.1"]),
    "weights that are not finite": (
        lambda w: change_tensor(w, "model.layers.0.mlp.up_proj.weight", np.nan),
        ["model.layers.0.mlp.up_proj.weight", "not all finite"],
    ),
    "tensor missing": (drop_tensor, ["missing", "model.norm.weight"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MODEL_CASES)
def test_a_broken_model_folder_is_told_by_file(world, refused, case):
    spoil, expected = MODEL_CASES[case]
    spoil(world)
    said = refused()
    assert str(world.model) in said
    for part in expected:
        assert part in said


def test_a_name_of_the_hub_says_how_to_fetch_it(refused):
    assert "hf download Qwen/Qwen3-0.6B --local-dir DIR" in refused("model.path=Qwen/Qwen3-0.6B")
    assert "hf download ORG/NAME --local-dir models/nowhere" in refused("model.path=models/nowhere")


def test_a_file_instead_of_a_model_folder_is_told(world, refused):
    assert "a file, but a Hugging Face model folder is needed" in refused(f"model.path={world.model}/config.json")


def test_a_home_folder_is_found_after_the_equals_sign_too(world, refused, monkeypatch):
    monkeypatch.setenv("HOME", str(world.folder))
    assert f"{world.folder}/nothing" in refused("model.path=~/nothing")


def test_a_group_size_that_does_not_divide_names_the_weight(refused):
    said = refused("quant.forward=w4a16:g48")
    assert "48" in said
    assert "attn.k" in said


# ---- the data ------------------------------------------------------------------------------------------------------

FILE = ["data.source.name=jsonl", "data.template=raw"]


@pytest.mark.parametrize(
    ("content", "overrides", "expected"),
    [
        (None, [], ["set.jsonl", "no such file"]),
        ("", [], ["set.jsonl", "empty"]),
        ('{"q": "1", "a": "2"}\n', [], ["set.jsonl:1", "q, a", "prompt_key"]),
        (
            '{"q": "1", "a": "2"}\n',
            ["data.source.prompt_key=q", "data.source.answer_key=gold"],
            ["set.jsonl:1", "column 'gold' is missing", "q, a"],
        ),
        ('{"prompt": "1", "answer": "2"}\n{"prompt": \n', [], ["set.jsonl:2", "not a JSON object"]),
        ('{"prompt": "1", "answer": ' + "7" * 5000 + "}\n", [], ["set.jsonl:1", "not a JSON object", "digits"]),
        ('{"prompt": "1", "answer": NaN}\n', [], ["set.jsonl:1", "column 'answer'", "nan is no answer", "finite"]),
        ('{"prompt": "1", "answer": 1e999}\n', [], ["set.jsonl:1", "column 'answer'", "inf is no answer"]),
        ('{"prompt": "1", "answer": "2"}\n', ["data.template={{ 1/0 }}"], ["{{ 1/0 }}", "ZeroDivisionError"]),
        (
            '{"prompt": "1", "answer": "2"}\n',
            ["data.template={{ range(99999999) }}"],
            ["data.template", "OverflowError", "Range too big"],
        ),
        ('{"prompt": "1", "answer": "2"}\n', [], ["train.prompts_per_step=2", "1 prompts"]),
        ('{"prompt": "' + "1" * 99 + '", "answer": "2"}\n', [], ["none of its 1 rows is usable", "max_prompt_len"]),
    ],
)
def test_a_broken_data_file_is_told_by_line(world, refused, content, overrides, expected):
    path = world.folder / "set.jsonl"
    if content is not None:
        path.write_text(content)
    said = refused(*FILE, f"data.source.path={path}", "data.holdout=0", *overrides)
    for part in expected:
        assert part in said


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.source.dataset=chain_sums"], ["'chain_sums'", "Did you mean chain_sum"]),
        (["data.source.config.max_term=3"], ["chain_sum has no parameter 'max_term'", "Did you mean max_terms?"]),
        (["data.source.config.min_terms=9"], ["chain_sum refuses", "max_terms"]),
        (["data.template=chat"], ["no chat template", "data.template=raw"]),
        (["data.template={{ question"], ["data.template", "not a valid Jinja template"]),
        (["data.template={{ meta.expresion }}"], ["data.template", "expresion"]),
        (["eval.at_start=true", "data.holdout=0"], ["data.holdout=0.0", "held-out"]),
        pytest.param(
            ["reward.name=python", "reward.path=no_such_module:f"], ["no_such_module"], marks=pytest.mark.slow
        ),
    ],
)
def test_a_task_that_cannot_be_is_refused(refused, overrides, expected):
    said = refused(*overrides)
    for part in expected:
        assert part in said


# ---- disks, devices, processes -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_folder_that_is_a_file_is_refused(world, refused):
    world.run_dir.write_text("")
    assert str(world.run_dir) in refused()


@pytest.mark.slow
def test_a_run_folder_without_permission_is_refused(refused):
    # Nobody, root included, may create a folder in /sys.
    said = refused("run_dir=/sys/qarl_jax_run")
    assert "/sys/qarl_jax_run" in said
    assert "ermi" in said  # "Permission denied" or "Operation not permitted"
    assert "Set run_dir to a folder" in said


@pytest.mark.slow
def test_a_full_disk_is_told_with_the_file(world, refused, monkeypatch):
    def full(source, target, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    said = refused()
    assert "No space left on device" in said
    assert str(world.run_dir) in said


@pytest.mark.slow
def test_a_run_folder_in_use_is_refused(world, refused):
    world.run_dir.mkdir()
    holder = (
        "import fcntl, sys; f = open(sys.argv[1], 'a+'); fcntl.lockf(f, fcntl.LOCK_EX); f.write('1'); f.flush();"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holder, str(world.run_dir / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        said = refused()
    assert "in use" in said
    assert str(world.run_dir) in said


@pytest.mark.slow
def test_a_damaged_checkpoint_is_told_rather_than_skipped_into_a_new_run(world, capsys):
    step = world.run_dir / "checkpoints" / "step_00000001"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{")
    assert train.main(world.command()) == 2
    warning, error = capsys.readouterr().err.strip().splitlines()
    assert warning.startswith("warning: ")
    assert "damaged" in warning
    assert error.startswith("error: ")
    assert str(world.run_dir) in error


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(world, refused):
    checkpoints = Checkpoints(world.run_dir / "checkpoints")
    checkpoints.save(1, {"state": {"params": np.zeros((3,), np.float32)}}, {"data": {}})
    checkpoints.wait()
    assert str(world.run_dir) in refused()


def test_more_devices_than_there_are_is_refused(refused):
    count = len(jax.devices()) * 2
    said = refused(f"mesh.fsdp={count}", f"train.micro_batch_rows={count}")
    assert str(count) in said
    assert "device" in said


def test_a_bridge_by_hand_without_its_key_is_refused(refused):
    said = refused("rollout.engine.name=vllm", "rollout.engine.endpoints=[tcp://127.0.0.1:9]")
    assert "key_file" in said


@pytest.mark.slow
def test_a_bridge_interpreter_that_is_not_there_is_refused(refused):
    said = refused("rollout.engine.name=vllm", "rollout.engine.python=/nowhere/python")
    assert "/nowhere/python" in said


def test_a_taken_port_is_told_by_the_bridge(world, tmp_path):
    key = tmp_path / "key"
    key.write_text("11" * 32)
    key.chmod(0o600)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        command = [sys.executable, "-m", "qarl_bridge", "--socket", address, "--model", str(world.model)]
        done = subprocess.run(
            [*command, "--key-file", str(key), "--options", '{"engine": "fake"}'],
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert address.removeprefix("tcp://") in done.stderr


# ---- the real command ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_itself_exits_with_2_and_prints_one_line(world):
    command = [sys.executable, "-m", "qarl_jax.train", *world.command("train.stps=3")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")


@pytest.mark.slow
def test_the_untouched_world_runs(world):
    # Otherwise the tests above could pass for a reason of their own.
    assert train.main(world.command()) == 0
    assert (world.run_dir / "metrics.jsonl").read_text().count("\n") == 1


# ---- promises ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "found", "expected"),
    [
        (
            "read_back",
            "read-back: model.layers.0.self_attn.qkv_proj holds 0.2392578125 at [0, 0], published was 0.240234375",
            ["the very weights that were published", "another policy", "scheme w4a16:g32", "rollout.engine.name=jax"],
        ),
        ("tensor", "tensor lm_head.weight holds NaN or infinite values", ["finite", "Lower optimizer.lr"]),
    ],
)
def test_a_promise_that_breaks_at_a_publish_is_told_with_layer_meaning_and_remedy(
    world, refused, monkeypatch, code, found, expected
):
    def publish(self, *args, **options):
        raise BridgeError(found, code)

    raised = []
    construct = engine.BrokenPromiseError.__init__

    def construct_and_keep(self, *args):
        raised.append(self)
        construct(self, *args)

    monkeypatch.setattr(sender.Client, "publish", publish)
    monkeypatch.setattr(engine.BrokenPromiseError, "__init__", construct_and_keep)
    world.tree["rollout"]["engine"] = {"name": "vllm", "engine": "fake", "start_timeout_s": 120}
    said = refused()
    for part in [found, *expected]:
        assert part in said
    assert "fenced" not in said
    (error,) = raised  # a notebook shows what an error came from: nothing that is beside the point
    assert error.__suppress_context__
    assert "not on a GPU" not in str(error.__context__.__context__)
