# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Embedding and head in four bits: rules by name, the forward's values, the straight-through gradient, the sampler."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from qarl_jax import models, quant
from qarl_jax.memory import engine, learner, plan
from qarl_jax.models import hf, invariant_scaling
from qarl_jax.models.logprobs import token_logprobs
from qarl_jax.models.params import path_keys
from qarl_jax.quant.qtensor import moved_codes
from qarl_jax.rollout import PolicyWeights, SamplingConfig
from qarl_jax.rollout.embedded.engine import Config, JaxSampler
from qarl_jax.rollout.vllm import config as vllm
from qarl_jax.run import export
from qarl_jax.types import Prompt, UserError
from tests.reference import quant_reference, tiny

pytestmark = pytest.mark.usefixtures("compiled_programs")  # the nightly cases are compiled as a run
SCHEMES = ("w4a16:g32", "w4a16_asym:g32")
CASES = [
    (True, SCHEMES[0]),
    *(pytest.param(*c, marks=pytest.mark.nightly) for c in [(False, SCHEMES[0]), (True, SCHEMES[1])]),
]
TABLES = {"match": "embed|head", "scheme": SCHEMES[0]}
LAYERS = {"match": "", "scheme": "w4a16:g64"}
PATHS = {True: ["embed.kernel"], False: ["embed.kernel", "head.kernel"]}  # of a tied model, or not
TOKENS = np.random.default_rng(0).integers(0, 30, (2, 24)).astype(np.int32)
SEGMENTS = np.repeat([[1] * 20 + [2] * 4], 2, axis=0).astype(np.int32)


def config(tied, *rules, **fields):
    return tiny.model_config(tie_embeddings=tied, quant=models.parse_rules([*rules]), num_layers=1, **fields)


@functools.cache
def parts(tied, scheme=SCHEMES[0], *, numerics="plain", compute="float32", layers=True):
    """(graphdef, masters, QTensors) of a policy whose tables have codes."""
    rules = [TABLES | {"scheme": scheme}, *[LAYERS] * layers]
    made = config(tied, *rules, numerics=quant.resolve(numerics), compute_dtype=compute)
    return models.split(models.random_model(made, seed=1))


@functools.partial(jax.jit, static_argnames=("graphdef", "chunk"))
def scores(graphdef, params, qweights, tokens, segments, *, chunk=1024):
    model = models.merge(graphdef, params, qweights)
    hidden = model.hidden_states(tokens, None, segments)
    numerics = model.config.numerics
    return token_logprobs(hidden, model.head_weight(), tokens, segments, chunk=chunk, numerics=numerics)


def decoded(params, tied, scheme):
    """Masters whose tables are the values of the codes, made by numpy."""
    grid, held = quant_reference.grid(scheme.partition(":")[0]), dict(nnx.to_flat_state(params))
    for keys in map(path_keys, PATHS[tied]):
        arrays = grid.arrays(np.asarray(held[keys].get_value()), quant.parse_scheme(scheme))
        held[keys] = held[keys].replace(jnp.asarray(grid.value(arrays)))
    return nnx.from_flat_state(list(held.items()))


@pytest.mark.parametrize("tied", [True, False])
def test_only_a_rule_that_names_a_table_gives_it_codes(tied):
    assert [path for path in models.by_path(parts(tied)[2]) if not path.startswith("stacks.")] == PATHS[tied]
    for rules in ([LAYERS], [{"match": ".*", "scheme": "w8a8"}], [{"match": "model", "scheme": "w4a16:g32"}]):
        codes = models.by_path(models.split(models.abstract_model(config(tied, *rules)))[2])
        assert codes
        assert all(path.startswith("stacks.") for path in codes)
    first = config(
        False, {"match": "lm_head", "scheme": "w4a16:g32"}, {"match": "embed|head", "scheme": "bf16"}, LAYERS
    )
    assert [str(first.scheme_of(path)) for path in PATHS[False]] == ["None", "w4a16:g32"]
    assert first.describe("head.kernel") == "lm_head.weight"


