# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Chooses the cheapest memory settings under which a run fits its devices; else an error names settings that fit.

    cfg, made = settle(cfg, size=80 * GIB)      # every "auto" of `cfg` replaced; made.lines() says what was chosen

A knob is a group of settings with a few choices, each with a cost (`costs.Cost`): seconds a step, or rounding. The
learner's knobs and the engine's meet in one sum of bytes. So all pairs of their combinations are searched, from the
cheapest: if any combination fits, one is found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from qarl_jax import models
from qarl_jax.memory import costs, learner
from qarl_jax.memory.costs import Cost
from qarl_jax.memory.engine import at_once, engine_parts, kv_bytes
from qarl_jax.memory.learner import GIB
from qarl_jax.memory.plan import Plan, make, spread
from qarl_jax.rollout.vllm.config import Config as VllmConfig
from qarl_jax.rollout.vllm.config import check_model
from qarl_jax.run.config import RunConfig, on_a_gpu, replaced
from qarl_jax.runtime import processes
from qarl_jax.types import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """Settings by dotted field, and their cost. `notes`: further effects, in words. `parts`: the choices summed up."""

    settings: Mapping[str, Any]
    cost: Cost = dataclasses.field(default_factory=Cost)
    notes: tuple[str, ...] = ()
    parts: tuple[Choice, ...] = ()

    def __add__(self, other: Choice) -> Choice:
        settings, cost = {**self.settings, **other.settings}, self.cost + other.cost
        return Choice(settings=settings, cost=cost, parts=(*(self.parts or (self,)), *(other.parts or (other,))))

    def lines(self) -> list[str]:
        """Returns a line of text for each part: its settings and their cost."""
        return [
            f"{' '.join(words(part.settings))}: {'; '.join((*costs.in_words(part.cost), *part.notes))}"
            for part in self.parts or (self,)
            if part.settings
        ]


Knob = list[Choice]


def settle(cfg: RunConfig, size: int | None) -> tuple[RunConfig, Plan | None]:
    """Replaces every "auto" of a run's memory settings; returns the run and the plan that it fits.

    `model.remat`, `optimizer.offload`, a critic's, `train.grad_dtype`, `train.micro_batch_rows` and
    `rollout.engine.memory` may be auto. Without a device's size (on a CPU) nothing is planned: remat is full, nothing
    is offloaded, gradients are float32, and micro-batches have eight rows, or the next multiple of the devices. A mesh
    axis of -1 becomes the number of devices here.

    Args:
      size: bytes of a device (`plan.capacity`).

    Raises:
      UserError: the run does not fit; the message names settings that fit, if there are any. Or the devices here do
        not divide `train.micro_batch_rows`.
    """
    given = spread(cfg)
    if size is None:
        return replaced(given, _without_plan(given)), None
    cfg = with_engines(given)
    found = search(on_a_gpu(cfg), size, automatic(on_a_gpu(cfg), size))  # JAX is not asked whether it is one
    if found is None:
        raise refusal(given, size)
    choice, plan = found
    return replaced(cfg, choice.settings), dataclasses.replace(plan, chosen=(*choice.lines(), *_undivided(cfg)))


def _without_plan(cfg: RunConfig) -> dict[str, Any]:
    critic = {} if cfg.critic is None else {"critic.optimizer.offload": cfg.critic.optimizer.offload is True}
    return critic | {
        "model.remat": cfg.model.remat_or_full,
        "optimizer.offload": cfg.optimizer.offload is True,
        "train.grad_dtype": cfg.train.grad_dtype_or_float32,
        "train.micro_batch_rows": cfg.micro_batch_rows,
    }


