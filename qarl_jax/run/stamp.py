# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's stamp: the config and arithmetic of its policy, which resume, evaluate and export read.

A start writes its settings with the first step that it trains (`loop.setup.Run.begin_record`), so a start that trains
nothing changes no record. Settings that define the policy (`POLICY`) or the arrays of the optimizer's state cannot
change within a run. Other settings may; run.json has the step of each change.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from qarl_jax import quant
from qarl_jax.numerics.engine import of_profile
from qarl_jax.run import checkpoint, config, on_disk
from qarl_jax.run.config import RunConfig
from qarl_jax.types import UserError

POLICY = (
    *("model.path", "model.init", "model.dtype", "model.param_dtype"),
    *("quant.forward", "quant.rollout", "quant.group_size", "quant.rules", "quant.uaq_scale", "quant.kernels"),
    *("rollout.engine.arithmetic", "rollout.engine.tensor_parallel_size", "lora"),
)
"""Settings that say what a run's policy is, and whether its sampler computes it. The arithmetic that quant.engine and
rollout.engine.name come to is one more."""
_CRITIC = "critic.lora"  # its base is in no checkpoint
_OPTIMIZER = tuple(
    f"{of}.{name}"
    for of in ("optimizer", "critic.optimizer")
    for name in ("name", "moment_dtype", "second_moment_dtype")
)
"""Settings that say which arrays an optimizer's state has."""
_UNTOLD = ("log.", "distributed.", "run_dir")  # settings that no number of a run depends on


def make(cfg: RunConfig, profile: str) -> dict[str, Any]:
    """Makes the stamp of a run, to be saved in a checkpoint's JSON. profile: the learner's resolved arithmetic."""
    stamp = {"config": _plain(cfg), "numerics": {"profile": profile}, "model": _model(cfg), "base": _base(cfg)}
    return stamp if cfg.lora is None else stamp | {"start": _start(cfg)}


def _model(cfg: RunConfig) -> str:
    """The mark of the model folder without its weights: its json and jinja files; empty: the folder has none."""
    return on_disk.sampled(pathlib.Path(cfg.model.path), "*.json", "*.jinja")


def _base(cfg: RunConfig) -> str:
    """The mark of the folder's weights, from which a run starts; empty: they are drawn, or not there.

    Under LoRA they are the frozen base, which no checkpoint holds.
    """
    drawn = cfg.model.init == "random"
    return "" if drawn else on_disk.sampled(pathlib.Path(cfg.model.path), "*.safetensors")


def _start(cfg: RunConfig) -> str:
    """The mark of the adapters in `lora.init`, a part of the reference policy; empty: there are none."""
    folder = None if cfg.lora is None else cfg.lora.init
    return on_disk.sampled(pathlib.Path(folder), "adapter_model.safetensors") if folder else ""


def _check_base(cfg: RunConfig, found: dict[str, Any]) -> None:
    """Refuses adapters on another base than the one that they learned on."""
    known = found.get("base")
    if cfg.lora is not None and known and (now := _base(cfg)) and now != known:
        raise UserError(
            f"the adapters that step {found['step']} saved learned on other weights than those that are now in"
            f" {cfg.model.path}: give model.path the folder as it was, or start a new run_dir."
        )


def check_adapters(cfg: RunConfig, found: dict[str, Any] | None) -> None:
    """Refuses a config whose section `lora` or frozen base is not that of a saved policy (`of`; None: unknown).

    Raises:
      UserError: names the step, and both sections.
    """
    if found is None:
        return
    was, now = (_adapters(tree, anchored=False)["lora"] for tree in (found["config"], _plain(cfg)))
    if was != now:
        raise UserError(
            f"step {found['step']} saved a policy with lora: {was}, and the config has {now}; set the former."
        )
    _check_base(cfg, found)


