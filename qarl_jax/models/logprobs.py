# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probs of tokens and entropies of positions from hidden states, without an array of shape [tokens, vocab].

The head, the log-softmax and the gather are one operation here, run over chunks of time with its own VJP:

    z = float32(h @ W^T) / temperature          (W [V, D] in the compute dtype, products accumulated in float32)
                                                W = bf16(q s) where the head has codes; dW goes to its master
    logprob = z[token] - logsumexp(z)
    entropy = logsumexp(z) - sum_v softmax(z)_v z_v

The backward recomputes z chunk by chunk from the saved hidden states and logsumexp:

    dz = (onehot(token) - p) dlogprob - p (log p + entropy) dentropy
    dh = dz W / temperature                      dW = sum over chunks of dz^T h / temperature   (float32 accumulator)

so that the largest buffer of either pass is [B, chunk / B, V]. Chunks cut time and not the batch: rows stay on the
devices that hold them. The chosen logit is read by comparing an iota with the token, not by a gather. A
gather along a vocabulary sharded over devices makes the partitioner all-gather z first. Compare, select and reduce stay
local, and end in an exchange of six [B, chunk / B] numbers.

Only this file shifts by one token: `logprobs[b, t]` scores `tokens[b, t]` from the hidden state at t - 1, and a
critic's value of token t comes from t - 1 too (`preceding`).

Left out: logit soft-capping and bias (no supported family has them), and skipping prompt positions (packing decides
what is in a row).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from qarl_jax import quant
from qarl_jax.numerics.engine import PLAIN, Numerics
from qarl_jax.numerics.float32 import from_float64, matmul_precision, round_to
from qarl_jax.types import UserError

# 1024 rows of float32 logits over a vocabulary of 152k are 0.6 GB: large enough for full-speed products, small enough
# to disappear beside the activations. Small vocabularies get the same cut; a chunk costs one loop step.
DEFAULT_CHUNK = 1024


def scored_mask(segment_ids: Int[Array, "B T"]) -> jax.Array:
    """Marks the tokens that get a log-prob, bool [B, T]: every token of a segment except its first; never padding.

    Example: segment_ids [1, 1, 2, 2, 0] -> [False, True, False, True, False].
    """
    previous = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))  # 0 before the row: its first token starts a segment
    return (segment_ids != 0) & (segment_ids == previous)


def preceding(x: Shaped[Array, "B T *rest"], segment_ids: Int[Array, "B T"]) -> Shaped[Array, "B T *rest"]:
    """Shifts `x` [B, T, ...] by one position: a token gets the entry of the position that predicted it, or 0.

    Example: x [[a, b, c, d]], segment_ids [[1, 1, 1, 0]] -> [[0, a, b, 0]].
    """
    shifted = jnp.pad(x[:, :-1], ((0, 0), (1, 0)) + ((0, 0),) * (x.ndim - 2))
    scored = scored_mask(segment_ids).reshape(segment_ids.shape + (1,) * (x.ndim - 2))
    return jnp.where(scored, shifted, jnp.zeros((), x.dtype))


