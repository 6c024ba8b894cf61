# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Strict JAX for every test: 8 simulated devices, no silent promotion, no silent broadcasting over ranks.

Eight devices on two cores need patience. A simulated device that reaches a collective blocks one thread of XLA's pool
until all eight are there, and XLA ends the process when one is 60 s late: 20 s until it warns, and 40 s more. A pool of
one thread per device (the default) leaves none for whatever else has to run before the last can arrive. So: more
threads, and longer limits. `benchmarks/sessions/tp/common.sh` sets them, too.
"""

import collections
import ctypes
import functools
import gc
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("PJRT_NPROC", "16")
_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=240",
)
if _FLAGS[0] not in os.environ.get("XLA_FLAGS", "") and os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS]).strip()

import hypothesis  # noqa: E402
import jax  # noqa: E402  (the flags above must be set first)
import pytest  # noqa: E402

from qarl_jax import plot  # noqa: E402
from tests.reference.promises import pytest_runtest_makereport  # noqa: E402, F401  (a hook)

# A busy machine is no failure. `make test` asks for "repeatable" besides: the same examples every time, so that what
# fails there was broken by a change, and not by luck; a plain pytest goes on looking for new ones.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("repeatable", hypothesis.settings.get_profile("patient"), derandomize=True)
hypothesis.settings.load_profile("patient")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


_CACHED_BYTES = 4 << 30


@pytest.fixture(scope="module", autouse=True)
def programs_are_forgotten():
    """After a module that leaves a process above 4 GiB. Never forgetting takes 7 GiB, of each of two processes."""
    yield
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    if pages * os.sysconf("SC_PAGE_SIZE") > _CACHED_BYTES:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="session", autouse=True)
def runs_leave_no_plots():
    """They take a second of every run that ends in this process. `plot.leave.__wrapped__` draws them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plot, "leave", functools.wraps(plot.leave)(lambda run_dir: None))
        yield


@pytest.fixture(scope="session", autouse=True)
def live_engines_are_forked():
    """Importing vLLM is most of an engine's start. `make test-slow` starts each as a run does."""
    if "QARL_OPTIMIZE" in os.environ:
        yield
        return
    from tests.reference import engines

    with engines.forked():
        yield


# Files that take a minute with few tests in them.
LONGEST = (
    "parity/test_cpu_builds.py",
    "test_resume.py",
    "parity/test_gate_vllm.py",
    "test_vllm_run.py",
    "test_configs.py",
    "verify/test_ladder.py",
    "learning/test_one_function.py",
    "test_train.py",
    "runtime/test_processes.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """What takes longest is begun first, so that no process is left alone with it: live engines, then slow files."""
    tests = pathlib.Path(__file__).parent
    weights = collections.Counter({tests / name: 10_000 - 1000 * place for place, name in enumerate(LONGEST)})
    for item in items:
        weights[item.path] += bool(item.get_closest_marker("slow")) * (10 if item.get_closest_marker("vllm") else 1)
    items.sort(key=lambda item: -weights[item.path])


def pytest_collection_finish():
    """What importing made stays, so the collector need not look through it again whenever a program is traced."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_terminal_summary(terminalreporter):
    """Says which of vLLM's CPU builds the session ran, and which this machine could not (test_cpu_builds.py)."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    said = {
        value for report in reports for name, value in getattr(report, "user_properties", ()) if name == "cpu_build"
    }
    if said:
        ran, missed = (sorted(v.split(":")[0] for v in said if v.endswith("run") == run) for run in (True, False))
        missed_line = f"; not run, this machine cannot: {', '.join(missed)}" if missed else ""
        terminalreporter.write_line(f"vLLM's CPU builds run: {', '.join(ran) or 'none'}{missed_line}")


# What these claim may hang on the compiler: bits, memory, the text of a program. They are compiled as a run compiles.
# Single tests elsewhere ask for it by the fixture `compiled_as_a_run`.
COMPILED_AS_A_RUN = (
    "gpu",
    "learning/test_lowering.py",
    "learning/test_one_function.py",
    "models",
    "numerics",
    "parity",
    "memory/test_learner.py",
    "runtime/test_collectives.py",
    "runtime/test_compilation.py",
    "verify",
)


@pytest.fixture(scope="session", autouse=True)
def programs_are_kept(tmp_path_factory):
    """What took long to compile is read back by the next module that needs it, as a run does."""
    from tests.reference import tiny

    with tiny.kept_programs(tmp_path_factory, tiny.CACHE | tiny.AS_A_RUN):
        yield


@pytest.fixture(scope="module")
def compiled_programs(tmp_path_factory):
    """For tests whose claims do not hang on the compiler: fast compilation, and every program kept, in this folder."""
    from tests.reference import tiny  # which imports the learner: checks of shapes are put around it before

    with tiny.compiled_programs(tmp_path_factory) as folder:
        yield folder


@pytest.fixture
def compiled_as_a_run(tmp_path_factory):
    """For a test whose claim hangs on the compiler, in a module whose other tests are compiled fast."""
    from tests.reference import tiny

    with tiny.compiled_as_a_run(tmp_path_factory):
        yield


@pytest.fixture
def compiled_fast(tmp_path_factory):
    """For a test whose claim does not, in a module whose other tests are compiled as a run."""
    from tests.reference import tiny

    with tiny.compiled_programs(tmp_path_factory):
        yield


@pytest.fixture(scope="module")
def shared_learners():
    """For modules of whole runs: `tiny.shared_learners`."""
    from tests.reference import tiny

    with tiny.shared_learners():
        yield


@pytest.fixture(scope="module", autouse=True)
def programs_are_compiled_fast(request, programs_are_kept):
    """Everywhere but in COMPILED_AS_A_RUN, where a module may ask for `compiled_programs` itself."""
    place = request.path.relative_to(pathlib.Path(__file__).parent)
    if not any(place.is_relative_to(kept) for kept in COMPILED_AS_A_RUN):
        request.getfixturevalue("compiled_programs")