def of(directory: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Reads the stamp of a saved policy, with its `step`; None if nothing is saved there.

    Args:
      directory: a run's folder, its checkpoints folder (both: the newest step), or the folder of one step.

    Raises:
      UserError: the step was saved without a stamp.
    """
    try:
        checkpoints, step = checkpoint.find(directory)
    except UserError:
        return None
    found = checkpoints.extra(step)
    if found is None:
        return None
    step, extra = found
    if "config" not in extra:
        raise UserError(f"{checkpoints.path(step)} holds no config: it is not the checkpoint of a run's policy.")
    return {"step": step} | {
        key: extra[key] for key in ("config", "numerics", "model", "base", "start", "data") if extra.get(key)
    }


def config_of(directory: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Rebuilds the config that a saved policy was trained with.

    Args:
      directory: as in `of`. overrides: "section.field=value" strings applied to it.

    Raises:
      UserError: no policy is saved there.
    """
    found = of(directory)
    if found is None:
        checkpoint.find(directory)  # says what is there instead
        raise UserError(f"Every checkpoint in {directory} is damaged.")
    cfg = config.from_dict(found["config"], f"the checkpoint of step {found['step']}", overrides)
    _check_base(cfg, found)
    return cfg


def numerics_of(found: dict[str, Any] | None) -> quant.Numerics | None:
    """Returns the arithmetic of a stamp (`of`); None if the stamp has none."""
    numerics = (found or {}).get("numerics")
    return of_profile(numerics.get("profile", "")) if isinstance(numerics, dict) else None


def learner_numerics(cfg: RunConfig, found: dict[str, Any] | None) -> quant.Numerics:
    """Decides the learner's arithmetic when `cfg` resumes or evaluates a saved policy, perhaps on another machine.

    It is `quant.engine` if set. Under auto it is the arithmetic the policy was saved with, so that nothing changes
    within a run; with vLLM it is that of vLLM on this machine.
    """
    if cfg.quant.engine != "auto" or cfg.rollout.engine_name == "vllm":
        return cfg.numerics
    return numerics_of(found) or cfg.numerics


def changes(cfg: RunConfig, found: dict[str, Any]) -> list[str]:
    """Lists settings that differ from a saved policy's ("optimizer.lr 0.02 -> 0.01"), without new settings."""
    old, new = _flat(found["config"]), _flat(_plain(cfg))
    both = [key for key in old if key in new and not key.startswith(_UNTOLD)]
    return [f"{key} {old[key]} -> {new[key]}" for key in both if old[key] != new[key]]


def check_same_policy(cfg: RunConfig, found: dict[str, Any], *, on_gpu: bool) -> None:
    """Refuses to resume a saved policy under settings that would change what it computes, or its optimizer's arrays.

    Args:
      found: the saved policy's stamp (`of`).
      on_gpu: whether the learner runs on a GPU; passed in so that JAX is not initialized.

    Raises:
      UserError: names each such setting, with both values.
    """
    anchored = cfg.kl.coef > 0 and cfg.kl.reference == "start"
    old, new = (_flat(tree) | _adapters(tree, anchored) for tree in (found["config"], _plain(cfg)))
    before, now = _policy(old), _policy(new)
    other = [key for key in before if key in now and before[key] != now[key] and old[key] != new[key]]
    if "model.path" in other and found.get("model") == _model(cfg) and found.get("base", "") == _base(cfg):
        other.remove("model.path")  # an equal folder elsewhere
    held = [f"{key} {old[key]} -> {new[key]}" for key in other]
    if any(old.get(key) != new[key] for key in ("quant.engine", "rollout.engine.name")):
        was, planned = numerics_of(found), config.on_a_gpu(cfg) if on_gpu else cfg
        if was is not None and was.profile != (profile := learner_numerics(planned, found).profile):
            held.append(f"quant.engine {was.profile} -> {profile}")
    if held:
        link = ", with a link to a model folder that was moved" if held[0].startswith("model.path") else ""
        kinds = {"critic" if key == _CRITIC else "optimizer" if key in _OPTIMIZER else "policy" for key in other}
        kind = kinds.pop() if len(kinds) == 1 and len(held) == len(other) else "policy"
        raise UserError(
            f"cannot resume {cfg.run_dir}: {'; '.join(held)} would make another {kind} of the one that step"
            f" {found['step']} saved. Restore {'it' if len(held) == 1 else 'them'}{link}, or start a new run_dir, whose"
            " model.path may be this policy (`python -m qarl_jax.export --format hf`)."
        )
    if cfg.critic is not None and found["config"].get("critic", ...) is None:
        raise UserError(
            f"cannot resume {cfg.run_dir}: step {found['step']} saved no critic. Set critic=null and another"
            " advantage.name, or start a new run_dir, whose model.path may be this policy."
        )
    _check_base(cfg, found)
    start = found.get("start")
    if anchored and cfg.lora is not None and start and start != _start(cfg):
        raise UserError(
            f"kl.reference=start has the adapters that {cfg.lora.init} held at the run's start, and it has others now."
            " Put the former back, or start a new run_dir."
        )


def _adapters(tree: dict[str, Any], anchored: bool) -> dict[str, str]:
    """Each section `lora` of a config in a line; `init`, the folder it began with, only for a reference policy.

    A critic's has its base, which no checkpoint holds. anchored: the reference policy is the one that the run began as.
    """
    critic, lora = tree.get("critic") or {}, tree.get("lora")
    own, start = critic.get("lora"), (lora or {}).get("init")
    sections = {
        "lora": lora and lora | {"init": os.path.realpath(start) if start and anchored else None},
        _CRITIC: own and own | {"init": None, "on": critic["path"] or "the policy's base"},
    }
    return {
        name: ", ".join(f"{key} {value}" for key, value in (section or {}).items() if value) or "None"
        for name, section in sections.items()
    }


def _policy(flat: dict[str, Any]) -> dict[str, Any]:
    """Resolves the settings of `POLICY`, the optimizers' and a critic's adapters: two ways to write one are equal."""
    out = {key: flat[key] for key in (*POLICY, *_OPTIMIZER, _CRITIC) if key in flat}
    out["model.path"] = os.path.realpath(out["model.path"])
    out["quant.rollout"] = out["quant.rollout"] or out["quant.forward"]
    return out


def _plain(cfg: RunConfig) -> dict[str, Any]:
    """The config as JSON gives it back."""
    return json.loads(json.dumps(config.to_dict(cfg), default=str))


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return out
