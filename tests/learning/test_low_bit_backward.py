# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`quant.backward` in a learner: what is rounded, by which update's number, and what stays as it was."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import shapes
from qarl_jax import models, quant
from qarl_jax.learning.learner import Learner
from qarl_jax.memory import learner as on_learner
from qarl_jax.models.layers import Linear, LowBitBackward
from qarl_jax.models.transformer import quantizable
from qarl_jax.quant.backward import root_seed
from qarl_jax.run import build, config, description
from qarl_jax.runtime.mesh import make_mesh
from qarl_jax.types import UserError
from tests.reference import tiny
from tests.reference.learners import assert_same_bits, gradient, make, packed
from tests.reference.one_layer import on_hopper

HALF = 4  # of 8 rows
MAPS = tuple(f"{name}.kernel" for name in ("v", "o", "gate", "up", "down"))


@functools.cache
def learner(backward, remat="none"):
    """(learner under w8a8, masters on the host)."""
    made, params = make("w8a8")
    config = dataclasses.replace(made.config, remat=remat)
    graphdef = models.split(models.abstract_model(config))[0]
    options = dataclasses.replace(made.options, backward=backward)
    return Learner(graphdef, loss_fn=made.loss_fn, optimizer=made.optimizer, mesh=made.mesh, options=options), params


def fresh(made, params):
    return made.init(jax.tree.map(lambda x: jnp.array(x, copy=True), params))


@functools.cache
def gradient_of(backward, remat="none"):
    made, params = learner(backward, remat)
    # Without old log-probs, as all tests here: they share one program of each learner.
    return models.by_path(jax.device_get(gradient(made, fresh(made, params), packed(), HALF, scored=False)[0]))


def apart(a, b):
    """The norm of the difference of two gradients' leaf, by path, against the second's."""
    return {path: np.linalg.norm(a[path] - b[path]) / np.linalg.norm(b[path]) for path in b}


@pytest.mark.slow
def test_a_gradient_errs_by_its_rounding_and_that_of_the_head_not_at_all():
    errors = apart(gradient_of("int8"), gradient_of("bf16"))
    for path, error in errors.items():
        low, high = (0, 0) if path in ("head.kernel", "norm.weight") else (1e-3, 0.1)
        assert low <= error <= high, path


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", pytest.param("fp8", marks=pytest.mark.nightly)])
def test_the_mean_gradient_over_updates_is_the_unrounded_one(form):
    """Through all layers: the error of a mean of n falls as the root of n, and a bias would stay."""
    made, params = learner(form)
    state, rows, count = fresh(made, params), packed(), 32
    args = made.quantize(state.params), made.put(next(iter(rows.micro_batches(HALF)))), None
    counts = rows.num_tokens, rows.num_sequences

    def of(learner, updates):
        grads, _ = learner.accumulate_grads(learner.zero_grads(state), state.params, *args, *counts, updates=updates)
        of_layers = [leaf for path, leaf in models.by_path(jax.device_get(grads)).items() if path.endswith("kernel")]
        return np.concatenate([leaf.ravel() for leaf in of_layers]).astype(np.float64)

    want = of(learner("bf16")[0], 0)
    many = np.stack([of(made, updates) for updates in range(count)])
    one = np.sqrt(np.mean(np.sum((many - want) ** 2, axis=1)))
    assert one > 0.01 * np.linalg.norm(want)
    assert np.linalg.norm(many.mean(0) - want) <= 1.3 * one / count**0.5


@pytest.mark.nightly
def test_recomputed_layers_are_rounded_as_the_first_time():
    """Recomputation moves last bits of dY, and so a code here and there; another seed would move all codes."""
    moved, rounded = (
        apart(gradient_of("int8", "full"), gradient_of("int8")),
        apart(gradient_of("int8"), gradient_of("bf16")),
    )
    assert all(moved[path] <= 0.2 * rounded[path] for path in moved if path.startswith("stacks"))


