# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters on a frozen base: one arithmetic, one copy of the base, and a run that goes on from them alone."""

import dataclasses
import functools
import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from qarl_jax import models, train
from qarl_jax.learning import pieces, trainable
from qarl_jax.learning.lora import Config as LoraConfig
from qarl_jax.loop import step_metrics
from qarl_jax.loop.publisher import Publisher
from qarl_jax.memory import learner as plan
from qarl_jax.models.layers import Linear
from qarl_jax.models.params import part_of
from qarl_jax.numerics.engine import CPU
from qarl_jax.quant import QTensor
from qarl_jax.rollout.embedded.decode_form import compute_form
from qarl_jax.rollout.embedded.engine import Config, JaxSampler
from qarl_jax.run import build, export
from qarl_jax.run.checkpoint import Checkpoints
from qarl_jax.runtime.mesh import make_mesh
from qarl_jax.types import UserError
from tests.reference import tiny
from tests.reference.optimizing import has_same_bits

nightly = functools.partial(pytest.param, marks=pytest.mark.nightly)
LORA = {"rank": 8, "alpha": 12}
BF16 = ml_dtypes.bfloat16


def world(folder, **sections):
    """A run of adapters on a w4a16 base, in the arithmetic of vLLM's CPU build."""
    own = {"lora": LORA, "quant": {"engine": "cpu"}, "optimizer": {"name": "adamw", "lr": 0.01}}
    return tiny.World(folder).changed(**own | sections)


def drawn(state, seed=0):
    """A params State with other numbers in all adapters."""
    rng = np.random.default_rng(seed)

    def of(path, x):
        return jnp.asarray(rng.standard_normal(x.shape) * 0.1, x.dtype) if ".lora_" in path else x

    flat = [
        (keys, leaf.replace(of(".".join(map(str, keys)), leaf.get_value()))) for keys, leaf in nnx.to_flat_state(state)
    ]
    return nnx.from_flat_state(flat)


@functools.cache
def made(folder):
    cfg = world(folder).config
    learner = build.make_learner(cfg, build.policy_graphdef(cfg), build.make_mesh(cfg))
    return cfg, learner, build.load_policy(cfg, learner)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """(config, learner, (masters, frozen)) of a run of adapters."""
    return made(tmp_path_factory.mktemp("policy"))


def test_a_layer_rounds_where_vllm_rounds():
    scale, rng = 12 / 8, np.random.default_rng(0)
    config = tiny.model_config(compute_dtype="bfloat16", param_dtype="float32", numerics=CPU)
    linear = Linear(24, 40, axis="mlp", config=config, rngs=nnx.Rngs(0), stack={}, use_bias=True)
    linear.attach_adapter(models.Lora(rank=8, scale=scale), nnx.Rngs(1))
    weight, bias, a, b, x = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((24, 40), (24,), (8, 40), (24, 8), (16, 40))
    )
    for leaf, value in ((linear.kernel, weight), (linear.bias, bias), (linear.lora_a, a), (linear.lora_b, b)):
        leaf.set_value(jnp.asarray(value))

    def product(x, w):
        return np.float32(x.astype(np.float64) @ w.astype(np.float64).T)

    weight, bias, a, b, x = (value.astype(BF16) for value in (weight, bias, a, b, x))
    base = (product(x, weight) + bias.astype(np.float32)).astype(BF16)
    h = product(x, a).astype(BF16)
    d = product(h, (b.astype(np.float32) * np.float32(scale)).astype(BF16)).astype(BF16)
    wanted = (base.astype(np.float32) + d.astype(np.float32)).astype(BF16)
    assert np.asarray(linear(jnp.asarray(x))).tobytes() == wanted.tobytes()


def test_the_base_is_the_base_with_and_without_adapters_whatever_learns(policy):
    cfg, learner, (masters, frozen) = policy
    learned, held = models.by_path(masters), models.by_path(frozen)
    assert all(re.search(r"\.lora_[ab]$", path) for path in learned)
    assert len(learned) == 14  # seven linear maps
    assert sum(isinstance(x, QTensor) for x in held.values()) == 7
    whole = dataclasses.replace(cfg, lora=None)
    graphdef, params = tiny.load_model(whole, learner.mesh)
    qtensors = models.by_path(models.quantize_params(graphdef, params))
    for path, x in held.items():
        wanted = qtensors.get(path, models.by_path(params)[path])
        assert jax.tree.all(jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), x, wanted))