def test_what_a_table_cannot_be_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(UserError, match=r"give embed_tokens the scheme w8a8.* can be held in w4a16.* or bf16 alone"):
        config(True, {"match": "embed", "scheme": "w8a8"})
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight.*under w4a16:g128: K = 64"):
        models.random_model(config(True, {"match": "embed", "scheme": "w4a16"}))
    folder = tiny.model_folder(tmp_path)
    tied = {"quant": models.parse_rules([{"match": "lm_head", "scheme": "w4a16:g32"}]), "tie_embeddings": True}
    with pytest.raises(UserError, match=r"lm_head the scheme w4a16:g32.*write the rule for 'embed'"):
        models.read_config(folder, **tied)


def test_what_vllm_cannot_compute_is_refused_before_it_starts():
    wide, narrow = (config(True, TABLES, hidden=hidden, numerics=quant.resolve("cuda")) for hidden in (128, 64))
    vllm.check_model(vllm.Config(), wide)
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight in w4a16:g32 otherwise.*drop rollout"):
        vllm.check_model(vllm.Config(arithmetic="vllm"), wide)
    with pytest.raises(UserError, match=r"by 128 inputs at a time, and it has 64: leave it in bf16"):
        vllm.check_model(vllm.Config(), narrow)
    vllm.check_model(vllm.Config(), config(True, TABLES, numerics=quant.resolve("cpu")))
    vllm.check_model(vllm.Config(arithmetic="vllm"), config(True, LAYERS))


@pytest.mark.parametrize(("tied", "scheme"), CASES)
def test_forward_and_gradient_are_those_of_a_model_that_holds_the_codes_values(tied, scheme):
    """Straight through: the master gets the gradient that the decoded weight has, and its own value is not read."""
    graphdef, params, qweights = parts(tied, scheme, compute="bfloat16", layers=False)
    plain = models.with_scheme(graphdef, "bf16")
    empty, keys = models.quantize_params(plain, params), list(map(path_keys, PATHS[tied]))
    flat = nnx.to_flat_state(params)
    unread = nnx.from_flat_state([(k, v.replace(v.get_value() + 1.0) if k in keys else v) for k, v in flat])

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(graphdef, params, qweights):
        def loss(params):
            logprobs, entropy = scores(graphdef, params, qweights, TOKENS, SEGMENTS, chunk=6)
            return (logprobs * jnp.arange(48.0).reshape(2, 24)).sum() + entropy.sum(), logprobs

        return jax.grad(loss, has_aux=True)(params)

    got, mine = gradient(graphdef, unread, qweights)
    want, theirs = gradient(plain, decoded(params, tied, scheme), empty)
    np.testing.assert_array_equal(mine, theirs)
    for path, x in models.by_path(got).items():
        assert np.abs(x).max() > 0
        np.testing.assert_array_equal(x, models.by_path(want)[path], err_msg=path)


@pytest.mark.parametrize(("tied", "scheme"), CASES)
def test_the_embedded_sampler_draws_from_the_learners_policy_to_the_bit(tied, scheme):
    graphdef, params, qweights = parts(tied, scheme, numerics="cpu", compute="bfloat16")
    weights = PolicyWeights(graphdef=graphdef, params=params, qweights=qweights)
    sampler = JaxSampler(Config(batch_size=8, min_slots=8, prompt_bucket=16, response_bucket=16))
    sampler.publish(weights, 0)
    prompts = [Prompt(uid=str(i), tokens=(1 + i, 5, 7), text="", answer="") for i in range(4)]
    drawn = sampler.generate(prompts, num_samples=2, sampling=SamplingConfig(max_response_len=12), key=3)
    completions = [completion for group in drawn for completion in group]
    ids, segments = np.zeros((2, 8, 16), np.int32)
    for row, one in enumerate(completions):
        text = one.prompt_tokens + one.tokens
        ids[row, : len(text)], segments[row, : len(text)] = text, 1
    learned = np.asarray(scores(graphdef, params, qweights, ids, segments)[0])
    ours = np.concatenate([learned[i, 3 : 3 + len(one.tokens)] for i, one in enumerate(completions)])
    theirs = np.concatenate([np.asarray(one.logprobs, np.float32) for one in completions])
    ratio = ours.astype(np.float64) - theirs
    assert np.mean(np.expm1(ratio) - ratio) == 0.0  # k3
    bare = models.with_scheme(graphdef, [LAYERS])
    other = scores(bare, params, models.quantize_params(bare, params), ids, segments)[0]
    assert np.abs(other - learned).max() > 1e-2  # and four bits are not sixteen


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_folder_holds_the_codes_and_is_read_again(tied, tmp_path):
    graphdef, params, qweights = parts(tied, compute="bfloat16")
    export.write_quantized(graphdef, params, qweights, tmp_path)
    names = ["model.embed_tokens", "lm_head"][: 2 - tied]
    found = {name for name in load_file(tmp_path / "model.safetensors") if ".layers." not in name}
    assert found == {f"{n}.{leaf}" for n in names for leaf in ("weight_packed", "weight_scale", "weight_shape")} | {
        "model.norm.weight"
    }
    section = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert section["ignore"] == ["lm_head"] * tied
    assert section["config_groups"]["group_0"]["targets"] == names
    asked = {"compute_dtype": "bfloat16", "quant": models.config_of(graphdef).quant}
    folder = models.read_config(tmp_path, **asked)
    read = nnx.from_flat_state(list(models.read_masters(tmp_path, folder, frozen=lambda path: True)))
    for path, qtensor in models.by_path(qweights).items():
        again = models.by_path(read)[path]
        assert again.scheme == qtensor.scheme
        jax.tree.map(np.testing.assert_array_equal, again.arrays, qtensor.arrays)
    hf.weights.check_weights(tmp_path, folder)