def with_engines(cfg: RunConfig) -> RunConfig:
    """Places vLLM engines on the learner's GPUs, one per GPU or per group of `tensor_parallel_size` GPUs. Does so only
    if `rollout.engine.memory` is auto and the config places no engine.

    Raises:
      UserError: the shards do not divide the GPUs.
    """
    engine, hosts = cfg.rollout.engine, processes.planned(cfg.distributed)
    devices = max(1, learner.planned_mesh(cfg).size // hosts)
    if not isinstance(engine, VllmConfig) or engine.memory != "auto":
        return cfg
    shards = engine.tensor_parallel_size
    if engine.replicas or engine.visible_gpus or engine.endpoints or (devices == 1 and (hosts == 1 or shards == 1)):
        return cfg
    if devices % shards:
        whose, other = "the learner's", "name the engine's in rollout.engine.visible_gpus"
        if hosts > 1:
            whose, other = "a process's", "start fewer processes, each with more GPUs (distributed.local_devices)"
        raise UserError(
            f"rollout.engine.tensor_parallel_size={shards} does not divide {whose} {devices} GPU(s)",
            f"lower it, or {other}",
            ": ",
        )
    replicas = devices // shards
    if cfg.distributed.is_on:  # each process knows its own GPUs
        return replaced(cfg, {"rollout.engine.replicas": replicas, "rollout.engine.shares_gpus": True})
    gpus = [gpu.strip() for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()]
    names = gpus[:devices] if len(gpus) >= devices else list(map(str, range(devices)))
    groups = [",".join(names[first : first + shards]) for first in range(0, devices, shards)]
    placed = {"replicas": replicas, "visible_gpus": ";".join(groups), "shares_gpus": True}
    return replaced(cfg, {f"rollout.engine.{key}": value for key, value in placed.items()})


def fits(cfg: RunConfig, size: int) -> bool:
    """Tells whether the run fits devices of `size` bytes under any choice of its "auto" settings."""
    cfg = on_a_gpu(with_engines(cfg))
    return search(cfg, size, automatic(cfg, size)) is not None


def smaller(cfg: RunConfig, size: int) -> dict[str, Any] | None:
    """Finds the cheapest settings, by dotted field, under which the run fits; None: no settings fit.

    An engine is spread over several GPUs where no other settings fit.
    """
    found = _smaller(cfg, size)
    return None if found is None else found.settings


@dataclasses.dataclass(frozen=True)
class _Remedy:
    """Settings under which a run fits, and the price of its step with them in seconds (`Cost.price`), estimated."""

    settings: dict[str, Any]
    price: float


def _smaller(cfg: RunConfig, size: int) -> _Remedy | None:
    """Finds what `smaller` returns, with its price."""
    given, cfg = cfg, on_a_gpu(with_engines(cfg))
    found = search(cfg, size, allowed(cfg, size))
    if found is None:
        wider = _wider(given)
        if wider is None:
            return None
        more = _smaller(replaced(given, wider), size)
        return None if more is None else _Remedy(wider | more.settings, more.price)
    changed = {key: value for key, value in found[0].settings.items() if _at(cfg, key) not in (value, "auto")}
    engine = cfg.rollout.engine
    if isinstance(engine, VllmConfig) and "rollout.engine.kv_cache_gb" in found[0].settings:
        # The plan sizes the engine by itself then, and chooses how versions are staged, but keeps a given transport.
        planned = {key for key in changed if key.startswith("rollout.engine.") and key != _TRANSPORT}
        changed = {key: value for key, value in changed.items() if key not in planned}
        changed |= {} if engine.memory == "auto" else {"rollout.engine.memory": "auto"}
    for key in list(changed):  # a choice of several settings may hold some that are not needed
        rest = {other: value for other, value in changed.items() if key not in (other, _NEEDED_BY.get(other))}
        less = _valid(cfg, Choice(settings=rest))
        if key not in _NEEDED_BY and less is not None and fits(less, size):
            changed = rest
    return _Remedy(changed, costs.step_seconds(cfg) + found[0].cost.price)


def _wider(cfg: RunConfig) -> dict[str, Any] | None:
    """Settings of an engine over twice as many of the learner's GPUs; None: there are too few, or the model's heads."""
    engine, model = cfg.rollout.engine, models.read_config(cfg.model.path)
    if not isinstance(engine, VllmConfig) or engine.replicas or engine.visible_gpus or engine.endpoints:
        return None
    shards = 2 * engine.tensor_parallel_size
    settings: dict[str, Any] = {"rollout.engine.tensor_parallel_size": shards}
    settings |= {} if engine.memory == "auto" else {"rollout.engine.memory": "auto"}
    try:
        wider = replaced(cfg, settings)
        check_model(wider.rollout.engine, model)
        placed = with_engines(wider)
    except UserError:
        return None
    return settings if placed.rollout.engine.replicas else None


_ROWS = "train.micro_batch_rows"
_MOST_ROWS = 8  # of a micro-batch on each device
_ROOM = 0.8  # of a KV cache in the next larger one; with halves up to half of the memory that is left lay idle
_TRANSPORT = "rollout.engine.transport"
_NEEDED_BY = {"optimizer.master_rounding": "model.param_dtype"}  # saves nothing, and goes with what does


def refusal(cfg: RunConfig, size: int) -> UserError:
    """Returns the error of a run that does not fit: the missing memory, and overrides that make it fit.

    Of settings on all devices and on fewer, the cheaper ones are named.
    """
    placed = on_a_gpu(with_engines(cfg))
    plans = [plan for _, plan in _plans(placed, size, automatic(placed, size))]
    found = [remedy for remedy in (_smaller(cfg, size), _on_fewer(cfg, size)) if remedy is not None]
    if not found:
        advice = "No settings fit: use larger devices, more of them (mesh.fsdp), or a smaller model."
    else:
        overrides = min(found, key=lambda remedy: remedy.price).settings
        advice = f"It fits with: {' '.join(words(overrides))}"
        if "mesh.fsdp" in overrides:
            advice = f"{_undivided(cfg)[0].capitalize()}. {advice}"
        else:
            _, plan = settle(replaced(cfg, overrides), size)
            assert plan is not None
            advice = f"Smaller settings take {plan.taken / GIB:.1f} GiB of it. {advice}"
    missing = min(plans, key=lambda plan: plan.missing).words()
    return UserError(f"This run does not fit the device: {missing}", advice, ". ")


def _on_fewer(cfg: RunConfig, size: int) -> _Remedy | None:
    """Finds settings on fewer devices, if the weights divide over these alone; None: they do not, or nothing fits."""
    least = _divisor(cfg)
    if least == cfg.mesh.fsdp:
        return None
    settings = {"mesh.fsdp": least}
    if cfg.train.micro_batch_rows != "auto":
        settings[_ROWS] = max(1, cfg.micro_batch_rows // (least * cfg.mesh.data)) * least * cfg.mesh.data
    train = dataclasses.replace(cfg.train, micro_batch_rows=settings.get(_ROWS, "auto"))
    with contextlib.suppress(UserError):  # engines on GPUs that the config names may not go with fewer
        fewer = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, fsdp=least), train=train)
        if (rest := _smaller(fewer, size)) is not None:
            return _Remedy(settings | rest.settings, rest.price)
    return None