def test_one_master_of_the_base_is_held_at_a_time(policy):
    cfg, learner, (_, frozen) = policy
    alive = []

    def leaves(config, **options):
        for keys, variable in models.read_masters(cfg.model.path, config, **options):
            assert all(x.is_deleted() for x in alive)
            alive.append(variable.get_value())
            yield keys, variable

    assert has_same_bits(learner.read(leaves)[1], frozen)
    assert len(alive) == len(models.by_path(frozen))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [nightly("w4a16:g32"), "nvfp4"])
def test_a_base_made_some_layers_at_a_time_is_the_one_made_whole(scheme, tmp_path, monkeypatch):
    cfg = world(tmp_path, quant={"forward": scheme, "engine": "cpu"}).config
    mesh = build.make_mesh(cfg)
    learner = build.make_learner(cfg, build.policy_graphdef(cfg), mesh)
    whole = learner.read(models.read_masters, cfg.model.path)
    monkeypatch.setattr(pieces, "BYTES", 1)
    assert [stack.length for stack in pieces.cut(learner.config).stacks] == [1, 1]
    in_pieces = learner.read(models.read_masters, cfg.model.path)
    assert models.by_path(in_pieces[1]).keys() == models.by_path(whole[1]).keys()
    assert has_same_bits(in_pieces, whole)


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["w4a16:g32", "nvfp4"])
def test_a_base_is_read_within_what_the_plan_counts(scheme, monkeypatch):
    """24 pieces: a stack beside its pieces, or two pieces in flight and their stacks, would be more."""
    config = tiny.model_config(num_layers=24, compute_dtype="bfloat16", quant=models.parse_rules(scheme), vocab_size=8)
    config = dataclasses.replace(config, lora=models.Lora(rank=8, scale=1.0))
    monkeypatch.setattr(pieces, "BYTES", 1)
    before = jax.live_arrays()  # held, so that none of them goes meanwhile
    other, seen, write = sum(x.nbytes for x in before), [], pieces._write

    def watched(*given):
        seen.append(_live_bytes())
        write(*given)
        seen.append(_live_bytes())

    monkeypatch.setattr(pieces, "_write", watched)
    leaves = functools.partial(models.random_leaves, seed=0)
    _, frozen = pieces.read(LoraConfig().trainable, config, make_mesh(), leaves)
    base = sum(x.nbytes for x in jax.tree.leaves(frozen))
    assert base == _live_bytes() - other
    most = plan.reading(config, LoraConfig().trainable, None)
    assert most == 3 * 2 * (128 * 64 if scheme == "w4a16:g32" else 2 * 128 * 64)  # of a layer: down, or gate and up
    assert base < max(seen) - other <= base + most


def _live_bytes():
    return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())


def test_what_is_compiled_ahead_of_reading_is_what_reading_calls(policy, monkeypatch):
    cfg, learner, (_, frozen) = policy
    called = []

    def holder(*given):
        hold = trainable.holder(*given)
        return lambda state: called.append(_described(state)) or hold(state)

    monkeypatch.setattr(pieces, "holder", holder)
    monkeypatch.setattr(pieces, "BYTES", 1)
    assert has_same_bits(learner.read(models.read_masters, cfg.model.path)[1], frozen)
    masters = learner.trainable.frozen(learner.abstract_params)
    wanted = [_described(piece) for piece, _ in pieces.groups(learner.config, masters)]
    found = {str(one) for one in called}
    assert found == {str(one) for one in wanted}
    assert len(called) > len(found) == len(wanted)  # one program for all pieces of a stack


def _described(state):
    return {path: (x.shape, str(x.dtype)) for path, x in models.by_path(state).items()}


