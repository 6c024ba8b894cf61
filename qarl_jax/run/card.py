# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One memory plan for a card that learner and engine share, made before anything is loaded, and then kept.

    cfg, made = settle(cfg, card_bytes())     # "auto" settings chosen; UserError where nothing of it fits
    made.keep()                               # before JAX asks for its devices: its allocator takes its share at once

A card holds, side by side: what the learner needs at the fullest moment of an update (`memory_plan.parts`), two staged
versions where weights are published from the card, and the engine: its weights, its KV cache, the activations of its
largest step, its CUDA graphs. Each of the two processes also has a CUDA context, which lies in nobody's allocator.

JAX's own way of sharing a card is to take memory as it needs it. Its pool then grows in steps that double, and gives
nothing back, so that a cast of one gigabyte can ask for all that is left under JAX's limit, which the engine holds. So
the learner's share is one region, taken at the start; what lies outside of it is the engine's.

What is an estimate here: the engine's activations and graphs, and the contexts. Everything else is counted from shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

from qarl_bridge.client import sender
from qarl_bridge.protocol.messages import BridgeError

from qarl_jax import models
from qarl_jax.rollout.vllm import engine as vllm
from qarl_jax.run import memory_plan
from qarl_jax.run.config import RunConfig
from qarl_jax.types import UserError

GIB = 2.0**30
FRACTION, PREALLOCATE = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"
# Bytes, estimates for a Hopper GPU: a process's CUDA context with its programs and its libraries' workspaces, JAX's and
# vLLM's. JAX's was 1.6 GiB at a mixture and 2.5 over two cards when vLLM asked what is free.
JAX_CONTEXT, ENGINE_CONTEXT = 1.7 * GIB, 1.5 * GIB
COLLECTIVES = 1.0 * GIB  # NCCL's buffers, where the learner is spread over several cards
GRAPHS = 1.5 * GIB  # of all captured batch sizes together; they share one pool
STEP_TOKENS = 16384  # most tokens of an engine's step (vLLM's max_num_batched_tokens on a large card, or fewer)
MOST = 0.92  # of a card, for a learner that has it to itself: NCCL's buffers and other programs lie beside it
FREE = 0.1  # of the learner's share: compiled programs and fragmentation, as `memory_plan.with_remat` has it
BLOCK = 16  # tokens of a block of the KV cache