def updated(made, state, rows=8):
    """(state after an update, its parameters on the host)."""
    packed_rows = packed()
    micros = [made.put(micro) for micro in packed_rows.micro_batches(rows)]
    counts = packed_rows.num_tokens, packed_rows.num_sequences
    state, _ = made.update(state, made.quantize(state.params), micros, [None] * len(micros), *counts)
    return state, jax.device_get(state.params)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [pytest.param(8, marks=pytest.mark.nightly), HALF])  # one program, or micro-batches
def test_an_update_is_rounded_by_its_number_so_that_a_resumed_run_rounds_alike(rows):
    made, params = learner("int8")
    state, _ = updated(made, fresh(made, params), rows)
    places = jax.tree.map(lambda x: x.sharding, state)
    saved = jax.tree.map(np.array, jax.device_get(state))
    _, went_on = updated(made, state, rows)
    back = lambda updates: jax.device_put(dataclasses.replace(saved, updates=updates), places)  # noqa: E731
    assert_same_bits(updated(made, back(saved.updates), rows)[1], went_on)
    other = models.by_path(updated(made, back(np.int32(7)), rows)[1])
    same = {path for path, leaf in models.by_path(went_on).items() if np.array_equal(leaf, other[path])}
    assert same <= {"head.kernel", "norm.weight"}