def _divisor(cfg: RunConfig) -> int:
    """The largest power of two in mesh.fsdp if so few devices hold fewer bytes of the masters each; else mesh.fsdp."""
    count = cfg.mesh.fsdp
    fewer = 1 << (count.bit_length() - 1)
    if cfg.distributed.is_on or fewer >= count:
        return count
    params = learner.shapes(on_a_gpu(cfg)).params
    rows = dataclasses.replace(cfg.train, micro_batch_rows=cfg.mesh.data * count * fewer)
    own, less = (
        learner.nbytes(params, learner.planned_mesh(dataclasses.replace(cfg, train=rows, mesh=mesh)))
        for mesh in (cfg.mesh, dataclasses.replace(cfg.mesh, fsdp=fewer))
    )
    return fewer if less < own else count


def _undivided(cfg: RunConfig) -> list[str]:
    """A clause for a mesh.fsdp over which few of the weights divide; empty if they divide."""
    count, fewer = cfg.mesh.fsdp, _divisor(cfg)
    return [f"weights divide over {fewer} devices (mesh.fsdp={fewer}), and few over {count}"] if fewer < count else []


def _at(cfg: Any, path: str) -> Any:
    """The value of a dotted field."""
    return functools.reduce(getattr, path.split("."), cfg)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def words(settings: Mapping[str, Any]) -> list[str]:
    """Formats settings as overrides, "field=value"."""
    return [f"{key}={_word(value)}" for key, value in settings.items()]


# ---- the search ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Knobs:
    """The knobs (groups of alternative settings) of learner and engine, for one layout of the mesh."""

    learner: list[Knob]
    engine: list[Knob]


def search(cfg: RunConfig, size: int, knobs: Knobs) -> tuple[Choice, Plan] | None:
    """Finds the cheapest combination of all knobs that fits; None: none does."""
    if all(plan is None or plan.missing for plan in _least(cfg, size, knobs)):
        return None
    return next(((choice, plan) for choice, plan in _plans(cfg, size, knobs) if not plan.missing), None)


def _least(cfg: RunConfig, size: int, knobs: Knobs) -> Iterator[Plan | None]:
    """Yields plans of the choices that take the least memory: where none of them fits, nothing does.

    Of three choices or more this is the last. Of two it may be either: a state on the host visits the device in whole
    groups, and masters are rounded for bfloat16 gradients. Of rows it is the first or the last: a single micro-batch
    needs no accumulator.
    """
    ours = ([knob[0], knob[-1]] if len(knob) == 2 or _ROWS in knob[0].settings else knob[-1:] for knob in knobs.learner)
    for choice in _combined([*ours, *(knob[-1:] for knob in knobs.engine)]):
        changed = _valid(cfg, choice)
        yield None if changed is None else make(changed, size)


