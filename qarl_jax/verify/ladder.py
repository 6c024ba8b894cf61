# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.parity --model DIR --scheme w8a8 --engine cpu [--json]`: is the policy that learns the one that
samples? A ladder of comparisons between the learner and a live vLLM, one rung per line, from the tensors up:

    quantize           the forward's QTensors are what quantizing the bf16-rounded masters gives, bit for bit
    pack, unpack       the engine's tensors, unpacked, are those QTensors, bit for bit
    hash at load       every tensor hashed as it is handed to the engine's loader
    read-back          one-hot rows pushed through every live layer return the weight it really holds
    linear layers      live linear layers on the engine's own activations: first, middle and last block
    blocks             whole live blocks on the engine's own activations
    prefill            log-probs of a first token, which comes out of a prefill
    decode, prefill    inside the engine: each token of a greedy response, decoded and then prefilled again
    sampled tokens     log-probs of whole sampled responses

The first four are exact or broken, always. If learner and engine are aligned (`alignment.py`), the rest must be equal
to the last bit, with k3 (below) of 0. Otherwise the rest is measured and not promised, and the rung "alignment" says
why. Run the ladder on your own model before a long run.

The same samples are then scored by an unaligned learner (bf16, plain arithmetic), which is what quantized rollouts
usually meet, and which the aligned one must beat. With d = log p_learner - log p_engine over positions whose entropy
exceeds 0.5 nat (elsewhere everything agrees):

    k1 = mean(-d)      k3 = mean(exp(d) - 1 - d)  >= 0      both estimate KL(engine || learner) (J. Schulman, 2020)

In an MoE model the tokens are scored with the experts that the engine chose (`rollout.router_replay`), and once more
with the learner's choice. The two choices are equal where learner and engine are aligned.

The engine runs as in training: CUDA graphs on a GPU, op by op on a CPU (the ladder says which). `--eager` and
`--arithmetic vllm` compare others. Two questions of the same command stand apart: `--modes` in `modes.py`,
`--at RUN/first_mismatch.jsonl` in `first_mismatch.py`.

What is left out: single modules of a compiled engine (they are not called one by one), and top-p or top-k sampling.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from qarl_bridge.protocol import formats

from qarl_jax import models, quant
from qarl_jax.kernels.attention_vendor import flash3_lacks
from qarl_jax.models.logprobs import token_logprobs
from qarl_jax.models.params import united
from qarl_jax.quant import QTensor
from qarl_jax.rollout import PolicyWeights, SamplingConfig
from qarl_jax.rollout.vllm.engine import BrokenPromiseError, Config, VllmEngine, leave_memory_to_vllm
from qarl_jax.types import Completion, Prompt, UserError
from qarl_jax.verify import alignment, layers

ENTROPY_FLOOR = 0.5  # nat
_BATCH = 16  # rows scored at once


