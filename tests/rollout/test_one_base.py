# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A base in buffers that an engine maps: what the learner reads there, when a run has it so, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from qarl_bridge.protocol import messages
from qarl_bridge.protocol import one_base as layout

from qarl_jax import models, quant
from qarl_jax.learning import pieces
from qarl_jax.quant.schemes import nvfp4_words
from qarl_jax.rollout.vllm.engine import Config, VllmEngine
from qarl_jax.rollout.vllm.one_base import OneBase
from qarl_jax.run import build
from qarl_jax.types import UserError
from tests.reference import tiny

ADAPTERS = {
    "lora": {"rank": 8, "alpha": 8},
    "optimizer": {"name": "adamw", "lr": 0.01},
    "quant": {"forward": "nvfp4", "engine": "cpu"},
    "model": {"dtype": "bfloat16"},
    "rollout": {"engine": {"name": "vllm"}},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.World(tmp_path_factory.mktemp("world"), hidden=128).changed(**ADAPTERS)


@pytest.fixture(scope="module")
def bases(world):
    """A learner's base read as ever, and read layer by layer into buffers."""
    cfg = world.config
    mesh = build.make_mesh(cfg)
    learner = build.make_learner(cfg, build.policy_graphdef(cfg), mesh)
    own = models.by_path(build.load_policy(cfg, learner)[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "BYTES", 1)
        assert len(pieces.cut(learner.config).stacks) == 2
        learner.keeper = OneBase(learner.graphdef, mesh)
        shared = models.by_path(build.load_policy(cfg, learner)[1])
    return learner, own, shared


@pytest.mark.slow
def test_a_base_read_into_buffers_is_the_base_to_the_bit(bases):
    _, own, shared = bases
    assert own.keys() == shared.keys()
    inside = [path for path, held in shared.items() if isinstance(held, quant.QTensor)]
    assert len(inside) == 7
    assert all(isinstance(shared[path].scheme, nvfp4_words.Config) for path in inside)
    for path, held in shared.items():
        if path in inside:
            assert held.shape == own[path].shape
            found, wanted = (np.asarray(quant.dequantize(x, np.float32)) for x in (held, own[path]))
        else:
            found, wanted = np.asarray(held), np.asarray(own[path])
        assert found.tobytes() == wanted.tobytes(), path


@pytest.mark.slow
def test_weights_of_a_fused_module_are_views_of_one_buffer(bases):
    learner, _, shared = bases
    pointers = {path: x.codes.unsafe_buffer_pointer() for path, x in shared.items() if isinstance(x, quant.QTensor)}
    assert len(set(pointers.values())) == 4, "q, k and v; o; gate and up; down"
    sizes = [layout.size(layout.arrays_of(place)) for place in learner.keeper.places]
    assert sum(sizes) == learner.keeper.nbytes


@pytest.mark.slow
def test_programs_are_compiled_ahead_for_the_base_that_comes(bases):
    learner, _, shared = bases
    for path, like in models.by_path(learner.keeper.abstract()).items():
        same = jax.tree.map(
            lambda a, b: (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding), like, shared[path]
        )
        assert all(jax.tree.leaves(same)), path
        assert jax.tree.structure(like) == jax.tree.structure(shared[path])


@pytest.mark.parametrize(
    ("changed", "devices", "once"),
    [
        ({}, 1, True),
        ({}, 2, False),
        ({"lora": None, "optimizer": {"name": "muon", "lr": 0.02}}, 1, False),
        ({"rollout": {"engine": {"name": "vllm", "transport": "host"}}}, 1, False),
        ({"rollout": {"engine": {"name": "vllm", "replicas": 2}}}, 1, False),
        ({"rollout": {"engine": {"name": "vllm", "visible_gpus": "1"}}}, 1, False),
        ({"rollout": {"engine": {"name": "jax", "batch_size": 16}}}, 1, False),
    ],
    ids=str,
)
def test_a_run_holds_its_base_once_where_one_vllm_is_on_the_learners_device(world, changed, devices, once):
    assert build.holds_base_once(world.changed(**changed).config, devices) is once


@pytest.mark.slow
def test_a_base_in_the_hosts_memory_is_refused_where_device_memory_is_asked_for(bases):
    engine = VllmEngine(Config(engine="fake", transport="cuda_ipc"))
    with pytest.raises(UserError, match=r"transport=cuda_ipc: the learner runs on cpu.*; set auto or host"):
        engine.hold_once(bases[0].graphdef, bases[0].mesh)
    engine.close()


@pytest.mark.slow
def test_memory_that_an_engine_cannot_reach_is_refused_with_what_to_do(bases):
    pytest.importorskip("vllm")
    from qarl_bridge.engine.one_base import Base
    from qarl_bridge.protocol.errors import BridgeError

    place = bases[0].keeper.places[0]
    gpu = messages.DeviceMemory(device=bytes(16), handle=bytes(64))
    gone = messages.HostMemory(pid=2**22 + 1, fd=3, inode=1)
    for memory, said in ((gpu, "runs on a CPU, and the base lies in a GPU"), (gone, "cannot open the memory")):
        with pytest.raises(BridgeError, match=f"{said}.*set rollout.engine.transport=host"):
            Base.open([layout.Place(**{**_fields(place), "memory": memory})], on_gpu=False)


def _fields(place):
    return {name: getattr(place, name) for name in place.__struct_fields__}


@pytest.mark.slow
def test_a_released_base_goes_into_buffers_as_it_is(world, bases):
    learner, own, _ = bases
    raw = jax.tree.map(jnp.copy, build.load_policy(world.config, _without_keeper(world))[1])
    keeper = OneBase(learner.graphdef, learner.mesh)
    leaves = nnx.to_flat_state(raw)
    _, shared = pieces.read(learner.trainable, learner.config, learner.mesh, lambda *_, **__: leaves, keeper)
    for path, held in models.by_path(shared).items():
        if isinstance(held, quant.QTensor):
            assert isinstance(held.scheme, nvfp4_words.Config)
            found, wanted = (np.asarray(quant.dequantize(x, np.float32)) for x in (held, own[path]))
            assert found.tobytes() == wanted.tobytes(), path


def _without_keeper(world):
    cfg = world.config
    return build.make_learner(cfg, build.policy_graphdef(cfg), build.make_mesh(cfg))