@pytest.mark.slow
def test_frozen_masters_wait_for_those_that_nvfp4_has_one_number_of(tmp_path):
    cfg = world(tmp_path, quant={"forward": "nvfp4", "engine": "cpu"}).config
    learner = build.make_learner(cfg, build.policy_graphdef(cfg), build.make_mesh(cfg))
    held = models.by_path(build.load_policy(cfg, learner)[1])
    graphdef, params = tiny.load_model(dataclasses.replace(cfg, lora=None), learner.mesh)
    for _, group in pieces.groups(learner.config, params):  # as their programs are compiled ahead
        jax.eval_shape(functools.partial(models.quantize_params, graphdef), group)
    wanted = models.by_path(models.quantize_params(graphdef, params))
    assert len(wanted) == 7
    assert has_same_bits({path: held[path] for path in wanted}, wanted)


def test_the_reference_policy_shares_the_base(policy):
    _, learner, start = policy
    masters, qweights = learner.reference(learner.init(*start).params)
    assert not jax.tree.leaves(masters)
    held, base = models.by_path(qweights), models.by_path(learner.frozen)
    pairs = zip(*(jax.tree.leaves([x[path] for path in base]) for x in (held, base)), strict=True)
    assert all(a is b for a, b in pairs)
    assert all(".lora_" in path for path in set(held) - set(base))


def test_norm_gains_learn_where_they_shall():
    paths = models.by_path(models.split(tiny.random_model())[1])
    trainable = LoraConfig(train_norms=True).trainable
    assert {path for path in paths if trainable.learns(path)} == {f"stacks.0.{x}_norm.weight" for x in ("attn", "mlp")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ("w4a16:g32", "bfloat16"),
        ("w8a8", "bfloat16"),
        *(nightly(scheme, "bfloat16") for scheme in ("bf16", "fp8", "w4a8:g32", "w3a16:g32", "w2a16:g32", "nvfp4")),
        nightly("w4a16:g32", "float32"),
    ],
)
def test_the_samplers_form_computes_the_learners_bits(scheme, dtype):
    config = tiny.model_config(compute_dtype=dtype, numerics=CPU, lora=models.Lora(rank=8, scale=1.5))
    graphdef, params, _ = models.split(models.random_model(config))
    graphdef, params = models.with_scheme(graphdef, scheme), drawn(params)
    qweights = models.quantize_params(graphdef, params)
    tokens = jnp.asarray(np.random.default_rng(1).integers(3, 30, (2, 16)), jnp.int32)

    def hidden(model):
        return np.asarray(model.hidden_states(tokens))

    ours = hidden(models.merge(graphdef, params, qweights))
    bare = models.split(models.abstract_model(config.base))[0]
    own = part_of(params, lambda path: ".lora_" not in path)
    assert (hidden(models.merge(models.with_scheme(bare, scheme), own, qweights)) != ours).any()
    form, weights = compute_form(graphdef, params, qweights)
    assert hidden(form.model(weights)).tobytes() == ours.tobytes()


def test_the_wire_has_folded_adapters_behind_the_base():
    config = tiny.model_config(compute_dtype="bfloat16", lora=models.Lora(rank=8, scale=1.5))
    graphdef, params, qweights = models.split(models.random_model(config))
    params = drawn(params)
    sent = dict(models.export_tensors(models.fold_adapters(graphdef, params), qweights, config))
    base = [name for name, _ in models.export_tensors(params, qweights, config.base)]
    assert list(sent)[: len(base)] == base
    assert len(sent) == len(base) + 2 * 7 * 2
    own = models.by_path(params)
    name = "model.layers.1.self_attn.q_proj.lora_"
    b = np.asarray(own["stacks.0.attn.q.lora_b"][1]).astype(BF16)
    assert sent[f"{name}A.weight"].tobytes() == np.asarray(own["stacks.0.attn.q.lora_a"][1]).astype(BF16).tobytes()
    assert sent[f"{name}B.weight"].tobytes() == (b.astype(np.float32) * np.float32(1.5)).astype(BF16).tobytes()