@dataclasses.dataclass(frozen=True)
class Sampled:
    """An engine's completions as padded arrays: everything a learner needs to score them.

    Attributes:
      tokens: [N, T] int32, prompt then response, padded with 0. segment_ids: [N, T] int32, 0 on padding.
      response: [N, T] bool. logprobs: [N, T] float32, the engine's, 0 outside responses.
      routed: [N, T, L, k] int16, the experts the engine sent each position to, -1 where not known; None: not recorded.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    response: np.ndarray
    logprobs: np.ndarray
    routed: np.ndarray | None = None

    @staticmethod
    def of(completions: Sequence[Completion]) -> Sampled:
        """Pads completions to the longest one, rounded up to a multiple of 32, so that few programs are compiled."""
        length = -(-max(len(c.prompt_tokens) + len(c.tokens) for c in completions) // 32) * 32
        shape = (len(completions), length)
        tokens, segment_ids = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        response, logprobs = np.zeros(shape, bool), np.zeros(shape, np.float32)
        for row, c in enumerate(completions):
            start, end = len(c.prompt_tokens), len(c.prompt_tokens) + len(c.tokens)
            tokens[row, :end] = (*c.prompt_tokens, *c.tokens)
            segment_ids[row, :end] = 1
            response[row, start:end] = True
            logprobs[row, start:end] = c.logprobs
        routed = None
        if completions[0].routed_experts is not None:
            routed = np.full((*shape, *completions[0].routed_experts.shape[1:]), -1, np.int16)
            for row, c in enumerate(completions):
                assert c.routed_experts is not None
                routed[row, : len(c.routed_experts)] = c.routed_experts
        return Sampled(tokens, segment_ids, response, logprobs, routed)


def load(
    path: str, scheme: Any, engine: str, attention: str = "engine", shards: int = 1, lora_rank: int = 0
) -> PolicyWeights:
    """Loads a model folder as a bf16 learner's weights under `scheme` (a name or rules), in the arithmetic of `engine`.

    shards: number of the engine's shards (`Numerics.shards`). lora_rank: rank of random adapters; 0: none.
    """
    if attention == "engine":
        head_dim = models.read_config(path).head_dim
        attention = "flash3" if engine == "cuda" and flash3_lacks(jnp.dtype("bfloat16"), head_dim) is None else "xla"
    model = models.load_hf(
        path, dtype="bfloat16", param_dtype="float32", scheme=scheme, engine=engine, attention=attention, shards=shards
    )
    graphdef, params, _ = models.split(model)
    weights = PolicyWeights(graphdef=graphdef, params=params, qweights=models.quantize_params(graphdef, params))
    return with_adapters(weights, lora_rank) if lora_rank else weights


def with_adapters(weights: PolicyWeights, rank: int, seed: int = 0) -> PolicyWeights:
    """Adds random adapters of all linear layers to a policy; only the adapters change between its versions."""
    config = dataclasses.replace(models.config_of(weights.graphdef), lora=models.Lora(rank=rank, scale=0.75))
    graphdef = models.split(models.abstract_model(config))[0]
    keys = itertools.count()

    def drawn(x: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), next(keys))
        return jax.random.normal(key, x.shape, x.dtype) / x.shape[-1] ** 0.5 / 2

    adapters = jax.tree.map(drawn, models.fresh_adapters(config))
    fixed = frozenset(models.by_path(weights.params))
    params = united(weights.params, adapters)
    return PolicyWeights(graphdef=graphdef, params=params, qweights=weights.qweights, fixed=fixed)


@functools.lru_cache(maxsize=8)
def _scorer(graphdef: Any, temperature: float) -> Any:
    """The compiled program of `score`."""
    numerics = models.config_of(graphdef).numerics

    def run(
        params: Any, qweights: Any, tokens: jax.Array, segment_ids: jax.Array, routed: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        model = models.merge(graphdef, params, qweights)
        hidden = model.hidden_states(tokens, None, segment_ids, routed_experts=routed)
        head = model.head_weight()
        return token_logprobs(hidden, head, tokens, segment_ids, numerics=numerics, temperature=temperature)

    return jax.jit(run)


def score(
    weights: PolicyWeights, sampled: Sampled, *, replay: bool = False, temperature: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Computes the learner's (log-probs, entropies), each [N, T] float32, of every token of `sampled`.

    `replay`: route tokens to the experts that the engine recorded, if it did. `temperature`: the sampler's.
    """
    run = _scorer(weights.graphdef, temperature)
    parts = []
    rows = len(sampled.tokens)
    for start in range(0, rows, _BATCH):
        picked = np.minimum(np.arange(start, start + _BATCH), rows - 1)  # the last batch repeats a row
        routed = sampled.routed[picked] if replay and sampled.routed is not None else None
        parts.append(run(weights.params, weights.qweights, sampled.tokens[picked], sampled.segment_ids[picked], routed))
    logprobs, entropy = (np.concatenate([np.asarray(p[i]) for p in parts])[:rows] for i in range(2))
    return logprobs, entropy


