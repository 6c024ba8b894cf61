# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A frozen leaf has no master, gradient or moment, is published once, and computes what it computed as a master."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qarl_jax import models
from qarl_jax.learning.learner import Learner, Options
from qarl_jax.learning.state import TrainState
from qarl_jax.learning.trainable import ALL, NOTHING, Trainable, joined
from qarl_jax.loop.publisher import Publisher
from qarl_jax.loss import get_loss
from qarl_jax.memory import learner as plan
from qarl_jax.models.params import part_of
from qarl_jax.optim import build, leafwise
from qarl_jax.quant import QTensor
from qarl_jax.rollout import PolicyWeights, SamplingConfig
from qarl_jax.rollout.embedded.engine import Config, JaxSampler
from qarl_jax.run.checkpoint import Checkpoints
from qarl_jax.runtime.mesh import make_mesh
from qarl_jax.types import Prompt, TrainBatch, UserError
from tests.reference import tiny
from tests.reference.optimizing import has_same_bits

ATTENTION = Trainable(freeze=(r"\.mlp\.", "norm", "^embed", "^head"))  # the attention's matrices learn
ROWS, SEQ = 4, 24
nightly = functools.partial(pytest.param, marks=pytest.mark.nightly)


@functools.cache
def policy(scheme="w8a8"):
    """(graph definition, masters on the host) of a tiny model."""
    graphdef, params, _ = models.split(tiny.random_model())
    return models.with_scheme(graphdef, scheme), jax.device_get(params)


@functools.cache
def learner(trainable, scheme, one_program):
    return Learner(
        policy(scheme)[0],
        loss_fn=get_loss("grpo"),
        optimizer=leafwise.Optimizer(build.Muon(lr=0.02)),
        mesh=make_mesh(),
        options=Options(logprob_chunk=32, one_program=one_program),
        trainable=trainable,
    )


def make(trainable, scheme="w8a8", one_program=True):
    """(learner, its first state)."""
    made = learner(trainable, scheme, one_program)
    return made, made.init(jax.tree.map(lambda x: jnp.array(x, copy=True), policy()[1]))


def batch(made):
    rng = np.random.default_rng(0)
    shape = (ROWS, SEQ)
    return made.put(
        TrainBatch(
            tokens=rng.integers(3, 30, shape).astype(np.int32),
            positions=np.broadcast_to(np.arange(SEQ, dtype=np.int32), shape),
            segment_ids=np.ones(shape, np.int32),
            loss_mask=np.broadcast_to(np.arange(SEQ) > 5, shape),
            rollout_logprobs=np.full(shape, -3.4, np.float32),
            advantages=rng.standard_normal((ROWS, 1)).astype(np.float32) * np.ones(shape, np.float32),
        )
    )


def updated(made, state, updates=1):
    for _ in range(updates):
        qweights = made.quantize(state.params)
        state, _ = made.update(state, qweights, [batch(made)], [None], 72.0, 4.0)
    return state


def gradient(made, state):
    return made.accumulate_grads(
        made.zero_grads(state), state.params, made.quantize(state.params), batch(made), None, 72.0, 4.0
    )[0]


def is_same(x, y):
    """Whether two trees hold the very same arrays."""
    return all(a is b for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True))


def held(sampler):
    """{path: array or QTensor} of what an embedded sampler decodes with."""
    return {path: x for part in sampler._weights for path, x in models.by_path(part).items()}


def test_paths_tell_what_learns():
    _, params = policy()
    learned, frozen = (set(models.by_path(f(params))) for f in (ATTENTION.learned, ATTENTION.frozen))
    assert learned | frozen == set(models.by_path(params))
    assert not learned & frozen
    assert len(learned) == 4
    assert all(".attn." in path and path.endswith(".kernel") for path in learned)
    assert ALL.learned(params) is params
    assert not nnx.to_flat_state(NOTHING.learned(params))


def test_exceptions_learn_among_what_is_frozen():
    adapters = Trainable(freeze=("",), train=(r"\.lora_", "norm"))
    assert adapters.learns("stacks.0.attn.q.lora_a")
    assert adapters.learns("norm.weight")
    assert not adapters.learns("stacks.0.attn.q.kernel")


