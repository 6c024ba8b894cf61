# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The critic: values of the state before each token, GAE that knows its segments, a regression that learns, resume.

Critics of one kind share their compiled programs through a folder, because most of the time is XLA's.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qarl_jax import models, train
from qarl_jax.data import packing
from qarl_jax.learning import critic as critics
from qarl_jax.learning.trainable import ALL
from qarl_jax.loss import get_term
from qarl_jax.loss.advantages import Gae
from qarl_jax.loss.value import explained_variance
from qarl_jax.metrics import values as reduced
from qarl_jax.models import sums
from qarl_jax.observe import recorder
from qarl_jax.optim import by_stack, leafwise
from qarl_jax.optim.build import AdamW, labels
from qarl_jax.run import build
from qarl_jax.run.checkpoint import Checkpoints
from qarl_jax.runtime.mesh import batch_sharding, make_mesh
from qarl_jax.types import UserError
from tests.reference import loss_reference as reference
from tests.reference import tiny
from tests.reference.learners import assert_same_bits
from tests.reference.rollouts import completion, group_of

ROWS = 8
MESHES = {"": {}, "mesh": {"fsdp": 2, "tensor": 4}}


@functools.cache
def groups(count=6, samples=2):
    """Random responses of 2 to 12 tokens to prompts of 2 to 8; one is empty, one a single token."""
    rng = np.random.default_rng(0)
    out = []
    for number in range(count):
        prompt = tuple(int(token) for token in rng.integers(3, 30, rng.integers(2, 9)))
        lengths = [int(n) for n in rng.integers(2, 13, samples)]
        lengths[0] = {0: 0, 1: 1}.get(number, lengths[0])
        completions = tuple(completion(rng.integers(0, 30, n), np.full(n, -3), prompt=prompt) for n in lengths)
        # Something to be learned: responses to prompts of an odd length are worth more.
        rewards = np.float32(len(prompt) % 2) + rng.normal(0, 0.1, samples).astype(np.float32)
        out.append(group_of(completions, rewards, uid=str(number)))
    return out


def packed(**options):
    """The responses of `groups` in rows, their rewards in place of advantages."""
    return packing.pack(
        groups(),
        np.stack([group.rewards for group in groups()]),
        row_len=tiny.ROW_LEN,
        rows_multiple=ROWS,
        **{"max_segments": 6} | options,
    )


@functools.cache
def initial(scheme="w4a16:g32"):
    """(config of a body, params on the host) of a critic made from a quantized policy."""
    graphdef = models.with_scheme(models.split(tiny.random_model())[0], scheme)
    config = critics.body_config(models.config_of(graphdef))
    masters, _ = critics.of_policy(ALL, config, models.split(tiny.random_model())[1], None, make_mesh())
    params = critics.init_params(masters, config.hidden_size)
    return config, jax.device_get(params)


def with_head(params, seed=0):
    """The same body behind a head that says something."""
    weight = np.random.default_rng(seed).normal(0, 0.1, params["head"]["weight"].shape).astype(np.float32)
    return params | {"head": {"weight": weight, "bias": np.float32(0.3)}}


@functools.cache
def compiled(mesh="", gamma=0.9, whiten=True, offload=False):
    """A critic whose state does not matter."""
    config, params = initial()
    return critics.Critic(
        config,
        jax.tree.map(jnp.asarray, params),
        term=get_term("value", clip=0.5),
        advantage=Gae(gamma=gamma, lam=0.8 if whiten else 1.0, whiten=whiten),
        optimizer=leafwise.Optimizer(AdamW(lr=3e-3)),
        mesh=make_mesh(**MESHES[mesh]),
        max_segments=6,
        offload=offload,
    )


def make(head=False, **kind):
    """That critic at its start; `head`: behind a head that says something."""
    critic, params = compiled(**kind), initial()[1]
    critic.state = critic.init(jax.tree.map(lambda x: jnp.array(x, copy=True), with_head(params) if head else params))
    return critic