def mismatch(learner: np.ndarray, engine: np.ndarray, entropy: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    """Computes k1, k3 and log-prob differences over masked positions above ENTROPY_FLOOR (all masked, if none is)."""
    counted = mask & (entropy > ENTROPY_FLOOR)
    counted = counted if counted.any() else mask
    d = learner[counted].astype(np.float64) - engine[counted].astype(np.float64)
    return {
        "k1": float(-d.mean()),
        "k3": float((np.expm1(d) - d).mean()),
        "mean_abs": float(np.abs(d).mean()),
        "max_abs": float(np.abs(d).max()),
        "within_1e-4": float((np.abs(d) <= 1e-4).mean()),
        "tokens": int(counted.sum()),
    }


@dataclasses.dataclass(frozen=True)
class Rung:
    """The result of one comparison of the ladder. `ok` is None if nothing was compared, or nothing is promised."""

    name: str
    ok: bool | None
    detail: str


def exact_rungs(weights: PolicyWeights) -> Iterator[Rung]:
    """Yields the rungs that need no engine: quantize, pack and unpack."""
    config = models.config_of(weights.graphdef)
    if not jax.tree.leaves(weights.qweights):
        yield Rung("quantize", None, "nothing is quantized under this scheme")
        yield Rung("pack, unpack", None, "nothing is quantized under this scheme")
        return
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), weights.params)
    again = models.quantize_params(weights.graphdef, rounded)
    pairs = list(zip(jax.tree.leaves(weights.qweights), jax.tree.leaves(again), strict=True))
    wrong = sum(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in pairs)
    yield Rung("quantize", wrong == 0, f"{len(pairs)} stacked arrays, {wrong} differ")
    count = wrong = 0
    for name, tensor in models.export_tensors(weights.params, weights.qweights, config):
        if isinstance(tensor, QTensor):
            layout, arrays = tensor.scheme.wire, {key: np.asarray(array) for key, array in tensor.arrays.items()}
            back = formats.unpack(name, formats.pack(name, arrays, layout), layout)
            count += 1
            wrong += any(back[key].tobytes() != array.tobytes() for key, array in arrays.items())
    yield Rung("pack, unpack", wrong == 0, f"{count} weights, {wrong} differ")


def published(engine: VllmEngine, weights: PolicyWeights) -> list[Rung]:
    """Publishes `weights` with a full read-back; returns the rungs "hash at load" and "read-back"."""
    try:
        report = engine.publish(weights, 0)
    except BrokenPromiseError as broken:
        door = broken.code == "read_back"
        return [
            Rung("hash at load", door, "" if door else broken.found),
            Rung("read-back", False if door else None, broken.found if door else ""),
        ]
    return [
        Rung("hash at load", True, f"{int(report['tensors'])} tensors, {int(report['bytes']):,} bytes"),
        Rung(
            "read-back",
            True,
            f"{int(report['weights_read_back'])} live layers, {int(report['rows_read_back'])} one-hot rows",
        ),
    ]


def module_rungs(engine: VllmEngine, weights: PolicyWeights, prompt: Sequence[int], *, aligned: bool) -> Iterator[Rung]:
    """Compares the live engine's linear layers and blocks with the learner's, on the engine's own inputs."""
    config = models.config_of(weights.graphdef)
    for name, names, linear in (
        ("linear layers", layers.linear_names(config), True),
        ("blocks", layers.block_names(config), False),
    ):
        try:
            found = layers.compare(weights, engine.probe(prompt, names), linear)
        except UserError as error:  # a compiled engine, or a reply too large: not a broken promise
            yield Rung(name, None, str(error))
            continue
        yield Rung(name, *layers.judge(found, aligned))


ONE_TOKEN = SamplingConfig(max_response_len=1)