def _plans(cfg: RunConfig, size: int, knobs: Knobs) -> Iterator[tuple[Choice, Plan]]:
    """Yields every combination with its plan, from the cheapest. Each side's bytes are counted once."""
    ours, theirs = list(_combined(knobs.learner)), list(_combined(knobs.engine))
    learners: dict[int, dict[str, int] | None] = {}
    engines: dict[int, Plan | None] = {}
    pairs = itertools.product(range(len(ours)), range(len(theirs)))
    for i, j in sorted(pairs, key=lambda pair: (ours[pair[0]].cost + theirs[pair[1]].cost).price):
        if i not in learners:
            changed = _valid(cfg, ours[i])
            learners[i] = None if changed is None else learner.parts(on_a_gpu(changed), per_device=True)
        if j not in engines:
            changed = _valid(cfg, ours[0] + theirs[j])  # no field is auto
            engines[j] = None if changed is None else make(changed, size, {})
        parts, plan = learners[i], engines[j]
        if parts is not None and plan is not None:
            yield ours[i] + theirs[j], dataclasses.replace(plan, learner=parts)


def _combined(knobs: Iterable[Knob]) -> Iterator[Choice]:
    for choices in itertools.product(*knobs):
        yield sum(choices, start=Choice(settings={}))


def _valid(cfg: RunConfig, choice: Choice) -> RunConfig | None:
    """The run under a choice; None: the settings do not go with the rest of the run."""
    try:
        return replaced(cfg, choice.settings)
    except UserError:
        return None


# ---- the knobs -------------------------------------------------------------------------------------------------------


def automatic(cfg: RunConfig, size: int) -> Knobs:
    """Returns the knobs of the settings that the run leaves at "auto"."""
    ours = []
    if cfg.model.remat == "auto":
        ours.append(_remat(cfg))
    if cfg.optimizer.offload == "auto":
        ours.append(_offload(cfg, "optimizer"))
    if cfg.critic is not None and cfg.critic.optimizer.offload == "auto":
        ours.append(_offload(cfg, "critic's optimizer"))
    if cfg.train.grad_dtype == "auto":
        ours.append(_grad_dtype())
    if cfg.train.micro_batch_rows == "auto":
        ours.append(_rows(cfg))
    engine = cfg.rollout.engine
    if not isinstance(engine, VllmConfig) or engine.memory != "auto":
        return Knobs(ours, [])
    staging, given = _staging(cfg), engine.transport
    if given != "auto":  # it stays, or the run is refused
        staging = [choice for choice in staging if choice.settings.get(_TRANSPORT, given) == given]
    return Knobs(ours, [_cache(cfg, size), staging])


def allowed(cfg: RunConfig, size: int) -> Knobs:
    """Returns all knobs; the run's present settings cost nothing."""
    ours = [_remat(cfg), *(_offload(cfg, owner) for owner in learner.optimizer_states(cfg))]
    ours += [_rows(cfg), _code_flips(), _grad_dtype(), _moments(cfg), _masters()]
    theirs = []
    engine = cfg.rollout.engine
    if isinstance(engine, VllmConfig):
        cache = _cache(cfg, size)
        if engine.memory != "auto":
            cache = [Choice(settings={}), *(dataclasses.replace(c, cost=c.cost + Cost(seconds=0.01)) for c in cache)]
        theirs = [cache, _kept(cfg, _staging(cfg))]
    return Knobs([_kept(cfg, knob) for knob in ours], theirs)


def _kept(cfg: RunConfig, knob: Knob) -> Knob:
    """Prices a knob so that the run's own setting costs nothing and every other setting something."""
    own = next((c for c in knob if all(_at(cfg, key) == value for key, value in c.settings.items())), None)
    if own is None:  # it is left to the plan
        return knob
    least = Cost(seconds=0.01)
    return [dataclasses.replace(c, cost=Cost() if c is own else max(c.cost, least)) for c in knob]


def _remat(cfg: RunConfig) -> Knob:
    seconds = costs.remat_seconds(cfg)
    return [
        Choice(settings={"model.remat": policy}, cost=Cost(seconds=seconds[policy]))
        for policy in ("dots", "mixer", "attention", "full")
    ]


def _offload(cfg: RunConfig, owner: str) -> Knob:
    field = {"optimizer": "optimizer.offload", "critic's optimizer": "critic.optimizer.offload"}[owner]
    cost = Cost(seconds=costs.offload_seconds(cfg, owner))
    return [Choice(settings={field: False}), Choice(settings={field: True}, cost=cost)]