def test_a_model_folder_is_exported_with_tables_by_name(tmp_path):
    folder, out = tiny.model_folder(tmp_path / "model"), tmp_path / "out"
    command = [
        "--model",
        str(folder),
        "--scheme",
        "w4a16:g64",
        "--tables",
        SCHEMES[0],
        "--format",
        "hf",
        "--out",
        str(out),
    ]
    assert export.main(command) == 0
    before, after = (load_file(path / "model.safetensors") for path in (folder, out))
    grid = quant_reference.grid("w4a16")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        arrays = grid.arrays(before[name].astype(np.float32), quant.parse_scheme(SCHEMES[0]))
        np.testing.assert_array_equal(after[name], grid.value(arrays))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_rounding_error_counts_tables(scheme):
    _, params, qweights = parts(False, scheme, layers=False)
    above = below = 0.0
    for master, qtensor in invariant_scaling.kernels(params, qweights):
        error = quant.dequantize(qtensor, jnp.float32) - master
        above, below = above + float((error**2).sum()), below + float((master**2).sum())
    assert float(invariant_scaling.quantization_error(params, qweights)) == pytest.approx(above / below, rel=1e-5)


def test_the_plan_counts_tables_in_their_real_size(tmp_path):
    world = tiny.World(tmp_path)
    held = {}
    for name, rules in {"bf16": [], "codes": [TABLES]}.items():
        cfg = world.changed(quant={"forward": "w4a16:g32", "rules": rules}).config
        held[name] = engine.published_bytes(cfg), engine.layer_copies(cfg), learner.parts(cfg), plan.quantized(cfg)
    table = 30 * 64
    assert held["bf16"][0] - held["codes"][0] == 2 * (2 * table - (table // 2 + 2 * table // 32))
    assert held["bf16"][1] == held["codes"][1]  # vLLM multiplies what was published
    more = {name: held["codes"][2][name] - size for name, size in held["bf16"][2].items()}
    assert more["QTensors"] == 2 * (table // 2 + 2 * table // 32)
    assert {name for name, size in more.items() if size} <= {"QTensors", "log-prob chunk", "QTensors published before"}
    lines = set(held["codes"][3]) - set(held["bf16"][3])
    assert lines == {f"w4a16:g32       1 x {name}.weight [30, 64]" for name in ("model.embed_tokens", "lm_head")}


def test_moved_codes_of_a_table_are_counted():
    graphdef, params, qweights = parts(True)
    scaled = jax.tree.map(lambda x: x * 1.01, params)
    before, after = (models.by_path(x)["embed.kernel"] for x in (qweights, models.quantize_params(graphdef, scaled)))
    assert moved_codes(before, before).sum() == 0
    assert 0 < moved_codes(before, after).sum() < before.shape[0] * before.shape[1]