def random_prompts(vocab: int, count: int, length: int, seed: int) -> list[Prompt]:
    """Makes `count` prompts of `length` random tokens below `vocab`."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, vocab, (count, length))
    return [Prompt(uid=str(i), tokens=tuple(int(t) for t in row), text="", answer="") for i, row in enumerate(rows)]


def flat(groups: list[list[Completion]]) -> list[Completion]:
    """Flattens the completions of all prompts into one list."""
    return [completion for group in groups for completion in group]


def decode_and_prefill(engine: VllmEngine, prompts: Sequence[Prompt], length: int) -> dict[str, float]:
    """Compares each token of greedy responses, as decoded, with the same token out of a prefill, inside the engine."""
    generate = functools.partial(engine.generate, num_samples=1, key=0)
    decoded = flat(generate(prompts, sampling=SamplingConfig(max_response_len=length, temperature=0.0)))
    cuts = [(c, t) for c in decoded for t in range(len(c.tokens))]
    again = [
        Prompt(uid=str(i), tokens=(*c.prompt_tokens, *c.tokens[:t]), text="", answer="")
        for i, (c, t) in enumerate(cuts)
    ]
    prefilled = flat(generate(again, sampling=SamplingConfig(max_response_len=1, temperature=0.0)))
    same = np.array([p.tokens[0] == c.tokens[t] for p, (c, t) in zip(prefilled, cuts, strict=True)])
    d = np.array([float(p.logprobs[0]) - float(c.logprobs[t]) for p, (c, t) in zip(prefilled, cuts, strict=True)])
    d = d[same]
    return {
        "k3": float((np.expm1(d) - d).mean()),
        "max_abs": float(np.abs(d).max()),
        "equal": float((d == 0).mean()),
        "same_token": float(same.mean()),
        "tokens": len(cuts),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The size and the settings of a comparison of learner and engine.

    Attributes:
      prompts, prompt_len, response_len: number of prompts, tokens of each, and tokens of each response.
      attention: as in model.attention; "engine" mirrors the engine's kernel: flash3 where it can be had, else xla.
      arithmetic, eager, kv_cache_gb, gpu_memory_utilization, tensor_parallel_size, threads: as in rollout.engine.
      lora_rank: rank of random adapters; 0: none.
      unaligned: also measure an unaligned learner, as a baseline.
    """

    prompts: int = 64
    prompt_len: int = 16
    response_len: int = 64
    seed: int = 0
    threads: int = 0
    attention: Literal["engine", "auto", "xla", "cudnn", "flash3"] = "engine"
    arithmetic: Literal["batch_invariant", "vllm"] = "batch_invariant"
    eager: bool = False
    kv_cache_gb: float = 0.25
    gpu_memory_utilization: float = 0.5
    tensor_parallel_size: int = 1
    lora_rank: int = 0
    unaligned: bool = True

    def engine(self, model: models.ModelConfig) -> Config:
        """Returns the settings of the engine under comparison."""
        return Config(
            kv_cache_gb=self.kv_cache_gb,
            gpu_memory_utilization=self.gpu_memory_utilization,
            max_num_seqs=max(64, self.prompts),
            readback="full",
            threads=self.threads,
            arithmetic=self.arithmetic,
            eager=self.eager,
            tensor_parallel_size=self.tensor_parallel_size,
            record_routing=model.moe is not None and (self.eager or self.arithmetic == "batch_invariant"),
            max_model_len=self.prompt_len + self.response_len,
        )


def climb(path: str, scheme: str, engine_name: str, options: Options, show: Any = lambda rung: None) -> dict[str, Any]:
    """Runs the comparisons of the ladder in order, and calls `show` with the result of each.

    Args:
      path: model folder. scheme: scheme of all weights, e.g. "w4a16".
      engine_name: the live vLLM's arithmetic, "cpu" or "cuda".

    Returns:
      {"rungs": [...], "aligned": mismatch, "unaligned": mismatch, "first_broken": name or None, ...}
    """
    if engine_name == "cuda":
        leave_memory_to_vllm()
    weights = load(path, scheme, engine_name, options.attention, options.tensor_parallel_size, options.lora_rank)
    config = models.config_of(weights.graphdef)
    scheme = str(quant.on_engine(quant.parse_scheme(scheme), config.numerics) or "bf16")  # as that engine has it
    result: dict[str, Any] = {
        "model": path,
        "scheme": scheme,
        "profile": config.numerics.profile,
        "attention": config.attention,
    }
    rungs: list[Rung] = []
    with contextlib.closing(_rungs(weights, path, scheme, options, result)) as found:
        for rung in found:
            rungs.append(rung)
            show(rung)
    result["rungs"] = [dataclasses.asdict(rung) for rung in rungs]
    result["first_broken"] = next((rung.name for rung in rungs if rung.ok is False), None)
    return result