@pytest.mark.slow
def test_micro_batches_draw_bits_of_their_own():
    made, params = learner("int8")
    state, rows = fresh(made, params), packed()
    micro, counts = made.put(next(iter(rows.micro_batches(HALF)))), (rows.num_tokens, rows.num_sequences)
    qweights = made.quantize(state.params)
    first, again, second, later = (
        models.by_path(
            jax.device_get(
                made.accumulate_grads(
                    made.zero_grads(state), state.params, qweights, micro, None, *counts, updates=n, number=i
                )[0]
            )
        )
        for n, i in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert_same_bits(first, again)
    for other in (second, later):
        assert max(apart(other, first).values()) > 1e-3


@functools.cache
def of_random_weights(model, remat, backward, draws):
    """Gradients of MAPS by path, float64, of the first updates: a full row, three layers of these shapes under w8a8."""
    setting = shapes.Setting(
        model=model, layers=3, scheme="w8a8", rows=1, seq=512, segments=1, remat=remat, backward=backward
    )
    made, abstract, _ = shapes.make_learner(setting, make_mesh())
    state, micro = made.init(shapes.random_params(abstract, made.param_shardings)), made.put(shapes.batch(setting))
    args = state.params, made.quantize(state.params), micro, micro.rollout_logprobs, 512.0, 1.0
    gradients = [made.accumulate_grads(made.zero_grads(state), *args, updates=number)[0] for number in range(draws)]
    return [
        {path: np.asarray(leaf, np.float64) for path, leaf in models.by_path(grads).items() if path.endswith(MAPS)}
        for grads in gradients
    ]


def direction(model, remat, form, draws=4):
    """By linear map and layer: the smallest cosine of low-bit gradients to bf16's, and their mean share of it.

    The share is <a, b> / <b, b>, whose expectation is 1: rounding is unbiased. Queries and keys of a random model are
    left out: their gradients have a fortieth of the values' norm.
    """
    (plain,) = of_random_weights(model, remat, "bf16", 1)
    lows = of_random_weights(model, remat, form, draws)
    for path in plain:
        for layer, b in enumerate(plain[path]):
            along = np.array([np.vdot(low[path][layer], b) / np.vdot(b, b) for low in lows])
            norms = np.array([np.linalg.norm(low[path][layer]) for low in lows]) / np.linalg.norm(b)
            yield f"{path} of layer {layer}", np.min(along / norms), np.mean(along)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("remat", ["mixer", "dots", "full"])
@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("model", ["tiny", "0.6b"])  # ragged tiles, and whole ones
def test_on_a_gpu_a_models_gradient_has_bf16s_direction(model, form, remat):
    """Layers in a scan, as a run has them: each kernel alone was right when a policy did not learn."""
    for name, cosine, share in direction(model, remat, form):
        assert (cosine > 0.9, 0.9 < share < 1.1) == (True, True), (name, cosine, share)


@pytest.mark.nightly
def test_a_models_gradient_has_bf16s_direction():
    """The check of the GPU's test, where gradients are right."""
    assert all(cosine > 0.9 and 0.9 < share < 1.1 for _, cosine, share in direction("tiny", "mixer", "int8"))


def test_linear_maps_share_the_seed_of_their_inputs_within_a_layer_alone():
    """A rule that names a layer makes a stack of it, and stacks count their layers from zero."""
    rules = quant.Rules.parse([{"match": r"layers\.[12]\.", "scheme": "bf16"}, {"match": ".*", "scheme": "w8a8"}])
    model = models.abstract_model(tiny.model_config(num_layers=4, quant=rules))
    models.attach_backward(model, "int8", root_seed(1, 0))
    stacks = model.config.stacks
    assert [stack.length for stack in stacks] == [1, 2, 1]
    seeds, inputs = [], {}
    for path, linear in quantizable(model).items():
        low, start = linear.backward.get_value(), stacks[int(path.split(".")[1])].start
        seeds += low.seed.tolist()
        for layer, seed in enumerate(low.inputs.tolist(), start):
            inputs.setdefault(layer, set()).add(seed)
    assert [len(inputs[layer]) for layer in range(4)] == [1, 1, 1, 1]
    assert len(set(seeds).union(*inputs.values())) == 4 * 7 + 4, "no two are equal"


def test_adapters_get_the_gradient_they_had_for_the_same_dy():
    config = tiny.model_config()
    linear = Linear(32, 64, axis="mlp", config=config, rngs=nnx.Rngs(0), stack={})
    linear.attach_adapter(models.Lora(rank=4, scale=2.0), nnx.Rngs(1))
    linear.lora_b.set_value(jax.random.normal(jax.random.key(0), (32, 4)))
    linear.quantized = models.Quantized(quant.quantize(linear.kernel.get_value(), quant.parse_scheme("w8a8")))
    x, dy = (jax.random.normal(jax.random.key(n), (24, size)) for n, size in ((1, 64), (2, 32)))

    def gradients():
        structure, state, rest = nnx.split(linear, nnx.Param, ...)
        _, vjp = jax.vjp(lambda x, state: nnx.merge(structure, state, rest)(x), x, state)
        dx, grads = vjp(dy)
        return dx, {keys[-1]: leaf.get_value() for keys, leaf in nnx.to_flat_state(grads)}

    dx, plain = gradients()
    linear.backward = LowBitBackward(quant.Backward("int8", jnp.uint32(1), jnp.uint32(2)))
    low_dx, low = gradients()
    assert_same_bits([low["lora_a"], low["lora_b"]], [plain["lora_a"], plain["lora_b"]])
    for a, b in ((low_dx, dx), (low["kernel"], plain["kernel"])):
        assert 1e-3 < np.linalg.norm(a - b) / np.linalg.norm(b) < 0.1


def run_of(tmp_path, *words, **shape):
    """A run of a random model with this config.json."""
    values = shapes.model_config(shapes.Setting(model="tiny-moe" if shape else "tiny")).hf_config
    (tmp_path / "config.json").write_text(values)
    return config.load("configs/quickstart.yaml", [f"model.path={tmp_path}", "quant.forward=w8a8", *words])


def test_a_moe_model_is_refused(tmp_path):
    cfg = run_of(tmp_path, "quant.backward=int8", moe=True)
    with pytest.raises(UserError, match=r"quant\.backward=int8 .* is a MoE model: set quant\.backward=bf16"):
        build.policy_graphdef(cfg)


def test_a_dry_run_and_the_memory_plan_know_it(tmp_path):
    plain, low = run_of(tmp_path), run_of(tmp_path, "quant.backward=int8")
    assert "gradients of linear layers in int8 codes" in description.describe(low)
    assert "gradients" not in description.describe(plain).splitlines()[0]
    assert build.make_learner(low, build.policy_graphdef(low), build.make_mesh(low)).options.backward == "int8"
    of = lambda cfg: on_learner.parts(cfg)["activations (estimate)"]  # noqa: E731
    positions, widest = low.micro_batch_rows * low.row_len, 256  # the MLP's inner width
    assert of(low) - of(plain) == 2 * positions * widest