def cut(batch: int, length: int, chunk: int) -> tuple[int, int]:
    """Cuts the `length` - 1 scored columns of a batch in time; returns (number of chunks, columns of each).

    Chunks have about equally many columns, so that padding is less than one column per chunk.

    Args:
      batch: rows. length: tokens of a row, at least 2.
      chunk: tokens over the whole batch whose logits exist at once.
    """
    columns = min(max(1, chunk // batch), length - 1)
    chunks = -(-(length - 1) // columns)
    return chunks, -(-(length - 1) // chunks)


def token_logprobs(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"] | quant.Coded,
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    temperature: float = 1.0,
    chunk: int = DEFAULT_CHUNK,
    numerics: Numerics = PLAIN,
    entropy_gradient: bool = False,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Computes the log-prob of every token, and the entropy of the distribution from which it was drawn.

    Args:
      hidden: [B, T, D] final hidden states (after the last norm), compute dtype.
      head: [V, D] output embedding, master dtype; read once in that dtype. May be sharded over V. With codes
        (`quant.Coded`) these are read, and the master gets the gradient.
      tokens: [B, T] int32.
      segment_ids: [B, T] int32, 1.. per row, 0 = padding (rows may be packed).
      temperature: > 0, the sampler's; logits are divided by it.
      chunk: tokens (over the whole batch) whose logits exist at once; rounded to whole columns of the batch.
      numerics: the engine's arithmetic. With `float64`, logits are computed in float64 and rounded to float32; with
        `float64_log_softmax`, log-probs are. The gradient ignores these roundings.
      entropy_gradient: let gradients flow through the entropy (for an entropy bonus); by default they do not.

    Returns:
      (logprobs, entropy), both [B, T] float32; 0 on padding and on the first token of each segment. Gradients reach
      `hidden` and `head`; positions that score no token contribute exactly 0.

    Raises:
      UserError: temperature or chunk is not positive.
    """
    if not temperature > 0:
        raise UserError(
            f"token_logprobs: temperature must be positive, got {temperature}; greedy sampling has no log-probs"
        )
    if chunk < 1:
        raise UserError(f"token_logprobs: chunk must be at least 1 token, got {chunk}")
    batch, length = tokens.shape
    mask = scored_mask(segment_ids)
    if batch == 0 or length <= 1:
        zeros = jnp.zeros((batch, length), jnp.float32)
        return zeros, zeros

    # The shift: position t - 1 predicts token t. Column 0 scores nothing and is put back below.
    source, target, scored = hidden[:, :-1], tokens[:, 1:], mask[:, 1:]
    chunks, columns = cut(batch, length, chunk)
    pad = chunks * columns - (length - 1)

    def split(x: jax.Array) -> jax.Array:
        """[B, T-1, ...] -> [chunks, B, columns, ...], zero-padded."""
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, chunks, columns, *x.shape[2:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:
        """[chunks, B, columns] -> [B, T], with a zero column for the tokens that nothing scores."""
        x = jnp.moveaxis(x, 0, 1).reshape(batch, chunks * columns)
        return jnp.pad(x[:, : length - 1], ((0, 0), (1, 0)))

    master, qtensor = (head.master, head.qtensor) if isinstance(head, quant.Coded) else (head, None)
    logprobs, entropy = _scores(
        split(source), master, qtensor, split(target), split(scored), float(temperature), numerics, entropy_gradient
    )
    return join(logprobs), join(entropy)


def logits_of(
    hidden: Float[Array, "*rows D"], head: Float[Array, "V D"], *, numerics: Numerics = PLAIN
) -> Float[Array, "*rows V"]:
    """Computes float32 logits of hidden states, accumulated in float32, or in float64 where `numerics.float64` is set.

    Sampler and learner both call this function, so that their logits agree.
    """
    if numerics.float64:
        return from_float64(functools.partial(jnp.einsum, "...d,vd->...v"), hidden, head)
    precision = matmul_precision(hidden.dtype)
    return jnp.einsum("...d,vd->...v", hidden, head, precision=precision, preferred_element_type=jnp.float32)


def used(head: Float[Array, "V D"] | quant.Coded, dtype: Any) -> Float[Array, "V D"]:
    """Returns the weight with which logits are computed: the head's master rounded to `dtype`, or its decoded codes."""
    return quant.decoded(head.qtensor, dtype) if isinstance(head, quant.Coded) else round_to(head, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _scores(
    hidden: jax.Array,
    head: jax.Array,
    qtensor: Any,
    targets: jax.Array,
    scored: jax.Array,
    temperature: float,
    numerics: Numerics,
    entropy_gradient: bool,
) -> tuple[jax.Array, jax.Array]:
    """hidden [C, B, t, D], head [V, D] and its QTensor or None, targets and scored [C, B, t] -> (logprobs, entropy)
    [C, B, t] float32."""
    return _forward(hidden, head, qtensor, targets, scored, temperature, numerics, entropy_gradient)[0]


def _chosen(targets: jax.Array, vocab: int) -> jax.Array:
    """[B, t] -> [B, t, V] bool, true at the target; fused into its consumer, never stored."""
    return jax.lax.broadcasted_iota(targets.dtype, (*targets.shape, vocab), targets.ndim) == targets[..., None]


def tempered(logits: jax.Array, temperature: float, numerics: Numerics) -> jax.Array:
    """Divides float32 logits [..., V] by the temperature; with `float64_log_softmax` in float64, as the engine does."""
    if temperature == 1 or not numerics.float64_log_softmax:
        return logits / temperature
    return from_float64(lambda z: z / float(np.float32(temperature)), logits)


def _log1p(x: jax.Array) -> jax.Array:
    """log(1 + x) to the last digits by nothing but IEEE operations and the logarithm, which the engine has too.

    The barrier keeps XLA from seeing that (1 + x) - 1 is x but for the rounding that is wanted here.
    """
    total = jax.lax.optimization_barrier(1.0 + x)
    return jnp.where(total == 1, x, jnp.log(total) * x / jnp.where(total == 1, 1.0, total - 1.0))


def _in_integers(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits float64 x up to 2^53 into integers (a, b, c): a + b 2^-36 + c 2^-72 is x to a multiple of 2^-72."""
    high = jnp.round(x)
    rest = (x - high) * 2.0**36
    middle = jnp.round(rest)
    return high, middle, jnp.round((rest - middle) * 2.0**36)


def _sums(exps: jax.Array, weighted: jax.Array, count: jax.Array, own: jax.Array) -> tuple[jax.Array, ...]:
    """Sums float64 arrays over their last axis: (the first's sum, the others'). The first has numbers in [0, 1].

    The first's sum is exact in every order for up to 2^18 numbers, and is the engine's
    (`qarl_bridge.engine.cuda.sampling`): each number becomes integers times 2^-35, 2^-71 and 2^-107. It is split where
    it is added, in one reduction of complex numbers. XLA stores what two operands or two reductions share: exponentials
    in float64, twice as many bytes as the logits.
    """

    def add(x: tuple[jax.Array, ...], y: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        high, middle, low = map(jnp.add, _in_integers(x[0].real), _in_integers(y[0].real))
        return jax.lax.complex(high, x[0].imag + y[0].imag), x[1] + y[1] + jax.lax.complex(middle, low), x[2] + y[2]

    first = jax.lax.complex(exps * 2.0**35, weighted)
    terms = first, jnp.zeros_like(first), jax.lax.complex(count, own)
    first, rest, last = jax.lax.reduce(terms, (jnp.zeros((), first.dtype),) * 3, add, (first.ndim - 1,))
    total = (first.real + (rest.real + rest.imag * 2.0**-36) * 2.0**-36) * 2.0**-35
    return total, first.imag, last.real, last.imag


def statistics(
    z: Float[Array, "*rows V"], tokens: Int[Array, "*rows"], *, numerics: Numerics = PLAIN
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Computes log-probs of `tokens`, entropies and logsumexps from float32 logits z, already divided by temperature.

    Sampler and learner both call this function, so that their log-probs agree.
    """

    def formula(z: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        top = z.max(-1, keepdims=True)
        # Relative to the maximum, the sums keep full precision however large the logits are.
        below = z - top
        exps = jnp.exp(below)
        own, weighted = jnp.where(chosen, below, 0.0), exps * below
        if numerics.float64_log_softmax:
            # The largest logit's own 1 stays out of the sum: the log-prob of a token that is all but certain is the
            # logarithm of one plus what is left, and float32 keeps its digits.
            largest = z == top
            others = jnp.where(largest, 0.0, exps)
            others, weighted, count, own = _sums(others, weighted, largest.astype(z.dtype), own)
            rest = others + (count - 1.0)
            total, log_total = 1.0 + rest, _log1p(rest)
        else:
            total, own, weighted = exps.sum(-1), own.sum(-1), weighted.sum(-1)
            log_total = jnp.log(total)
        entropy = log_total - weighted / total
        return own - log_total, entropy, top[..., 0] + log_total

    chosen = _chosen(tokens, z.shape[-1])
    if numerics.float64_log_softmax:
        logprobs, entropy, lse = from_float64(formula, z, chosen)
        return logprobs, entropy, lse
    return formula(z, chosen)


def _forward(hidden, head, qtensor, targets, scored, temperature, numerics, entropy_gradient):  # type: ignore[no-untyped-def]
    # Cast here and not in the caller: the master's gradient then keeps the float32 it is summed in.
    weight = used(head if qtensor is None else quant.Coded(head, qtensor), hidden.dtype)

    def step(carry, x):  # type: ignore[no-untyped-def]
        h, target, keep = x
        z = tempered(logits_of(h, weight, numerics=numerics), temperature, numerics)
        outputs = statistics(z, target, numerics=numerics)
        return carry, tuple(jnp.where(keep, out, 0.0) for out in outputs)

    _, (logprobs, entropy, lse) = jax.lax.scan(step, None, (hidden, targets, scored))
    return (logprobs, entropy), (hidden, head, qtensor, targets, scored, lse, entropy)


def _backward(temperature, numerics, entropy_gradient, residuals, cotangents):  # type: ignore[no-untyped-def]
    hidden, head, qtensor, targets, scored, lse, entropy = residuals
    weight = used(head if qtensor is None else quant.Coded(head, qtensor), hidden.dtype)
    precision = matmul_precision(hidden.dtype, gradient=True)
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

    def step(d_head, x):  # type: ignore[no-untyped-def]
        h, target, *rest = x
        keep, lse_t, entropy_t, d_logprob, d_entropy = (leaf[..., None] for leaf in rest)
        # Where nothing is scored the hidden state may be anything: 0 * NaN must not reach the head.
        h = jnp.where(keep, h, jnp.zeros((), h.dtype))
        logp = tempered(logits_of(h, weight, numerics=numerics), temperature, numerics) - lse_t
        p = jnp.exp(logp)
        dz = (jnp.where(_chosen(target, weight.shape[0]), 1.0, 0.0) - p) * d_logprob
        if entropy_gradient:
            dz = dz - p * (logp + entropy_t) * d_entropy
        # Operands of both products in the compute dtype, sums in float32.
        dz = jnp.where(keep, dz / temperature, 0.0).astype(h.dtype)
        d_h = product("btv,vd->btd", dz, weight).astype(h.dtype)
        return d_head + product("btv,btd->vd", dz, h), d_h

    xs = (hidden, targets, scored, lse, entropy, *cotangents)
    d_head, d_hidden = jax.lax.scan(step, jnp.zeros(head.shape, jnp.float32), xs)
    return d_hidden, d_head.astype(head.dtype), None, None, None


_scores.defvjp(_forward, _backward)