@pytest.mark.slow
def test_a_publish_moves_adapters_alone(policy):
    cfg, learner, start = policy
    state = learner.init(*start)
    engine = JaxSampler(Config(batch_size=8))
    publisher = Publisher(cfg, learner, engine)
    publisher.publish(state, 0)
    held = [models.by_path(part) for part in engine._weights]
    state = dataclasses.replace(state, params=drawn(state.params))
    publisher.updated()
    publisher.publish(state, 1)
    now = [models.by_path(part) for part in engine._weights]
    for before, after in zip(held, now, strict=True):
        moved = {path for path, x in after.items() if x is not before[path]}
        assert moved == {path for path in after if ".lora_" in path}
    engine.close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of six steps, in the world of `made`; its fresh adapters come from a folder."""
    folder = tmp_path_factory.mktemp("run")
    _, learner, (adapters, _) = made(folder)
    (folder / "begun").mkdir()
    models.write_peft(folder / "begun", learner.config, adapters, alpha=LORA["alpha"], rslora=False, base="")
    lora = LORA | {"init": str(folder / "begun")}
    run = world(folder, lora=lora, train={"steps": 6, "prompts_per_step": 8, "prompts_per_update": 8})
    assert train.main(run.command()) == 0
    return run


def restored(run):
    """(learner, the state it starts with, the saved state's entries)."""
    learner, start = made(run.folder)[1:]
    state = learner.init(*start)
    return learner, start, Checkpoints(run.run_dir / "checkpoints").restore(state.entries()).state


@pytest.mark.slow
def test_a_run_learns_and_goes_on_from_its_adapters(trained):
    lines = trained.records()
    assert lines[-1]["reward/mean"] > lines[0]["reward/mean"] + 0.05
    assert max(line["mismatch/max_abs"] for line in lines) < 2e-6  # of float32 log-probs: the bits before are equal
    last = trained.run_dir / "checkpoints" / "step_00000006"
    shutil.rmtree(last)
    assert train.main(trained.command()) == 0  # the last step again
    assert trained.records() == lines
    _, start, state = restored(trained)
    assert set(models.by_path(state["params"])) == set(models.by_path(start[0]))
    stored = sum(path.stat().st_size for path in last.rglob("*"))
    assert stored < 1.2 * sum(x.nbytes for x in jax.tree.leaves(state)) + 300_000


@pytest.mark.slow
def test_a_run_is_exported_as_adapters_merged_and_as_its_base(trained, tmp_path, capsys):
    out = {kind: tmp_path / kind for kind in export.FORMATS}
    begun = (trained.folder / "begun").rename(tmp_path / "begun")  # the checkpoint has what it became
    for kind, folder in out.items():
        export.export(trained.run_dir, folder, kind)
    begun.rename(trained.folder / "begun")
    said = capsys.readouterr().out
    assert "merged into what the base's codes stand for" in said
    assert "This folder is the base without the run's adapters" in said
    assert "These adapters belong to the base in w4a16" in said
    learner, _, state = restored(trained)
    init = trained.changed(lora={"init": str(out["peft"])}).config
    assert has_same_bits(build.load_policy(init, learner)[0], state["params"])
    masters = models.by_path(models.split(models.load_hf(out["hf"]))[1])
    model = models.merge_adapters(learner.model(state["params"]))
    wanted = np.asarray(models.by_path(models.split(model)[1])["stacks.0.mlp.up.kernel"])
    assert np.array_equal(masters["stacks.0.mlp.up.kernel"], wanted.astype(BF16).astype(np.float32))
    assert not any("lora" in name for name in load_file(out["compressed-tensors"] / "model.safetensors"))


@pytest.mark.slow
def test_a_run_does_not_go_on_with_other_adapters(trained, capsys):
    for other in ({"rank": 16}, {"targets": ["q_proj"]}, {"alpha": 16}):
        assert train.main(trained.changed(lora=other).command("train.steps=8")) == 2
        assert "would make another policy" in capsys.readouterr().err


def test_a_plan_has_no_masters_gradients_or_moments_of_the_base(policy):
    cfg, learner, start = policy
    parts = plan.parts(cfg)
    state = learner.init(*start)
    assert parts["masters"] == sum(x.nbytes for x in jax.tree.leaves(state.params))
    assert parts["optimizer"] == sum(x.nbytes for x in jax.tree.leaves(state.opt_state))
    qtensors = sum(
        x.nbytes for q in models.by_path(learner.frozen).values() if isinstance(q, QTensor) for x in jax.tree.leaves(q)
    )
    assert parts["QTensors"] == qtensors


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"lora": {"rank": 12}}, "rank=12 is none that vLLM serves; take one of 1, 8, 16, 32"),
        ({"lora": {"alpha": 0}}, "alpha must be positive"),
        ({"quant": {"uaq_scale": 1.5}}, "quant.uaq_scale=1.5 is for weights that learn"),
        ({"rollout": {"engine": {"name": "vllm", "arithmetic": "vllm"}}}, "arithmetic=vllm serves no adapters"),
        ({"quant": {"rollout": "bf16"}}, "of a base under quant.forward=w4a16:g32 nothing is kept"),
        ({"critic": {}, "advantage": {"name": "gae"}, "loss": {"name": "ppo"}}, "name a model's folder in critic.path"),
    ],
)
def test_what_cannot_be_is_refused_with_the_config(tmp_path, sections, said):
    with pytest.raises(UserError, match=re.escape(said)):
        world(tmp_path).changed(**sections).config  # noqa: B018


