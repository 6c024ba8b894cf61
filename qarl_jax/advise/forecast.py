# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Forecasts a run's step under every scheme: seconds by phase, memory, mismatch, and whether low bits pay.

    schemes = of_schemes(cfg, MACHINES["h200"])      # {"bf16": Forecast, "w8a8": Forecast, ...}

`RATES` are fitted to recorded steps by `python -m benchmarks.forecast`; docs/operations/advise.md has the steps beside
their forecasts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from qarl_jax import quant
from qarl_jax.advise import counts
from qarl_jax.advise.counts import Terms
from qarl_jax.advise.machines import MACHINES, Machine
from qarl_jax.memory import choose, learner
from qarl_jax.memory.engine import kv_bytes
from qarl_jax.memory.learner import GIB
from qarl_jax.memory.plan import Plan
from qarl_jax.rollout.vllm.config import Config as VllmConfig
from qarl_jax.run.config import RunConfig, on_a_gpu, replaced
from qarl_jax.types import UserError
from qarl_jax.verify import alignment

# Factors of the terms of `counts`: of a time at the roofline, or seconds of a count.
RATES: dict[str, float] = {
    "attention": 1,
    "decode": 0.21,
    "exchange": 2,
    "grouped": 1,
    "layer": 7e-05,
    "micro_batch": 5e-05,
    "offload": 1,
    "orthogonalize": 1.6,
    "other": 0.44,
    "prefill": 1,
    "product": 1.6,
    "publish_chunked": 2.5,
    "publish_host": 0.95,
    "publish_staged": 2.4,
    "read": 1,
    "read_experts": 0.8,
    "routed_layer": 3.3e-05,
    "sequence": 1.9e-05,
    "stream": 1,
    "stream_gradients": 4,
    "stream_iterates": 1.7,
    "stream_optimizer": 7.6,
}
ERRORS = {"dense": 0.05, "MoE": 0.08}
"""Mean relative error of whole steps, each forecast without the steps of its model, machine and number of GPUs."""
ADAPTERS_ERROR = 0.22
"""Mean relative error of whole steps with adapters, to which no rate is fitted."""
MOST_SEQUENCES = 4096
SMALL = 1.2e9  # parameters, below which a host's work is most of a step