def _rungs(
    weights: PolicyWeights, path: str, scheme: str, options: Options, result: dict[str, Any]
) -> Generator[Rung, None, None]:
    """Every rung in order; what was measured goes into `result`. Ends where a weight is not the published one."""
    config = models.config_of(weights.graphdef)
    prompts = random_prompts(config.vocab_size, options.prompts, options.prompt_len, options.seed)
    sampling = SamplingConfig(max_response_len=options.response_len)
    exact = list(exact_rungs(weights))
    yield from exact
    engine_config = options.engine(config)
    engine = VllmEngine(engine_config, run_id="parity")
    try:
        exact += (live := published(engine, weights))
        yield from live
        if any(rung.ok is False for rung in exact):
            return
        facts = engine.facts
        assert facts is not None
        result["engine"] = f"{facts.engine} {facts.engine_version} {facts.isa}"
        result["kernels"] = sorted(set(facts.kernels.values()))
        result["execution"] = facts.execution
        verdict = alignment.judge(
            alignment.Pair(
                engine=engine_config,
                learner=scheme,
                sampler=scheme,
                numerics=config.numerics,
                attention=config.attention,
                path=path,
                facts=facts,
            )
        )
        said = f"{facts.execution}, {facts.engine} {facts.engine_version} on {facts.isa}"
        said += "" if verdict.is_aligned else f"; not aligned: {verdict.reason}; {verdict.remedy}"
        yield Rung("alignment", True if verdict.is_aligned else None, said)
        yield from module_rungs(engine, weights, prompts[0].tokens, aligned=verdict.is_aligned)
        first = Sampled.of(flat(engine.generate(prompts, num_samples=4, sampling=ONE_TOKEN, key=options.seed)))
        logprobs, entropy = score(weights, first, replay=True)
        result["prefill"] = mismatch(logprobs, first.logprobs, entropy, first.response)
        result["decode_prefill"] = decode_and_prefill(engine, prompts[:8], min(options.response_len, 16))
        sampled = Sampled.of(flat(engine.generate(prompts, num_samples=1, sampling=sampling, key=options.seed)))
    finally:
        engine.close()
    _score_samples(
        weights, sampled, path if options.unaligned and scheme != "bf16" and not options.lora_rank else None, result
    )
    yield from _logprob_rungs(result, aligned=verdict.is_aligned)


def _score_samples(weights: PolicyWeights, sampled: Sampled, unaligned: str | None, result: dict[str, Any]) -> None:
    """Adds the mismatch of whole responses; `unaligned`: the model folder of the bf16 learner to compare, if any."""
    logprobs, entropy = score(weights, sampled, replay=True)
    if sampled.routed is not None:
        own, own_entropy = score(weights, sampled)
        result["own_routing"] = mismatch(own, sampled.logprobs, own_entropy, sampled.response)
    result["aligned"] = mismatch(logprobs, sampled.logprobs, entropy, sampled.response)
    if unaligned is not None:
        usual, usual_entropy = score(load(unaligned, "bf16", "plain"), sampled)
        result["unaligned"] = mismatch(usual, sampled.logprobs, usual_entropy, sampled.response)


def _logprob_rungs(result: dict[str, Any], *, aligned: bool) -> Iterator[Rung]:
    """Log-probs out of a prefill, inside the engine, and of whole responses."""

    def judged(stats: dict[str, float], also: bool = True) -> bool | None:
        return stats["k3"] == 0 and also if aligned else None

    prefill, inside, responses = result["prefill"], result["decode_prefill"], result["aligned"]
    yield Rung("prefill", judged(prefill), line(prefill))
    detail = f"k3 {inside['k3']:.1e}, max {inside['max_abs']:.1e}, {inside['equal']:.1%} equal"
    yield Rung("decode, prefill", judged(inside), detail)
    beaten = "unaligned" not in result or responses["k3"] < result["unaligned"]["k3"]
    yield Rung("sampled tokens", judged(responses, beaten), line(responses))


def line(stats: dict[str, float]) -> str:
    """Formats the result of `mismatch` as one line of text."""
    return (
        f"k1 {stats['k1']:+.1e}  k3 {stats['k3']:.1e}  mean {stats['mean_abs']:.1e}  max {stats['max_abs']:.1e}  "
        f"within 1e-4 {stats['within_1e-4']:.1%}  of {stats['tokens']} tokens"
    )