def put(critic, rows, size=ROWS):
    """Micro-batches of `size` rows on the critic's devices."""
    place = batch_sharding(critic.mesh)
    return [jax.tree.map(lambda x: jax.device_put(x, place), micro) for micro in rows.micro_batches(size)]


def per_response(rows, micros, field):
    """The entries of every response, by (group, sample)."""
    whole = np.concatenate([np.asarray(field(micro)) for micro in micros])
    return {(s.group, s.sample): x for s, x in zip(rows.segments, rows.responses(whole), strict=True)}


@functools.cache
def judged():
    """(rows, judgement) of all responses in packed rows, in one micro-batch, by a critic whose head says something."""
    rows, critic = packed(), make(head=True)
    return rows, critic.judge([put(critic, rows)], per_pass=1)


def assert_same(found, wanted, tol=2e-5):
    assert found.keys() == wanted.keys()
    for key in wanted:
        np.testing.assert_allclose(found[key], wanted[key], rtol=tol, atol=tol, err_msg=str(key))


# ---- values ----------------------------------------------------------------------------------------------------------


def test_a_body_has_the_policys_layers_at_full_precision_and_no_head():
    config, params = initial()
    model = models.with_scheme(models.split(tiny.random_model())[0], "w4a16:g32")
    assert models.config_of(model).quant.rules
    assert not config.quant.rules
    assert config.numerics.profile == "plain"
    policy = models.by_path(models.split(tiny.random_model())[1])
    own = models.by_path(params["body"])
    assert set(policy) - set(own) == {"head.kernel"}
    for path, leaf in own.items():
        np.testing.assert_array_equal(leaf, policy[path])
        assert leaf.dtype == np.float32


def test_a_value_is_that_of_everything_before_its_token():
    """By running the model itself on each response's tokens up to, and without, the one that is valued."""
    rows, verdict = judged()
    params = with_head(initial()[1])
    model = models.merge(models.split(models.abstract_model(initial()[0]))[0], params["body"], nnx.State({}))
    found = per_response(rows, verdict.targets[0], lambda t: t.values)
    hidden_states = jax.jit(model.hidden_states)
    for (g, j), values in list(found.items())[:4]:
        completion = groups()[g].completions[j]
        known = [*completion.prompt_tokens, *completion.tokens]
        first = len(completion.prompt_tokens)
        for t in (0, len(values) - 1):
            before = np.zeros((1, tiny.ROW_LEN), np.int32)  # what follows must not matter
            before[0, : first + t] = known[: first + t]
            hidden = np.asarray(hidden_states(jnp.asarray(before)), np.float64)[0, first + t - 1]
            assert values[t] == pytest.approx(hidden @ params["head"]["weight"] + 0.3, abs=2e-5)