@pytest.mark.parametrize("lora", [{"targets": ["q"]}, {"init": "assets"}])
def test_adapters_that_are_not_the_models_are_refused_before_anything_starts(tmp_path, lora, capsys):
    run = world(tmp_path, lora=LORA | lora)
    assert train.main(run.command()) == 2
    assert re.search(r"adapters: .*(no linear map 'q'|no adapter_config\.json there)", capsys.readouterr().err)
    assert not run.run_dir.exists()


def test_one_scheme_in_two_spellings_is_one(tmp_path):
    quant = world(tmp_path, quant={"forward": "w4a16", "group_size": 32, "rollout": "w4a16:g32"}).config.quant
    assert quant.rollout_scheme == quant.forward


def test_a_dry_run_checks_adapters_that_are_here_and_the_scheme_of_a_released_base(tmp_path, capsys):
    run = world(tmp_path)
    assert train.main(run.changed(lora=LORA | {"init": "assets"}).command("--dry-run")) == 2
    assert "no adapter_config.json there" in capsys.readouterr().err
    assert train.main(run.changed(lora=LORA | {"init": str(tmp_path / "elsewhere")}).command("--dry-run")) == 0
    assert f"not checked: {tmp_path / 'elsewhere'} is not on this machine" in capsys.readouterr().out
    critic = {"critic": {"lora": {"init": "assets"}}, "advantage": {"name": "gae"}, "loss": {"name": "ppo"}}
    assert train.main(run.changed(**critic).command("--dry-run")) == 2
    assert "no adapter_config.json there" in capsys.readouterr().err
    low = tmp_path / "low"
    export.export_model(run.config.model.path, "w8a8", low)
    assert train.main(run.changed(model={"path": str(low)}).command("--dry-run")) == 2
    assert "set quant.forward=w8a8" in capsys.readouterr().err


def test_the_end_of_a_run_of_adapters_names_the_export_that_is_its_policy(tmp_path):
    assert "--format peft" in step_metrics.next_steps(world(tmp_path).config)[-1]
    norms = world(tmp_path, lora=LORA | {"train_norms": True}).config
    assert "--format hf" in step_metrics.next_steps(norms)[-1]


def test_targets_are_linear_maps_of_the_model_and_no_experts():
    with pytest.raises(UserError, match="no linear map 'q'; take some of q_proj, k_proj"):
        tiny.model_config(lora=models.Lora(rank=8, scale=1, targets=("q",)))
    moe = models.MoEConfig(num_experts=4, num_experts_per_tok=2, intermediate_size=32, norm_topk_prob=True)
    of = functools.partial(tiny.model_config, architecture="Qwen3MoeForCausalLM", moe=moe, moe_layers=(0, 1))
    with pytest.raises(UserError, match="gate_proj belongs to the experts of a MoE model, which have no adapters"):
        of(lora=models.Lora(rank=8, scale=1, targets=("gate_proj",)))
    paths = models.by_path(models.split(models.abstract_model(of(lora=models.Lora(rank=8, scale=1))))[1])
    assert sum(path.endswith(".lora_a") for path in paths) == 4
