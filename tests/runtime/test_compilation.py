# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs are counted when they are built, and kept where the user says."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from qarl_jax.runtime import compilation
from tests.reference import tiny
from tests.reference.tiny import CACHE, compiled_as_a_run, compiled_programs


@pytest.fixture
def cache_settings():
    """JAX's own settings, put back afterwards."""
    before = {name: jax.config.values[name] for name in CACHE}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_a_new_shape_is_counted_and_a_known_one_is_not():
    program = jax.jit(lambda x: x * 2 + 1)
    short, long = jnp.zeros((3,)), jnp.zeros((5,))
    counter = compilation.Recompiles()
    program(short)
    assert counter.take() == 1
    program(short)
    assert counter.take() == 0
    program(long)
    program(short)
    assert counter.take() == 1


def test_two_counters_do_not_disturb_each_other():
    one, two = compilation.Recompiles(), compilation.Recompiles()
    jax.jit(lambda x: x - 3)(jnp.zeros((7,)))
    assert one.take() == two.take() >= 1


@pytest.mark.skipif("QARL_OPTIMIZE" in os.environ, reason="QARL_OPTIMIZE: nothing is compiled fast")
def test_a_program_compiled_fast_for_tests_is_never_taken_for_a_runs(tmp_path_factory):
    program, x = jax.jit(lambda x: jnp.sin(x) * x.sum() + 5), jnp.ones((11, 3))
    with compiled_programs(tmp_path_factory):
        program(x)
        counter = compilation.Recompiles()
        program(x)
        assert counter.take() == 0
    program(x)
    assert counter.take() == 1


@pytest.mark.slow  # `make test-fast` compiles nothing as a run does
@pytest.mark.skipif("QARL_OPTIMIZE" in os.environ, reason="QARL_OPTIMIZE: nothing is compiled fast")
def test_among_programs_compiled_fast_a_test_may_ask_for_a_runs(tmp_path_factory):
    program, x = jax.jit(lambda x: jnp.sin(x) * x.sum() + 6), jnp.ones((11, 3))

    def text():
        return program.lower(x).compile().as_text()

    a_runs = text()
    with compiled_programs(tmp_path_factory):
        fast = text()
        with compiled_as_a_run(tmp_path_factory):
            assert text() == a_runs
        assert text() == fast != a_runs


def test_runs_of_tests_leave_each_other_the_programs_that_were_read_last(monkeypatch, tmp_path):
    monkeypatch.setenv("QARL_KEPT", str(tmp_path))
    folder = tiny._folder_of_all_runs.__wrapped__()
    assert folder.parent == tmp_path
    for age, name in enumerate("abc"):
        (folder / name).write_bytes(b"x" * 400)
        os.utime(folder / name, (1000 - age, 2000 + age))
    monkeypatch.setattr(tiny, "_MOST_KEPT", 1000)
    assert tiny._folder_of_all_runs.__wrapped__() == folder
    assert sorted(file.name for file in folder.iterdir()) == ["a", "b"]
    (tmp_path / "file").write_text("in the way")
    for kept in ("", str(tmp_path / "file" / "cache")):
        monkeypatch.setenv("QARL_KEPT", kept)
        assert tiny._folder_of_all_runs.__wrapped__() is None


def test_a_folder_keeps_programs(cache_settings, tmp_path):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    folder = tmp_path / "new" / "cache"
    assert compilation.enable_cache(str(folder)) == str(folder)
    jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((9, 9))).block_until_ready()
    assert any(folder.iterdir())


def test_a_folder_that_cannot_be_written_is_no_error(cache_settings, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    (tmp_path / "file").write_text("in the way")
    assert compilation.enable_cache(str(tmp_path / "file" / "cache")) is None
    assert jax.config.jax_compilation_cache_dir == before


def test_auto_keeps_nothing_on_a_cpu_and_respects_jaxs_own_folder(cache_settings, monkeypatch, tmp_path):
    jax.config.update("jax_compilation_cache_dir", None)
    assert compilation.enable_cache("off") is None
    assert compilation.enable_cache("auto") is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert compilation.enable_cache("auto") == str(tmp_path / "qarl_jax" / "xla")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    assert compilation.enable_cache("auto") == str(tmp_path / "own")


def test_a_backward_asks_xla_for_what_it_knows_alone(monkeypatch):
    compilation.backward_options.cache_clear()
    assert compilation.backward_options() is None  # on a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for name, known in (("xla_gpu_autotune_level", 4), ("xla_gpu_no_such_option", 4)):
        compilation.backward_options.cache_clear()
        monkeypatch.setattr(compilation, "_NO_ZEROS", {name: known})
        assert compilation.backward_options() == (None if "no_such" in name else {name: known})
    compilation.backward_options.cache_clear()