@pytest.mark.parametrize(
    ("trainable", "said"),
    [
        (Trainable(freeze=("embedd",)), "'embedd' is found in no weight's path; take one of embed.kernel, "),
        (Trainable(freeze=("",), train=("lora_",)), "'lora_' is found in no weight's path"),
        (NOTHING, "nothing learns where '' is frozen"),
    ],
)
def test_patterns_that_say_nothing_of_a_policy_are_refused(trainable, said):
    with pytest.raises(UserError, match=re.escape(said)):
        learner.__wrapped__(trainable, "w8a8", True)


def test_a_pattern_that_is_no_regular_expression_is_refused():
    with pytest.raises(UserError, match=r"'\(mlp' is no regular expression"):
        Trainable(freeze=("(mlp",))


@pytest.mark.slow
@pytest.mark.parametrize("one_program", [True, False])
def test_a_frozen_leaf_has_no_master_gradient_or_moment_and_stays(one_program):
    made, state = make(ATTENTION, one_program=one_program)
    learned = set(models.by_path(state.params))
    assert set(models.by_path(gradient(made, state))) == learned
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert sum(x.size for x in moments) == sum(x.size for x in jax.tree.leaves(state.params))  # Muon's one a master
    before = made.quantize(state.params)
    state = updated(made, state, 2)
    assert set(models.by_path(state.params)) == learned
    old, new = (models.by_path(qweights) for qweights in (before, made.quantize(state.params)))
    same = {path for path, x in new.items() if is_same(x, old[path])}
    assert same == set(models.by_path(made.frozen))  # QTensors, and values that no scheme covers
    assert not same & learned


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w8a8", nightly("bf16")])
def test_what_learns_gets_the_gradient_it_had_beside_masters(scheme):
    (frozen, state), (whole, other) = make(ATTENTION, scheme), make(ALL, scheme)
    scores = [m.score(s.params, m.quantize(s.params), batch(m))[0] for m, s in ((frozen, state), (whole, other))]
    np.testing.assert_allclose(*scores, rtol=1e-6, atol=1e-6)
    found, wanted = (models.by_path(gradient(m, s)) for m, s in ((frozen, state), (whole, other)))
    for path, x in found.items():
        np.testing.assert_allclose(x, wanted[path], rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_a_base_that_exists_only_as_qtensors_needs_no_masters():
    made, state = make(ATTENTION)
    wanted = updated(made, state)
    base = made.frozen
    assert any(isinstance(x, QTensor) for x in models.by_path(base).values())
    masters = jax.tree.map(lambda x: jnp.array(x, copy=True), ATTENTION.learned(policy()[1]))
    found = updated(made, made.init(masters, base))
    assert made.frozen is base
    assert has_same_bits(found, wanted)
    lacking = part_of(base, lambda path: not path.endswith("up.kernel"))
    with pytest.raises(UserError, match=r"there is no value of stacks\.0\.mlp\.up\.kernel; give it"):
        made.init(ATTENTION.learned(policy()[1]), lacking)


def test_a_sampler_of_another_scheme_gets_the_tensors_of_masters():
    (frozen, state), (whole, other) = make(ATTENTION, "bf16"), make(ALL, "bf16")
    graphdef, _ = policy("w8a8")
    made = frozen.quantizer(graphdef)
    first, found = (models.by_path(made(state.params)) for _ in range(2))
    wanted = models.by_path(whole.quantizer(graphdef)(other.params))
    assert all(is_same(found[path], first[path]) for path in wanted if ".mlp." in path)  # made once
    assert all(has_same_bits(found[path], x) for path, x in wanted.items())


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w8a8", nightly("bf16")])
def test_a_policy_of_which_nothing_learns_has_no_masters_and_scores_the_same(scheme):
    made, state = make(ALL, scheme)
    masters, qweights = made.reference(policy()[1])
    assert not jax.tree.leaves(masters)
    assert set(models.by_path(qweights)) == set(models.by_path(state.params))
    found, wanted = (
        made.score(*each, batch(made))[0] for each in ((masters, qweights), (state.params, made.quantize(state.params)))
    )
    assert has_same_bits(found, wanted)


@pytest.mark.slow
def test_no_gradient_of_a_frozen_leaf_is_computed():
    def program(trainable):
        made, state = make(trainable)
        rest = made.quantize(state.params), batch(made), None, jnp.float32(72), jnp.float32(4)
        return made._grads.lower(state.params, *rest).compile()

    costs = [program(trainable).cost_analysis()["flops"] for trainable in (ATTENTION, ALL)]
    kernels = {path: x for path, x in models.by_path(policy()[1]).items() if path.endswith("kernel")}
    # A product of tokens and outputs for each matrix; the compiler counts a loop's body once.
    spared = sum(2 * ROWS * SEQ * x[0].size for path, x in kernels.items() if ".mlp." in path)
    assert costs[1] - costs[0] > 0.9 * spared > 0.1 * costs[1]


@pytest.mark.slow
def test_a_checkpoint_holds_what_learns_and_a_run_goes_on_from_it_with_the_frozen_leaves_of_the_model(tmp_path):
    made, state = make(ATTENTION)
    state = updated(made, state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state.entries())
        _, again = make(ATTENTION)
        back = TrainState(**checkpoints.restore(again.entries()).state)
        with pytest.raises(UserError):
            checkpoints.restore(make(ALL)[1].entries())
    assert set(models.by_path(back.params)) == set(models.by_path(ATTENTION.learned(policy()[1])))
    assert has_same_bits(updated(made, back), updated(made, state))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a16:g32", nightly("w8a8")])
def test_frozen_leaves_are_published_once(tmp_path, scheme):
    cfg = tiny.World(tmp_path).changed(quant={"forward": scheme}).config
    made, state = make(ATTENTION, scheme)
    engine, other = JaxSampler(Config(batch_size=8)), JaxSampler(Config(batch_size=8))
    publisher = Publisher(cfg, made, engine)
    publisher.publish(state, 0)
    before = held(engine)
    state = updated(made, state)
    publisher.updated()
    report = publisher.publish(state, 1)
    assert 0 < report["quant/code_flips"] <= 1  # of what learns alone
    after = held(engine)
    assert {path for path, x in after.items() if is_same(x, before[path])} == set(models.by_path(made.frozen))
    # And it samples what an engine samples that was given masters of all leaves.
    graphdef, params, qweights = models.split(made.model(state.params))
    other.publish(PolicyWeights(graphdef=graphdef, params=params, qweights=qweights), 1)
    prompts = [Prompt(uid=str(i), tokens=(3, 4 + i), text="", answer="") for i in range(4)]
    found, wanted = (
        e.generate(prompts, num_samples=2, sampling=SamplingConfig(max_response_len=6), key=5) for e in (engine, other)
    )
    for a, b in zip(found, wanted, strict=True):
        assert [(c.tokens, c.logprobs.tobytes()) for c in a] == [(c.tokens, c.logprobs.tobytes()) for c in b]


@pytest.mark.slow
def test_what_is_compiled_ahead_is_what_a_step_calls():
    made, state = make(ATTENTION)
    made.compile_ahead(ROWS, SEQ, scored=False)
    made.quantize(state.params)
    updated(made, state)
    assert made._update._cache_size() == 1


def test_the_plan_falls_by_what_a_frozen_leaf_lacks(tmp_path):
    cfg = tiny.World(tmp_path).changed(quant={"forward": "w8a8"}).config
    params = plan.shapes(cfg).params
    whole, part = (plan.parts(cfg, trainable=trainable) for trainable in (ALL, ATTENTION))
    made, state = make(ATTENTION)
    assert part["masters"] == sum(x.nbytes for x in jax.tree.leaves(state.params))
    assert part["optimizer"] == sum(x.nbytes for x in jax.tree.leaves(state.opt_state))
    plain, qtensors = joined(nnx.State({}), made.quantize(state.params))
    assert part["frozen weights"] == sum(x.nbytes for x in jax.tree.leaves(ATTENTION.frozen(plain)))
    assert part["QTensors"] == whole["QTensors"] == sum(x.nbytes for x in jax.tree.leaves(qtensors))
    lacks = sum(4 * x.size for x in models.by_path(ATTENTION.frozen(params)).values())
    assert whole["masters"] - part["masters"] == lacks
    assert lacks < whole["gradients"] - part["gradients"] <= 2 * lacks  # an accumulator's, and a layer's beside it