@pytest.mark.slow
def test_a_fresh_critic_values_everything_at_zero_and_first_moves_its_head():
    critic, rows = make(), packed()
    micros = put(critic, rows)
    verdict = critic.judge([micros], per_pass=1)
    assert (np.asarray(verdict.targets[0][0].values) == 0).all()
    before = jax.device_get(critic.state.params)
    applied = critic.update(micros, verdict.targets[0], rows.num_tokens, rows.num_sequences)
    after = jax.device_get(critic.state.params)
    assert float(applied["critic/grad_norm"].value) > 0
    assert np.abs(after["head"]["weight"]).min() > 0
    assert after["head"]["bias"] != 0
    # No gradient reaches the body yet; what moves it is the decay of its weights, 1 % of lr.
    for a, b in zip(jax.tree.leaves(before["body"]), jax.tree.leaves(after["body"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)


# ---- advantages ------------------------------------------------------------------------------------------------------


def test_advantages_and_returns_agree_with_a_loop_over_each_response():
    rows, verdict = judged()
    batch = rows.batch
    (targets,), (micro,) = verdict.targets[0], verdict.updates[0]
    scores = np.zeros(batch.tokens.shape)
    for segment in rows.segments:
        scores[segment.row, segment.response.stop - 1] = groups()[segment.group].rewards[segment.sample]
    values = np.asarray(targets.values, np.float64)
    advantages, returns = reference.gae(scores, values, batch.loss_mask, batch.segment_ids, 0.9, 0.8)
    np.testing.assert_allclose(targets.returns, returns, rtol=1e-5, atol=1e-5)
    flat = advantages[batch.loss_mask]
    whitened = np.where(batch.loss_mask, (advantages - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8), 0)
    np.testing.assert_allclose(micro.advantages, whitened, rtol=1e-4, atol=1e-5)
    wanted = {
        "advantage/mean": flat.mean(),
        "advantage/std": flat.std(),
        "return/mean": returns[batch.loss_mask].mean(),
        "return/std": returns[batch.loss_mask].std(),
        "critic/explained_variance": explained_variance(values[batch.loss_mask], returns[batch.loss_mask]),
    }
    assert verdict.metrics == pytest.approx(wanted, rel=1e-5)
    assert np.abs(values[batch.loss_mask]).min() > 0
    lengths = {len(group.completions[j].tokens) for group in groups() for j in range(2)}
    assert {0, 1} < lengths  # empty and one-token responses are among them


def test_unwhitened_advantages_are_those_of_gae():
    rows, critic = packed(), make(gamma=1.0, whiten=False)  # gamma = lam = 1 and V = 0: the reward itself
    verdict = critic.judge([put(critic, rows)], per_pass=1)
    np.testing.assert_array_equal(verdict.updates[0][0].advantages, rows.batch.advantages)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["micro-batches", "a row each", pytest.param("mesh", marks=pytest.mark.nightly)])
def test_rows_micro_batches_and_devices_change_no_judgement_and_no_update(how):
    rows, verdict = judged()
    fields = {"advantages": lambda m: m.advantages}, {"values": lambda t: t.values, "returns": lambda t: t.returns}
    critic = make(head=True)
    critic.update(put(critic, rows), verdict.targets[0], rows.num_tokens, rows.num_sequences)
    other_rows = packed(max_segments=1) if how == "a row each" else rows
    other = make(head=True, mesh="mesh" if how == "mesh" else "")
    size = 2 if how == "micro-batches" else ROWS
    micros = put(other, other_rows, size)
    found = other.judge([micros], per_pass=1)
    for field in fields[0].values():
        assert_same(per_response(other_rows, found.updates[0], field), per_response(rows, verdict.updates[0], field))
    for field in fields[1].values():
        assert_same(per_response(other_rows, found.targets[0], field), per_response(rows, verdict.targets[0], field))
    assert found.metrics == pytest.approx(verdict.metrics, rel=1e-4, abs=1e-5)
    measured = other.update(micros, found.targets[0], other_rows.num_tokens, other_rows.num_sequences)
    assert len(measured) == 5
    # AdamW's first step is lr g / |g|: its moment is the gradient, up to a factor, and says more than the parameters.
    pairs = zip(jax.tree.leaves(other.state.opt_state), jax.tree.leaves(critic.state.opt_state), strict=True)
    compared = 0
    for a, b in pairs:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= 1e-4 * np.abs(b).max() + 1e-12
        compared += b.size
    assert compared > 2 * sum(leaf.size for leaf in jax.tree.leaves(initial()[1]))
    if how == "mesh":
        kernel = models.by_path(other.state.params["body"])["stacks.0.mlp.up.kernel"]
        assert not kernel.sharding.is_fully_replicated


def test_later_passes_are_whitened_as_the_first():
    rows, critic = packed(), make(head=True)
    micros = put(critic, rows)
    once, twice = critic.judge([micros], per_pass=1), critic.judge([micros, micros], per_pass=1)
    assert once.metrics == twice.metrics
    for update in twice.updates:
        np.testing.assert_array_equal(update[0].advantages, once.updates[0][0].advantages)


# ---- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.nightly  # as of a policy, in test_learner.py
def test_a_state_on_the_host_changes_no_update(monkeypatch):
    rows, verdict = judged()
    states = []
    monkeypatch.setattr(by_stack, "GROUP_BYTES", 2**14)
    for offload, kind in ((False, "device"), (True, "pinned_host")):
        critic = make(head=True, offload=offload)
        for _ in range(2):
            critic.update(put(critic, rows), verdict.targets[0], rows.num_tokens, rows.num_sequences)
            assert {x.sharding.memory_kind for x in jax.tree.leaves(critic.state.opt_state)} == {kind}
        states.append(jax.device_get(critic.state))
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.slow
def test_a_critic_learns_a_fixed_batch_within_a_few_updates():
    rows, critic = packed(), make()
    micros, explained, losses = put(critic, rows), [], []
    for _ in range(12):
        verdict = critic.judge([micros], per_pass=1)
        explained.append(verdict.metrics["critic/explained_variance"])
        fitted = critic.update(micros, verdict.targets[0], rows.num_tokens, rows.num_sequences)
        losses.append(float(fitted["critic/loss"].value))
    assert explained[0] == 0
    assert explained[-1] > 0.8
    assert losses[-1] < 0.1 * losses[0]
    assert int(critic.state.updates) == 12


@pytest.mark.nightly  # of a policy, in tests/models/test_sums.py
@pytest.mark.usefixtures("compiled_as_a_run")  # bits hang on the compiler
def test_gradients_are_added_in_the_backward_to_the_bits_of_those_added_afterwards(monkeypatch):
    """The gradient of several micro-batches; and the second copy of it is gone from the program's memory."""
    rows, critic = packed(), make(head=True)
    micros = put(critic, rows, ROWS // 4)
    (targets,) = critic.judge([micros], per_pass=1).targets
    counts = jnp.float32(rows.num_tokens), jnp.float32(rows.num_sequences)

    def accumulated():
        """(gradient, bytes that the program needs beside its arguments and results)."""
        program = jax.jit(lambda *args: critic._accumulate_fn(*args), donate_argnums=(0,))
        with jax.set_mesh(critic.mesh):
            grads = jax.tree.map(jnp.zeros_like, critic.state.params)
            rest = critic.state.params, critic.frozen
            used = program.lower(grads, *rest, micros[0], targets[0], *counts).compile().memory_analysis()
            for micro, target in zip(micros, targets, strict=True):
                grads, _ = program(grads, *rest, micro, target, *counts)
        return jax.device_get(grads), used.temp_size_in_bytes

    found, less = accumulated()
    monkeypatch.setattr(sums, "in_place", lambda dtype: False)
    wanted, more = accumulated()
    assert len(micros) > 1
    assert_same_bits(found, wanted)
    assert less < more


@pytest.mark.slow
def test_the_gradient_is_that_of_the_plain_loss_of_each_response():
    """Body and head, against autodiff of 0.5 (V - ret)^2 over a padded row per response, by other code."""
    rows, critic = packed(), make(head=True)
    (micro,) = put(critic, rows)
    (target,) = critic.judge([[micro]], per_pass=1).targets[0]
    params = jax.tree.map(lambda x: jnp.array(x, copy=True), critic.state.params)
    with jax.set_mesh(critic.mesh):
        zeros = jax.tree.map(jnp.zeros_like, params)
        counts = jnp.float32(rows.num_tokens), jnp.float32(rows.num_sequences)
        found, _ = critic._accumulate(zeros, params, critic.frozen, micro, target, *counts)

    responses = [(groups()[s.group].completions[s.sample], s) for s in rows.segments]
    returns = np.asarray(target.returns)
    tokens, wanted = np.zeros((2, len(responses), tiny.ROW_LEN))
    decided = np.zeros(tokens.shape, bool)  # where a response token is drawn from
    for row, (response, s) in enumerate(responses):
        known = [*response.prompt_tokens, *response.tokens]
        tokens[row, : len(known)] = known
        here = slice(s.prompt_len - 1, s.prompt_len + s.response_len - 1)
        decided[row, here], wanted[row, here] = True, returns[s.row, s.response]

    def plain(params):
        model = models.merge(critic.graphdef, params["body"], nnx.State({}))
        values = model.hidden_states(jnp.asarray(tokens, jnp.int32)) @ params["head"]["weight"] + params["head"]["bias"]
        return 0.5 * jnp.where(decided, jnp.square(values - wanted), 0).sum() / rows.num_tokens

    expected = jax.jit(jax.grad(plain))(params)
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (path, a), b in pairs:
        assert np.abs(b).max() > 0, path
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
def test_the_clip_holds_values_near_the_old_ones():
    """Values that have moved further than the clip from where the step began pull no more."""
    rows, critic = packed(), make(head=True)
    micros = put(critic, rows)
    (target,) = critic.judge([micros], per_pass=1).targets[0]
    mask = rows.batch.loss_mask
    old, returns = np.asarray(target.values), np.asarray(target.returns)
    # The step began further from the returns than the clip, and the values have come nearer since.
    began = jnp.where(mask, target.values - 0.6 * jnp.sign(target.returns - target.values), 0)
    measured = reduced(
        critic.update(micros, [dataclasses.replace(target, values=began)], rows.num_tokens, rows.num_sequences)
    )
    near = np.clip(old, np.asarray(began) - 0.5, np.asarray(began) + 0.5)
    clipped = ((near - returns) ** 2 > (old - returns) ** 2)[mask]
    assert clipped.all()
    assert measured["critic/clip_fraction"] == 1
    assert measured["critic/grad_norm"] == 0
    assert measured["critic/loss"] == pytest.approx(0.5 * ((near - returns) ** 2)[mask].mean(), rel=1e-4)


def test_an_update_without_a_token_moves_nothing_and_a_broken_one_is_told():
    rows, critic = packed(), make(head=True)
    (micro,) = put(critic, rows)
    (target,) = critic.judge([[micro]], per_pass=1).targets[0]
    before = jax.device_get(critic.state)
    empty = dataclasses.replace(micro, loss_mask=jnp.zeros_like(micro.loss_mask))
    critic.update([empty], [target], 0, 0)
    broken = critic.update([micro], [dataclasses.replace(target, returns=target.returns * jnp.nan)], 10, 2)
    assert float(broken["critic/nonfinite"].value) == 1
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(jax.device_get(critic.state)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_muon_updates_the_body_and_leaves_the_head_to_adamw():
    tree = labels(jax.tree.map(jnp.asarray, initial()[1]))
    assert tree["head"] == {"weight": "adamw", "bias": "adamw"}
    assert set(jax.tree.leaves(tree["body"])) == {"muon", "adamw"}


# ---- runs ------------------------------------------------------------------------------------------------------------

PPO = {
    "loss": {"name": "ppo", "mismatch": "tis"},
    "advantage": {"name": "gae", "lam": 0.95},
    "critic": {"optimizer": {"name": "adamw", "lr": 3e-3}},
    "rollout": {"num_samples_per_prompt": 1},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.World(tmp_path_factory.mktemp("world")).changed(
        **PPO,
        train={"steps": 3, "prompts_per_step": 16, "prompts_per_update": 8},
        eval={"at_start": False, "at_end": False},
    )


@pytest.fixture(scope="module")
def whole(world):
    """Three steps of two updates each, the policy waiting for the first: one response per prompt."""
    run = world.changed(run_dir=str(world.folder / "whole"), critic={"warmup_steps": 1})
    assert train.main(run.command()) == 0
    return run


def saved(run):
    """Bits of the newest checkpoint, the critic's among them."""
    cfg = run.config
    graphdef, params = tiny.load_model(cfg, build.make_mesh(cfg))
    critic = build.make_critic(cfg, graphdef, params, None, build.make_mesh(cfg))
    back = Checkpoints(run.run_dir / "checkpoints").restore({"params": params} | critic.entries())
    return back.step, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(back.state)], back.state["critic"]


@pytest.mark.slow
def test_a_run_with_a_critic_reports_it_and_the_policy_waits(whole):
    lines = recorder.read_lines(whole.run_dir / "metrics.jsonl")
    wanted = {f"critic/{name}" for name in ("loss", "explained_variance", "clip_fraction", "grad_norm", "lr")}
    wanted |= {"advantage/mean", "advantage/std", "return/mean", "return/std", "time/values_s", "time/critic_s"}
    for line in lines:
        assert wanted <= line.keys(), wanted - line.keys()
        assert all(np.isfinite(value) for value in line.values() if isinstance(value, float))
        assert line["critic/loss"] > 0
        assert "reward/zero_advantage_groups" not in line
    warm, *rest = lines
    assert (warm["train/updates"], warm["quant/code_flips"]) == (0, 0)
    assert "optim/grad_norm" not in warm
    assert warm["critic/explained_variance"] == 0  # it still says 0 everywhere
    for line in rest:
        assert line["train/updates"] == 2
        assert line["quant/code_flips"] > 0
        assert line["mismatch/max_abs"] < 1e-5
        assert "clip/frac" in line
        assert line["critic/explained_variance"] != 0
    assert int(saved(whole)[2].updates) == 6


@pytest.mark.nightly
def test_a_run_with_a_critic_resumes_bit_for_bit(world, whole):
    parts = world.changed(run_dir=str(world.folder / "parts"), critic={"warmup_steps": 1})
    assert train.main(parts.command("train.steps=2")) == 0
    assert train.main(parts.command()) == 0
    assert parts.records() == whole.records()
    found, wanted = saved(parts), saved(whole)
    assert found[0] == wanted[0] == 3
    assert found[1] == wanted[1]


@pytest.mark.slow
def test_without_a_critic_a_checkpoint_is_what_it_was(world, whole, capsys):
    plain = world.changed(
        run_dir=str(world.folder / "plain"),
        loss={"name": "grpo", "mismatch": "tis"},
        advantage={"name": "grpo"},
        rollout={"num_samples_per_prompt": 2},
        train={"steps": 1, "prompts_per_step": 8, "prompts_per_update": 4},
    )
    del plain.tree["critic"]
    assert train.main(plain.command()) == 0
    state = plain.run_dir / "checkpoints" / "step_00000001" / "state"
    assert sorted(path.name for path in state.iterdir() if path.is_dir()) == ["opt_state", "params", "updates"]
    with_one = whole.run_dir / "checkpoints" / "step_00000003" / "state"
    assert sorted(p.name for p in with_one.iterdir() if p.is_dir()) == ["critic", "opt_state", "params", "updates"]
    # A critic that the checkpoint does not have cannot be made up.
    capsys.readouterr()
    added = plain.changed(**PPO, train={"steps": 2})
    assert train.main(added.command()) == 2
    assert "step 1 saved no critic. Set critic=null" in capsys.readouterr().err


@pytest.mark.slow
def test_a_critic_that_diverges_stops_the_run_and_names_the_step(world, capsys):
    run = world.changed(run_dir=str(world.folder / "diverged"), critic={"optimizer": {"name": "adamw", "lr": 1e37}})
    assert train.main(run.command("train.steps=1")) == 1
    assert "step 0, update 2 of 2: the critic's gradient is not finite" in capsys.readouterr().err


@pytest.mark.slow
def test_a_critic_may_start_from_a_folder_of_its_own_but_not_of_another_vocabulary(world, tmp_path):
    other = tiny.model_folder(tmp_path / "other", hidden=32, seed=1)
    cfg = world.changed(critic={"path": str(other)}).config
    mesh = build.make_mesh(cfg)
    graphdef, params = tiny.load_model(cfg, mesh)
    made = build.make_critic(cfg, graphdef, params, None, mesh)
    assert made.state.params["head"]["weight"].shape == (32,)
    wanted = models.by_path(models.split(tiny.random_model(32, 1))[1])["embed.kernel"]
    found = models.by_path(made.state.params["body"])["embed.kernel"]
    np.testing.assert_array_equal(found, wanted.astype(jnp.bfloat16).astype(np.float32))  # as the folder holds it
    values = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(values | {"vocab_size": 20}))
    with pytest.raises(UserError, match=r"critic\.path=.*a vocabulary of 20 tokens, the policy one of 30"):
        build.make_critic(cfg, graphdef, params, None, mesh)
