# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A whole run in miniature: a random model folder with a character tokenizer, a data file, a config, a reward."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import os
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import pytest
import yaml
from jax._src import compiler, lru_cache
from jax.experimental.compilation_cache import compilation_cache

from qarl_jax import data, models
from qarl_jax.learning.learner import Learner
from qarl_jax.models import ModelConfig
from qarl_jax.optim import build as optim
from qarl_jax.optim import leafwise
from qarl_jax.run import build, config
from tests.reference import rewards

ALPHABET = "0123456789+=abcdefghijklmno"  # 30 tokens with padding, end and unknown
ROW_LEN = 24
ROOT = pathlib.Path(__file__).parents[2]
CACHE: dict[str, Any] = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 0.03,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
# Programs compile in a tenth of the time without LLVM's optimizations, XLA's emitters of fused loops, and a split into
# parts for several threads. The second setting is for GPUs and changes nothing here, but it is part of JAX's key in
# memory, as the first is not: no program made so is taken for a run's own.
FAST = {"jax_disable_most_optimizations": True, "jax_ragged_dot_use_gpu_pallas_triton_lowering": True}
FAST_FLAGS = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
# XLA's compiler for GPUs refuses the flags.
if "QARL_OPTIMIZE" not in os.environ and "cuda" not in os.environ.get("JAX_PLATFORMS", ""):
    CACHE |= FAST
_MOST_KEPT = 1 << 29  # bytes of programs that runs of the tests leave to each other
AS_A_RUN = {name: jax.config.values[name] for name in FAST}
_OPTIONS_OF_A_RUN = compiler.get_compile_options


def model_config(hidden: int = 64, **fields: Any) -> ModelConfig:
    """Two Qwen3 layers with opinions (large weights): groups of 32 divide every K."""
    return ModelConfig(
        **{
            "architecture": "Qwen3ForCausalLM",
            "vocab_size": len(ALPHABET) + 3,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 32,
            "qk_norm": True,
            "initializer_range": 0.15,
            "max_position_embeddings": 128,
        }
        | fields
    )


@functools.lru_cache
def random_model(hidden: int = 64, seed: int = 0) -> models.Transformer:
    """The model of `model_config`, weights drawn from `seed`. Do not change it: it is shared."""
    return models.random_model(model_config(hidden), seed)