def card_bytes() -> int | None:
    """Memory of the first GPU, which the learner will run on; None: it will not run on one. JAX is not asked."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return None
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        return None
    try:
        return sender.gpu_memory(0)[1]
    except BridgeError:
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CardPlan:
    """Who holds how many bytes of the learner's card, or of each where it is spread over several.

    Attributes:
      card: all of it.
      learner: parts of an update, `memory_plan.parts`.
      staging: two published versions, one, a window for parts of one, or nothing.
      engine: the parts of an engine on this card; empty: it is elsewhere, or embedded in the learner.
      reserved: what is left to the engine: its parts, or `gpu_memory_utilization` of the card, where that is more
        (vLLM refuses to start if less is free); without `kv_cache_gb` that and its CUDA graphs.
      apart: bytes and parts of an engine on a card of its own, against the same size of card; None: there is none.
      cards: how many the learner is spread over. The plan is that of a card with an engine.
      engines: how many of them have one.
      allowed: of the card, the most that JAX may take; less than all where the user has set it (several runs a card).
    """

    card: int
    learner: dict[str, int]
    staging: int
    engine: dict[str, int]
    reserved: int
    apart: tuple[int, dict[str, int]] | None = None
    cards: int = 1
    engines: int = 1
    allowed: float = MOST

    @property
    def context(self) -> int:
        """Of JAX on a card, outside of its pool."""
        return int(JAX_CONTEXT + (COLLECTIVES if self.cards > 1 else 0))

    @property
    def needed(self) -> int:
        """Bytes of the learner's share, with the part left free."""
        return math.ceil(sum(self.learner.values()) / (1 - FREE))

    @property
    def available(self) -> int:
        """Bytes that the learner can have."""
        return int(min(self.card - self.reserved - self.staging - self.context, self.allowed * self.card))

    @property
    def taken(self) -> int:
        """Bytes that the run takes of the card."""
        return self.needed + self.reserved + self.staging + self.context

    @property
    def missing(self) -> int:
        """Bytes by which it does not fit; 0: it fits."""
        short = self.needed - self.available
        if self.engine:
            short = max(short, sum(self.engine.values()) - self.reserved)
        if self.apart is not None:
            short = max(short, sum(self.apart[1].values()) - self.apart[0])
        return max(0, short)

    @property
    def fraction(self) -> float:
        """Of the card, what JAX takes at once."""
        return math.floor(self.available / self.card * 1000 + 1e-3) / 1000  # of what was given in thousandths, all

    def keep(self) -> None:
        """Tell JAX's allocator. Call before JAX is asked for its devices; what the user has set stays."""
        if FRACTION not in os.environ and PREALLOCATE not in os.environ:
            os.environ[FRACTION], os.environ[PREALLOCATE] = f"{self.fraction:.3f}", "true"

    def words(self) -> str:
        """What is missing, in one sentence."""
        there = self.engine if self.apart is None else self.apart[1]
        engine = f", engine {sum(there.values()) / GIB:.1f}" if there else ""
        where = "" if self.apart is None else f" on a card of its own, of which it may use {self.apart[0] / GIB:.1f}"
        there_are = f"{self.card / GIB:.1f} there are"
        if self.allowed < MOST and self.available == int(self.allowed * self.card):
            there_are = f"{self.available / GIB:.1f} that {FRACTION}={self.allowed:g} lets JAX take"
        return (
            f"it needs {self.missing / GIB:.1f} GiB more than the {there_are} (learner "
            f"{self.needed / GIB:.1f}, staging {self.staging / GIB:.1f}{engine}{where})"
        )

    def lines(self) -> list[str]:
        """The plan for people."""
        rows = [(f"learner: {name}", size) for name, size in self.learner.items()]
        rows += [("learner: left free", self.needed - sum(self.learner.values())), ("JAX's context", self.context)]
        rows += [("staging (published versions)", self.staging)]
        rows += [(f"engine: {name}", size) for name, size in self.engine.items()]
        rows += [("engine: reserved beyond", self.reserved - sum(self.engine.values()))] if self.engine else []
        verdict = f"{self.missing / GIB:.1f} GiB too much" if self.missing else "fits"
        lines = [f"card         {self.card / GIB:.1f} GiB: {verdict}; JAX takes {self.fraction:.1%} of it at once"]
        if self.cards > 1:
            few = f"an engine on {self.engines}, whose plan this is"
            has = "no engine on them" if not self.engine else few if self.engines < self.cards else "an engine on each"
            lines[0] += f"\n             {self.cards} such cards, {has}"
        lines += [f"  {name:<32}{size / GIB:9.2f} GiB" for name, size in rows if size]
        if self.apart is not None:
            lines.append(f"  on the engine's card, of {self.apart[0] / GIB:.1f} GiB that it may use:")
            lines += [f"  {name:<32}{size / GIB:9.2f} GiB" for name, size in self.apart[1].items()]
        return lines