def _rows(cfg: RunConfig) -> Knob:
    """Rows of a micro-batch, as many on each device: those given or fewer; for auto, up to eight on each."""
    shards = max(1, cfg.mesh.data * cfg.mesh.fsdp)
    most = cfg.micro_batch_rows // shards
    if cfg.train.micro_batch_rows == "auto":
        most = 1 << min(_MOST_ROWS, max(1, costs.rows_of_an_update(cfg) // shards)).bit_length() - 1
    each = [{_ROWS: (most >> i) * shards} for i in range(most.bit_length())]
    seconds = [costs.micro_batch_seconds(replaced(cfg, rows)) for rows in each]
    return [Choice(settings=rows, cost=Cost(seconds=s - min(seconds))) for rows, s in zip(each, seconds, strict=True)]


def _code_flips() -> Knob:
    off = Choice(settings={"quant.code_flips": False}, notes=("the metric quant/code_flips is left out",))
    return [Choice(settings={"quant.code_flips": True}), off]


def _grad_dtype() -> Knob:
    full, half = {"train.grad_dtype": "float32"}, {"train.grad_dtype": "bfloat16"}
    return [Choice(settings=full), Choice(settings=half, cost=Cost(bits=1), notes=("gradients add up in bfloat16",))]


def _moments(cfg: RunConfig) -> Knob:
    names = [name for name in ("moment_dtype", "second_moment_dtype") if hasattr(cfg.optimizer, name)]
    return [
        Choice(settings={f"optimizer.{name}": dtype for name in names}, cost=Cost(bits=2 * i))
        for i, dtype in enumerate(("float32", "bfloat16", "int8"))
    ]


def _masters() -> Knob:
    half = Choice(
        settings={"model.param_dtype": "bfloat16", "optimizer.master_rounding": "stochastic"},
        cost=Cost(bits=8),
        notes=("masters are bfloat16, rounded stochastically",),
    )
    full = {"optimizer.master_rounding": "nearest", "model.param_dtype": "float32"}  # set in this order
    return [Choice(settings=full), half]


def _cache(cfg: RunConfig, size: int) -> Knob:
    """KV caches for a step's sequences of full length, or for fewer: vLLM queues, and preempts, what finds no room."""
    sequences = at_once(cfg)
    rooms = [sequences]
    while rooms[-1] > 1:
        rooms.append(int(rooms[-1] * _ROOM))
    return [
        Choice(
            settings=_sized(cfg, size, room),
            cost=Cost(seconds=costs.waiting_seconds(cfg, room)),
            notes=() if room >= sequences else (f"{room} of {sequences} sequences of full length at once",),
        )
        for room in rooms
    ]


def _sized(cfg: RunConfig, size: int, room: int) -> dict[str, Any]:
    """Settings of an engine with a KV cache for `room` sequences of full length, and vLLM's share of the GPU."""
    most = min(cfg.rollout.engine.max_num_seqs, max(8, 2 * room))
    cache = {"kv_cache_gb": math.ceil(kv_bytes(cfg, room) / GIB * 100) / 100, "max_num_seqs": most}
    settings = {f"rollout.engine.{key}": value for key, value in cache.items()} | {"rollout.engine.memory": "given"}
    parts = engine_parts(on_a_gpu(replaced(cfg, settings)))
    needed = sum(parts.values())
    if not cfg.rollout.engine.has_own_gpu:
        # vLLM refuses to start where less than this is free, and by then has its context, and JAX its own. Nothing else
        # depends on the number here, because the cache's size is given.
        needed -= parts["context (estimate)"]
    return settings | {"rollout.engine.gpu_memory_utilization": min(1.0, math.ceil(needed / size * 1000) / 1000)}


def _staging(cfg: RunConfig) -> Knob:
    engine = cfg.rollout.engine
    if not engine.stages_on_gpu or engine.has_own_gpu or learner.held_once(cfg):
        return [Choice(settings={})]
    if cfg.lora is not None:  # a buffer would hold the frozen base once more, for one publish
        note = "the base goes through host memory, once, as adapters do"
        kept = [Choice(settings={})] if engine.transport != "auto" else []
        return [*kept, Choice(settings={_TRANSPORT: "host"}, notes=(note,))]
    host = Choice(
        settings={_TRANSPORT: "host"},
        cost=Cost(seconds=costs.staging_seconds(cfg, None)),
        notes=("versions go through host memory",),
    )
    notes = ("versions go in chunks", "an engine that fails to load a version has none to go back to")
    return [
        Choice(
            settings={"rollout.engine.staging_buffers": buffers},
            cost=Cost(seconds=costs.staging_seconds(cfg, buffers) + 0.01 * (2 - buffers)),
            notes=notes[buffers : buffers + 1] if buffers < 2 else (),
        )
        for buffers in range(engine.staging_buffers, -1 + cfg.distributed.is_on, -1)
    ] + [host]