def seconds(terms: Mapping[str, Terms], rates: Mapping[str, float]) -> dict[str, float]:
    """Returns the seconds of each phase: the sum of its terms times their rates (1 for a term without a rate)."""
    return {
        phase: sum(value * rates.get(name, 1.0) for name, value in counted.items()) for phase, counted in terms.items()
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """The forecast of a run's step under one scheme.

    Attributes:
      cfg: the run, every "auto" settled.
      saved: overrides that make the run fit the device; empty: it fits without.
      plan: the plan of a device's memory.
      seconds: seconds of a step by phase; empty: the run is impossible.
      stops_paying: the least number of sequences of an engine at which a decoded token takes as long as in bf16; None:
        it never does, or the scheme is bf16.
      k3: expected mismatch of an aligned learner; k3_bf16: of a bf16 learner. None: not measured.
      problem: why the run is impossible; "": it is not.
      mean_len: mean tokens of a response; 0: all have the most.
      measured: the scheme whose steps were measured here and corrected to give `seconds`; "": nothing was measured.
    """

    cfg: RunConfig
    saved: tuple[str, ...] = ()
    plan: Plan | None = None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    stops_paying: int | None = None
    k3: float | None = None
    k3_bf16: float | None = None
    problem: str = ""
    measured: str = ""
    mean_len: float = 0.0

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def responses(self) -> int:
        """Number of responses of a step."""
        return self.cfg.train.prompts_per_step * self.cfg.rollout.num_samples_per_prompt

    @property
    def tokens_per_s(self) -> float:
        """Response tokens of a step over its seconds."""
        return self.responses * (self.mean_len or self.cfg.rollout.max_response_len) / self.step

    @property
    def cached(self) -> tuple[int, int]:
        """Full-length sequences that fit an engine's KV cache, and sequences that an engine gets in a step."""
        engine, most = self.cfg.rollout.engine, -(-self.responses // counts.engines(self.cfg))
        if not isinstance(engine, VllmConfig) or not engine.kv_cache_gb:
            return most, most
        return min(most, int(engine.kv_cache_gb * GIB / kv_bytes(self.cfg, 1))), most

    @property
    def gib(self) -> float:
        """GiB of a device that the run takes."""
        return 0.0 if self.plan is None else self.plan.taken / GIB


def of_schemes(cfg: RunConfig, machine: Machine, mean_len: float = 0.0) -> dict[str, Forecast]:
    """Forecasts a run under every registered scheme, in learner and sampler alike.

    Args:
      cfg: the run; its own schemes do not count.
      mean_len: mean tokens of a response; 0: all have the most.
    """
    out: dict[str, Forecast] = {}
    for name in quant.scheme_names():
        changed = replaced(cfg, {"quant.forward": name, "quant.rollout": None})
        try:
            out[name] = of_run(changed, machine, mean_len)
        except UserError as error:
            out[name] = Forecast(cfg=changed, problem=str(error))
    return {
        name: dataclasses.replace(one, stops_paying=stops_paying(one.cfg, out["bf16"].cfg, machine))
        if name != "bf16" and not one.problem and not out["bf16"].problem
        else one
        for name, one in out.items()
    }


def of_run(cfg: RunConfig, machine: Machine, mean_len: float = 0.0) -> Forecast:
    """Forecasts one run, with the cheapest settings that fit where its own do not.

    Raises:
      UserError: no settings fit, or the scheme does not suit the model or the engine.
    """
    cfg, saved = on_a_gpu(choose.with_engines(cfg)), []
    if not choose.fits(cfg, machine.size):
        found = choose.smaller(cfg, machine.size)
        if found is None:
            raise UserError(f"no settings fit {machine.size / GIB:.1f} GiB; use larger devices, or more of them")
        cfg, saved = replaced(cfg, found), choose.words(found)
    cfg, plan = choose.settle(cfg, machine.size)
    scheme = quant.parse_scheme(cfg.quant.forward)
    return Forecast(
        cfg=cfg,
        saved=tuple(saved),
        plan=plan,
        seconds=seconds(counts.of_step(cfg, machine, mean_len), RATES),
        mean_len=mean_len,
        k3=alignment.of_run(cfg).known_k3,
        k3_bf16=0.0 if scheme is None else scheme.baseline_k3,
    )


def error_of(cfg: RunConfig) -> float:
    """Returns the mean relative error of forecasts of runs like this one: of adapters, a dense or a MoE model."""
    if cfg.lora is not None:
        return ADAPTERS_ERROR
    return ERRORS["dense" if learner.model_of(cfg).moe is None else "MoE"]


def all_counted(cfg: RunConfig) -> bool:
    """Tells whether a forecast has all passes of a run: those of a critic and of a reference policy are left out."""
    return cfg.critic is None and not cfg.kl.coef


def line(cfg: RunConfig, size: int) -> str | None:
    """Describes the time of a settled run's step by phase; None: no GPU of `MACHINES` has about `size` bytes."""
    gpus = [machine for machine in MACHINES.values() if "TPU" not in machine.kind]
    machine = next((machine for machine in gpus if abs(machine.size - size) < 0.03 * machine.size), None)
    if machine is None or not isinstance(cfg.rollout.engine, VllmConfig):
        return None
    phases = seconds(counts.of_step(on_a_gpu(cfg), machine), RATES)
    names = {"rollout": "sampling", "old_logprobs": "scoring", "update": "update", "publish": "publish"}
    total = sum(phases.values())
    unit, each = ("min", 60.0) if total >= 600 else ("s", 1.0)
    parts = ", ".join(f"{said} {phases[phase] / each:.1f}" for phase, said in names.items())
    how = f"+-{error_of(cfg):.0%}" if machine.is_measured else "by the vendor's peaks, not measured"
    how = how if all_counted(cfg) else "without the passes of critic and reference"
    total = float(f"{total / each:.2g}")  # more digits than its error allows would change with every fit
    return f"{total:.0f} {unit} on {machine.kind} (forecast, {how}) if all responses are full: {parts}"


def stops_paying(cfg: RunConfig, bf16: RunConfig, machine: Machine) -> int | None:
    """Finds the least number of sequences at which a scheme decodes no faster than bf16; None: none up to 4,096."""
    pair = [(learner.model_of(one), counts.weights_of(one, rollout=True)) for one in (cfg, bf16)]
    context = cfg.data.prompt_limit + cfg.rollout.max_response_len / 2

    def gain(sequences: int) -> float:
        low, high = (
            seconds({"": counts.token(model, machine, sequences, context, weights)}, RATES)[""]
            for model, weights in pair
        )
        return high / low

    return next((n for n in range(1, MOST_SEQUENCES + 1) if gain(n) <= 1.0), None)


def unknown(forecasts: Mapping[str, Forecast], machine: Machine) -> list[str]:
    """Lists, as sentences, the assumptions of the forecasts that were not measured."""
    cfg = next(iter(forecasts.values())).cfg
    lines = ["rewards and data are counted at no time"]
    if not next(iter(forecasts.values())).mean_len:
        lines.append("responses are counted at their full length; --mean-len says how long they are")
    if learner.parameters(cfg) < SMALL:
        lines.append("steps of real policies of 0.5B parameters took 1.3 to 1.9 times their forecasts")
    measured = {one.measured for one in forecasts.values()} - {""}
    if measured:
        timed = ", ".join(name for name, one in forecasts.items() if one.measured and name not in measured)
        lines.append(
            f"steps of {', '.join(measured)} were measured here; of {timed} its products were; others go by both"
        )
    elif machine.name == "cpu":
        lines.append(
            "no step was measured on this CPU: its memory and products were timed, the rest is a GPU's; --measure"
        )
    elif not machine.is_measured:
        lines.append(f"no step was measured on {machine.name}: its peaks are the vendor's, the shares of them Hopper's")
    if not all_counted(cfg):
        lines.append("the passes of a critic and of a reference policy are not counted")
    if not measured and not isinstance(cfg.rollout.engine, VllmConfig):
        lines.append("the embedded sampler is taken for a vLLM, whose rates are measured")
    schemes = {name: quant.parse_scheme(name) for name, one in forecasts.items() if one.seconds and not one.measured}
    missing: dict[str, list[str]] = {}
    for name, scheme in schemes.items():
        if scheme is not None and scheme.kernel and scheme.kernel not in machine.low_bit:
            missing.setdefault(scheme.kernel, []).append(name)
    lines += [
        f"{', '.join(names)}: a {machine.name} has no products of {kernel}; bfloat16's speed is taken"
        for kernel, names in missing.items()
    ]
    never = [name for name, scheme in schemes.items() if scheme is not None and forecasts[name].k3_bf16 is None]
    if never:
        lines.append(f"{', '.join(never)}: the mismatch of a bf16 learner was not measured on a GPU")
    return lines