def make(cfg: RunConfig, card: int) -> CardPlan:
    """The plan of a run on a card of that many bytes. Reads no weights, makes no array, asks JAX for no device."""
    cfg = on_a_gpu(cfg)
    learner = dict(_parts(_relevant(cfg)))
    cards = math.prod(memory_plan.planned_mesh(cfg).shape.values())
    allowed = min(MOST, memory_plan.learner_share(MOST))
    plan = CardPlan(
        card=card, learner=learner, staging=0, engine={}, reserved=0, cards=cards, engines=0, allowed=allowed
    )
    engine = cfg.rollout.engine
    if not isinstance(engine, vllm.Config):
        return plan
    staging = 0
    if engine.stages_on_gpu:
        staging = engine.staging_buffers * _published(_relevant(cfg)) or _window(_relevant(cfg))
    own = engine_parts(cfg)
    share = int(engine.gpu_memory_utilization * card)
    plan = dataclasses.replace(plan, staging=staging)
    if engine.has_own_gpu:
        there = own | ({"staging (published versions)": staging} if staging else {})
        return dataclasses.replace(plan, apart=(share, there))
    # A cache of no given size fills the share, and vLLM captures its graphs after that.
    reserved = max(sum(own.values()), share) if engine.kv_cache_gb else share + own["CUDA graphs (estimate)"]
    return dataclasses.replace(plan, engine=own, reserved=reserved, engines=engine.started)