def model_folder(folder: pathlib.Path, hidden: int = 64, seed: int = 0) -> pathlib.Path:
    """Writes `random_model` with its tokenizer as a Hugging Face folder."""
    tokenizer = data.make_char_tokenizer(ALPHABET, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models.save_hf(random_model(hidden, seed), folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"model_type": "qwen3", "eos_token_id": tokenizer.eos_token_id}
    path.write_text(json.dumps(values))
    return folder


def data_file(path: pathlib.Path) -> pathlib.Path:
    """One hundred sums of digits, {"prompt": "3+4=", "answer": "7"}."""
    rows = [{"prompt": f"{i}+{j}=", "answer": str(i + j)} for i in range(10) for j in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def leaves() -> list[jax.Array]:
    """The masters of `random_model`."""
    return jax.tree.leaves(models.split(random_model())[1])


def load_model(cfg: config.RunConfig, mesh: Any) -> tuple[Any, Any]:
    """(graph definition under `quant.forward`, masters on the mesh) of the policy that a run starts from."""
    learner = build.make_learner(cfg, build.policy_graphdef(cfg), mesh)
    return learner.graphdef, build.load_policy(cfg, learner)[0]


@contextlib.contextmanager
def compiled_programs(tmp_path_factory: Any) -> Iterator[str]:
    """While open, programs are compiled fast, and kept in a folder (`kept_programs`), which is yielded.

    With QARL_OPTIMIZE in the environment they are compiled as a run does.
    """

    def fast(*args: Any, **options: Any) -> Any:  # `jax.jit` takes XLA's flags, but here every program is meant
        made = _OPTIONS_OF_A_RUN(*args, **options)
        made.env_option_overrides += FAST_FLAGS.items()
        return made

    with kept_programs(tmp_path_factory, CACHE) as folder, pytest.MonkeyPatch.context() as patch:
        if FAST.items() <= CACHE.items():
            patch.setattr(compiler, "get_compile_options", fast)
        yield folder


@contextlib.contextmanager
def compiled_as_a_run(tmp_path_factory: Any) -> Iterator[None]:
    """While open, programs are compiled as a run compiles them, whatever is open around it."""
    with kept_programs(tmp_path_factory, CACHE | AS_A_RUN), pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", _OPTIONS_OF_A_RUN)
        yield


_optimizer = functools.lru_cache(maxsize=16)(leafwise.Optimizer)
_schedule = functools.lru_cache(maxsize=16)(optim.make_schedule)
_learner = functools.lru_cache(maxsize=16)(Learner)


def _shared(graphdef: Any, *, beside: Any, trainable: Any, **rest: Any) -> Learner:
    if beside or trainable.freeze:  # which keeps arrays
        return Learner(graphdef, beside=beside, trainable=trainable, **rest)
    return _learner(graphdef, trainable=trainable, **rest)


@contextlib.contextmanager
def shared_learners() -> Iterator[None]:
    """While open, runs of one policy, objective and optimizer get one learner, whose programs are traced once.

    Not for tests that patch what a learner's programs are traced from.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leafwise, "Optimizer", _optimizer)
        patch.setattr(optim, "make_schedule", _schedule)
        patch.setattr(build, "Learner", _shared)
        yield


def environment(folder: str | None = None) -> dict[str, str]:
    """The environment of a process that compiles as `compiled_programs` does, and keeps its programs in `folder`."""
    names = {name.upper(): str(value) for name, value in (CACHE | {"jax_compilation_cache_dir": folder or ""}).items()}
    if FAST.items() <= CACHE.items():
        flags = (f"--{name}={str(value).lower()}" for name, value in FAST_FLAGS.items())
        names["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
    return os.environ | names


def _put_whole(cache: Any, key: str, value: bytes) -> None:
    """JAX's own writes an entry while another process may read it."""
    part = cache.path / f"{key}.{os.getpid()}"
    part.write_bytes(value)
    part.rename(cache.path / f"{key}{lru_cache._CACHE_SUFFIX}")


@functools.cache
def _folder_of_all_runs() -> pathlib.Path | None:
    """The folder in $QARL_KEPT for this CPU and this JAX, in good order; None: there is none, or it cannot be written.

    XLA's key for a program covers its text, flags and versions, but not the CPU that it was compiled for.
    """
    if not (kept := os.environ.get("QARL_KEPT")):
        return None
    try:
        flags = next(
            line for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")
        )
        key = hashlib.sha256(f"{jax.__version__} {flags}".encode()).hexdigest()[:12]
        folder = pathlib.Path(kept) / key
        folder.mkdir(parents=True, exist_ok=True)
        ages = sorted((stat.st_atime, stat.st_size, file) for file in folder.iterdir() if (stat := file.stat()))
    except (OSError, StopIteration):
        return None
    if not os.access(folder, os.W_OK):
        return None
    room = _MOST_KEPT
    for _, size, file in reversed(ages):  # those that were read last stay
        room -= size
        if room < 0:
            file.unlink(missing_ok=True)
    return folder


@contextlib.contextmanager
def kept_programs(tmp_path_factory: Any, settings: dict[str, Any]) -> Iterator[str]:
    """While open, JAX has these settings and keeps its programs in a folder, which is yielded: one of all runs of tests
    that have the same QARL_KEPT, or one of this run."""
    own = tmp_path_factory.getbasetemp()
    own = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder = str(_folder_of_all_runs() or own / "compiled")
    settings = settings | {"jax_compilation_cache_dir": folder}
    before = {name: jax.config.values[name] for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lru_cache.LRUCache, "put", _put_whole)
            yield folder
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


class World:
    """A folder with model and data, and the config of a two-step run over them; `tree` may be changed."""

    def __init__(self, folder: pathlib.Path, hidden: int = 64, seed: int = 0):
        self.folder, self.hidden = folder, hidden
        self.model = model_folder(folder / "model", hidden, seed)
        self.data = data_file(folder / "sums.jsonl")
        self.tree: dict[str, Any] = {
            "seed": 3,
            "run_dir": str(folder / "run"),
            "model": {"path": str(self.model), "dtype": "float32", "remat": "none"},
            "quant": {"forward": "w4a16:g32", "engine": "plain"},
            "data": {
                "source": {"name": "jsonl", "path": str(self.data)},
                "template": "raw",
                "max_prompt_len": 8,
                "holdout": 0.2,
            },
            "reward": {"name": "python", "path": f"{rewards.__file__}:digit_share"},
            "rollout": {
                "num_samples_per_prompt": 4,
                "max_response_len": 12,
                "engine": {"name": "jax", "batch_size": 16},
            },
            "loss": {"name": "tbpo", "clip_high": 0.02, "neg_clip_low": 0.02, "neg_clip_high": 0.02},
            "optimizer": {"name": "muon", "lr": 0.02},
            "train": {
                "steps": 2,
                "prompts_per_step": 4,
                "prompts_per_update": 2,
                "micro_batch_rows": 4,
                "row_len": ROW_LEN,
                "max_segments": 4,
            },
            "checkpoint": {"every": 1, "keep": 2},
            "eval": {"num_prompts": 4},
            "log": {"view": "off", "trackers": []},
        }

    def changed(self, **sections: Any) -> World:
        """The same world with sections of the config updated, e.g. changed(train={"steps": 1}, seed=4)."""
        other = copy.copy(self)
        other.tree = copy.deepcopy(self.tree)
        for key, value in sections.items():
            merges = isinstance(value, dict) and "name" not in value  # a variant is replaced whole
            other.tree[key] = self.tree.get(key, {}) | value if merges else value
        return other

    @property
    def run_dir(self) -> pathlib.Path:
        return pathlib.Path(self.tree["run_dir"])

    @property
    def config(self) -> config.RunConfig:
        return config.from_dict(copy.deepcopy(self.tree), "tiny")

    def command(self, *overrides: str) -> list[str]:
        """Arguments for `train.main`."""
        path = self.folder / f"{self.run_dir.name}.yaml"
        path.write_text(yaml.safe_dump(self.tree))
        return ["--config", str(path), *overrides]

    def records(self, name: str = "metrics") -> list[dict[str, Any]]:
        """Lines of metrics.jsonl (or eval, samples), without what depends on the clock."""
        lines = (self.run_dir / f"{name}.jsonl").read_text().splitlines()
        return [
            {key: value for key, value in json.loads(line).items() if not key.startswith(("time/", "perf/"))}
            for line in lines
        ]
