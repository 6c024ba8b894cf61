# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Several processes with engines of their own are one run: what they draw, learn and survive."""

import pytest

from qarl_jax import train
from tests.reference import tiny
from tests.reference.processes import assert_equal, trained

STEPS = 3


def of_two_devices(folder, engine, **model):
    return tiny.World(folder, **model).changed(
        mesh={"fsdp": 2},
        optimizer={"name": "adamw", "lr": 0.01},
        rollout={"engine": {"name": "vllm", "max_model_len": 64, **engine}},
        train={"steps": STEPS, "prompts_per_update": 0},
        eval={"at_start": False, "at_end": True, "num_prompts": 3},
        log={"samples_per_step": 4},
    )


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """Runs over toy engines."""
    return of_two_devices(tmp_path_factory.mktemp("toys"), {"engine": "fake"})


@pytest.fixture(scope="module")
def alone(toys):
    """The run by one process with two engines."""
    alone = toys.changed(run_dir=str(toys.folder / "alone"))
    alone.tree["rollout"]["engine"]["replicas"] = 2
    assert train.main(alone.command()) == 0
    return alone


@pytest.mark.slow
def test_two_processes_with_an_engine_each_equal_one_with_two_to_the_bit(toys, alone):
    two = toys.changed(run_dir=str(toys.folder / "two"), log={"view": "lines"})
    codes, said = trained(two)
    print(*said, sep="\n=====\n")
    assert codes == [0, 0], said
    assert_equal(two, alone, ("metrics", "eval", "samples"))