def kv_bytes(cfg: RunConfig, sequences: int) -> int:
    """Of the KV cache of that many sequences at their full length, bfloat16."""
    model = _model(cfg)
    engine = cfg.rollout.engine
    assert isinstance(engine, vllm.Config)
    length = cfg.data.max_prompt_len + cfg.rollout.max_response_len
    if engine.max_model_len:
        length = min(length, engine.max_model_len)
    blocks = -(-length // BLOCK)
    return sequences * blocks * BLOCK * model.num_layers * 2 * model.num_kv_heads * model.head_dim * 2


def at_once(cfg: RunConfig) -> int:
    """Most sequences that the engine decodes together."""
    engine = cfg.rollout.engine
    assert isinstance(engine, vllm.Config)
    return min(engine.max_num_seqs, cfg.train.prompts_per_step * cfg.rollout.num_samples_per_prompt)


def engine_parts(cfg: RunConfig) -> dict[str, int]:
    """Bytes of a vLLM on a GPU. Without `kv_cache_gb` its KV cache is what is left; one sequence is the least."""
    engine, model = cfg.rollout.engine, _model(cfg)
    assert isinstance(engine, vllm.Config)
    inner = model.intermediate_size
    if model.moe is not None:
        inner = max(inner, model.moe.intermediate_size * model.moe.num_experts_per_tok)
    logits = engine.max_num_seqs * model.vocab_size * 4
    contract = engine.kernels == "contract" and engine.execution != "compiled"
    return {
        "weights": _published(_relevant(cfg)),
        "int4 layers as multiplied": _int4_copies(_relevant(cfg))[engine.int4_kernel] if contract else 0,
        "KV cache": int(engine.kv_cache_gb * GIB) if engine.kv_cache_gb else kv_bytes(cfg, 1),
        # Of a step: gate, up and their product, six residuals; and five float32 copies of all sequences' logits.
        "activations (estimate)": STEP_TOKENS * (4 * inner + 6 * model.hidden_size) * 2 + 5 * logits,
        "CUDA graphs (estimate)": 0 if engine.execution == "eager" else int(GRAPHS),
        "context (estimate)": int(ENGINE_CONTEXT),
    }


# ---- choosing --------------------------------------------------------------------------------------------------------


def settle(cfg: RunConfig, card: int | None) -> tuple[RunConfig, CardPlan | None]:
    """The run with every "auto" of its memory replaced, and the plan it fits.

    `model.remat`, `optimizer.offload` and `rollout.engine.memory` may be auto: the first choice that fits, from the
    fastest. Without a card (the learner runs on a CPU or a TPU) nothing is planned, and offload is false.

    Args:
      card: `card_bytes()`.

    Raises:
      UserError: it does not fit; the sentence names settings that do, if any were found.
    """
    if card is None:
        return _set(cfg, {"optimizer.offload": False} if cfg.optimizer.offload == "auto" else {}), None
    choice, made = _best(cfg, card)
    if not made.missing:
        return choice, made
    raise UserError(f"This run does not fit the card: {made.words()}. {advice(cfg, card)}")


def fits(cfg: RunConfig, card: int) -> bool:
    """Whether any choice of its "auto"s fits the card."""
    return not _best(cfg, card)[1].missing


def _best(cfg: RunConfig, card: int) -> tuple[RunConfig, CardPlan]:
    """The first choice of its "auto"s that fits, and its plan; where none does, the one that lacks least."""
    best: tuple[RunConfig, CardPlan] | None = None
    for choice in _choices(cfg, card):
        made = make(choice, card)
        if best is None or made.missing < best[1].missing:
            best = choice, made
        if not made.missing:
            break
    assert best is not None
    return best


def advice(cfg: RunConfig, card: int) -> str:
    """Overrides under which the run fits, and what it then takes of the card."""
    found = _saved(cfg, card)
    if found is None:
        return "No settings were found that fit: use a larger card, a smaller model, or more of them (mesh.fsdp)."
    taken = _best(_set(cfg, found), card)[1].taken
    return f"Smaller settings take {taken / GIB:.1f} GiB of it. It fits with: {' '.join(_words(found))}"


def savings(cfg: RunConfig, card: int) -> list[str] | None:
    """As few overrides as were found to be enough, of the known ways to save memory; None: all are not enough."""
    found = _saved(cfg, card)
    return None if found is None else _words(found)


def _saved(cfg: RunConfig, card: int) -> dict[str, Any] | None:
    taken: list[dict[str, Any]] = []
    best = cfg
    for change in _savings(cfg):
        try:
            changed = _set(cfg, _merged([*taken, change]))
        except UserError:  # it does not go with the rest of the run
            continue
        if (
            _best(changed, card)[1].missing > _best(best, card)[1].missing
        ):  # several micro-batches add up their gradients
            continue
        best = changed
        taken.append(change)
        if fits(best, card):
            break
    else:
        return None
    for change in list(taken[:-1]):  # what is not needed after all
        rest = [x for x in taken if x is not change]
        if fits(_set(cfg, _merged(rest)), card):
            taken = rest
    return _merged(taken)


def _choices(cfg: RunConfig, card: int) -> Iterator[RunConfig]:
    """The run with its "auto"s replaced, from the fastest to the smallest.

    A cache for a quarter of the sequences makes them wait for each other: on an H100 it quadrupled the rollout of a 4B
    model, 4.1 to 18 s, where moments on the host took no time that could be measured (6.1 s of updates with and without
    them; benchmarks/results/zero_mismatch_4b_h100.json). So the cache is the last thing that gives way.
    """
    remats = ("dots", "mixer", "attention", "full") if cfg.model.remat == "auto" else (cfg.model.remat,)
    offloads = (False, True) if cfg.optimizer.offload == "auto" else (cfg.optimizer.offload,)
    engine = cfg.rollout.engine
    shares: tuple[float, ...] = (0.0,)
    if isinstance(engine, vllm.Config):
        shares = (1.0, 0.5, 0.25) if engine.memory == "auto" else shares
    for share, offload, remat in itertools.product(shares, offloads, remats):
        choice = _set(cfg, {"model.remat": remat, "optimizer.offload": offload})
        yield _set(choice, _engine_settings(choice, card, share)) if share else choice


def _engine_settings(cfg: RunConfig, card: int, share: float) -> dict[str, Any]:
    """`rollout.engine.memory=auto` in numbers: a KV cache for `share` of a step's sequences, and what vLLM needs."""
    cache = kv_bytes(cfg, max(1, math.ceil(share * at_once(cfg))))
    gigabytes = math.ceil(cache / GIB * 100) / 100
    sized = _set(cfg, {"rollout.engine.kv_cache_gb": gigabytes})
    parts = engine_parts(on_a_gpu(sized))
    needed = sum(parts.values())
    if not sized.rollout.engine.has_own_gpu:
        # vLLM refuses to start where less than this is free, and by then has its context, and JAX its own. Nothing else
        # depends on the number here, because the cache's size is given.
        needed -= parts["context (estimate)"]
    return {
        "rollout.engine.memory": "given",
        "rollout.engine.kv_cache_gb": gigabytes,
        "rollout.engine.gpu_memory_utilization": min(1.0, math.ceil(needed / card * 1000) / 1000),
    }


def _savings(cfg: RunConfig) -> Iterator[dict[str, Any]]:
    """Ways to save memory, those first that cost least."""
    engine = cfg.rollout.engine
    if isinstance(engine, vllm.Config) and engine.memory != "auto":
        yield {"rollout.engine.memory": "auto"}
    if cfg.model.remat != "full":
        yield {"model.remat": "full"}
    if cfg.train.grad_dtype == "float32" and cfg.model.dtype == "bfloat16":
        yield {"train.grad_dtype": "bfloat16"}
    rows = cfg.train.micro_batch_rows
    while rows > 1:
        rows //= 2
        yield {"train.micro_batch_rows": rows}
    if cfg.optimizer.offload is not True:
        yield {"optimizer.offload": True}
    if isinstance(engine, vllm.Config) and engine.stages_on_gpu and not engine.has_own_gpu:
        for buffers in range(engine.staging_buffers - 1, -1, -1):
            yield {"rollout.engine.staging_buffers": buffers}
        yield {"rollout.engine.transport": "host"}


# ---- the pieces ------------------------------------------------------------------------------------------------------


def _merged(changes: list[dict[str, Any]]) -> dict[str, Any]:
    return functools.reduce(lambda a, b: a | b, changes, {})


def _words(changes: dict[str, Any]) -> list[str]:
    """As overrides."""
    texts = {key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in changes.items()}
    return [f"{key}={text.lower() if isinstance(changes[key], bool) else text}" for key, text in texts.items()]


def _set(cfg: Any, changes: dict[str, Any]) -> Any:
    """A nested frozen dataclass with dotted fields replaced."""
    for path, value in changes.items():
        head, _, rest = path.partition(".")
        cfg = dataclasses.replace(cfg, **{head: _set(getattr(cfg, head), {rest: value}) if rest else value})
    return cfg


def on_a_gpu(cfg: RunConfig) -> RunConfig:
    """With `quant.engine=auto` resolved as on a GPU, without asking JAX whether it runs on one."""
    if cfg.quant.engine != "auto" or not isinstance(cfg.rollout.engine, vllm.Config):
        return cfg
    return _set(cfg, {"quant.engine": "cuda"})


def _cached(function: Callable[[RunConfig], Any]) -> Callable[[RunConfig], Any]:
    """By the config's text: it holds dicts."""
    kept: dict[str, Any] = {}

    @functools.wraps(function)
    def call(cfg: RunConfig) -> Any:
        key = repr(cfg)
        if key not in kept:
            kept[key] = function(cfg)
        return kept[key]

    return call


def _relevant(cfg: RunConfig) -> RunConfig:
    """Without what does not change the learner's bytes or a version's, so that these are counted once."""
    engine = cfg.rollout.engine
    if not isinstance(engine, vllm.Config):
        return cfg
    return _set(cfg, {"rollout.engine": vllm.Config()})


@_cached
def _parts(cfg: RunConfig) -> dict[str, int]:
    return memory_plan.parts(cfg, per_device=True)


@_cached
def _int4_copies(cfg: RunConfig) -> dict[str, int]:
    return memory_plan.int4_copies(_set(cfg, {"model.remat": "full"}))


@_cached
def _published(cfg: RunConfig) -> int:
    return memory_plan.published_bytes(_set(cfg, {"model.remat": "full"}))


@_cached
def _window(cfg: RunConfig) -> int:
    return memory_plan.window_bytes(_set(cfg, {"model.remat": "full"}))


def _model(cfg: RunConfig) -> models.ModelConfig:
    return models.read_config(cfg.model.path)
