# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The embedded rollout engine: samples with the learner's model in the trainer's process, in a few compiled programs.

A call to `generate` runs over at most `Config.batch_size` slots, one sequence each:

    prefill   every prompt once, for all its samples: tokens [P, T] -> the prompt's keys and values, last hidden state
    insert    copy a prefilled prompt into free slots and draw their first token
    decode    a while_loop that feeds every slot its last token and draws the next, until enough slots are free to be
              worth refilling (when nothing waits, until half of them are idle; at the fewest slots, until all are)
    compact   gather the live slots into half as many or fewer, once nothing waits

So a long response never holds up the queue, and the tail of a batch does not pay for idle slots. Shapes are rounded up
to buckets: a call compiles at most one prefill, one insert and one that makes empty slots, and one decode and compact
per halving of the slots down to `Config.min_slots`. Programs are kept for later calls and counted in
`compiled_programs`.

Randomness: the uniform number at position t of sample j of prompt uid under key k is a function of (k, uid, j, t)
alone. It selects the token by inverse transform sampling, one pass over the vocabulary; the Gumbel trick would need a
random number per vocabulary entry. A prompt that appears twice in a call continues its sample numbers, so that copies
differ. A continued response (`extend`) is prefilled with its prompt, and its positions count on. Under equal weights it
equals the response drawn without interruption.

Log-probabilities are float32: the log-softmax of the distribution drawn from (temperature, then top-p, renormalized),
computed by the learner's functions (`models/logprobs.py`).

Not supported: paged memory and prefix sharing across prompts (the cache is [slots, prompt + response]), and speculative
decoding. Use vLLM for large models.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qarl_jax import models
from qarl_jax.models.logprobs import logits_of
from qarl_jax.models.params import part_of, united
from qarl_jax.quant import Numerics
from qarl_jax.rollout import Drawn, PolicyWeights, Request, RolloutEngine, SamplingConfig
from qarl_jax.rollout.embedded.decode_form import Policy, compute_form
from qarl_jax.rollout.embedded.draw import draw
from qarl_jax.runtime import mesh, processes, progress
from qarl_jax.typed_config.annotations import internal
from qarl_jax.types import Completion, UserError, VersionSpan, at_least

# Named, so that no global setting of JAX changes what a run draws.
_typed_key = functools.partial(jax.random.wrap_key_data, impl="threefry2x32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The `rollout.engine` section of the embedded sampler. Configs can set `batch_size` alone; the rest is for code.

    Attributes:
    batch_size: slots, i.e. sequences decoded at once.
    min_slots: an emptying batch is halved down to this many slots, one compiled decode program for each size.
    prompt_bucket: prompt lengths are rounded up to this times a power of two.
    response_bucket: limits on the response are rounded up to a multiple of this, to share programs between calls.
    refill_fraction: share of the slots that must be free before waiting sequences fill them. Each refill costs a round
      trip to the host and a copy of the prompts' keys and values.
    """

    batch_size: int = 64
    min_slots: int = internal(16)
    prompt_bucket: int = internal(16)
    response_bucket: int = internal(16)
    refill_fraction: float = internal(0.125)

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "min_slots", "prompt_bucket", "response_bucket")
        if not 0 < self.refill_fraction <= 1:
            raise UserError(f"rollout.refill_fraction must be in (0, 1], got {self.refill_fraction}")


# ---- memory ----------------------------------------------------------------------------------------------------------


def footprint(
    config: Config, graphdef: Any, params: Any, qweights: Any, *, prompt_len: int, response_len: int, sequences: int
) -> tuple[Any, Any]:
    """Returns the shapes of a sampler's largest memory: its copy of the policy, and a full batch's keys and values.

    Args:
      config: the sampler's.
      graphdef, params, qweights: a split model, shapes in place of arrays.
      prompt_len, response_len: the longest, in tokens. sequences: responses asked for at once.
    """
    slots = min(config.batch_size, bucket(sequences, min(config.min_slots, config.batch_size)))
    length = (
        bucket(prompt_len, config.prompt_bucket) - (-response_len // config.response_bucket) * config.response_bucket
    )
    weights = jax.eval_shape(lambda p, q: compute_form(graphdef, p, q)[1], params, qweights)
    model = models.abstract_model(models.config_of(graphdef))
    return weights, jax.eval_shape(lambda: model.init_cache(slots, length))


# ---- the programs ---------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Slots:
    """Device state of B slots with room for R response tokens.

    cache: the model's KVCache of B rows. last: [B] int32, the token to feed next. keys: [B, 2] uint32, raw key data.
    start: [B] int32, position in its response of the first token drawn here. count: [B] int32, tokens drawn. limit: [B]
    int32, most of them. done: [B] bool, also true for empty slots. tokens: [B, R] int32. logprobs: [B, R] float32.
    """

    cache: Any
    last: Any
    keys: Any
    start: Any
    count: Any
    limit: Any
    done: Any
    tokens: Any
    logprobs: Any


def _prefill(policy: Policy, weights: Any, tokens: jax.Array, lengths: jax.Array) -> tuple[Any, jax.Array]:
    """tokens [P, T] right-padded -> (cache of P rows, hidden state of each prompt's last token [P, D])."""
    model = policy.model(weights)
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length))
    positions = jnp.where(positions < lengths[:, None], positions, -1)  # absent tokens are not cached
    hidden, cache = model.decode(tokens, positions, model.init_cache(rows, length))
    return cache, jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]


def _empty(policy: Policy, weights: Any, slots: int, length: int, response: int) -> _Slots:
    """B empty slots with caches of `length` and room for `response` tokens."""
    zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
    return _Slots(
        cache=policy.model(weights).init_cache(slots, length),
        last=zeros(slots),
        keys=jnp.zeros((slots, 2), jnp.uint32),
        start=zeros(slots),
        count=zeros(slots),
        limit=zeros(slots),
        done=jnp.ones(slots, bool),
        tokens=zeros((slots, response)),
        logprobs=jnp.zeros((slots, response), jnp.float32),
    )


def _draw_next(
    slots: _Slots,
    hidden: jax.Array,
    head: jax.Array,
    active: jax.Array,
    stop: jax.Array,
    sampling: SamplingConfig,
    numerics: Numerics,
) -> _Slots:
    """Draws a token from `hidden` [B, D] for the `active` slots and files it; the others keep what they have."""

    def number(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(_typed_key(key), position), (), jnp.float32)

    uniform = jax.vmap(number)(slots.keys, slots.start + slots.count)
    tokens, logprobs = draw(
        logits_of(hidden, head.astype(hidden.dtype), numerics=numerics), uniform, sampling, numerics
    )
    here = active[:, None] & (jnp.arange(slots.tokens.shape[1])[None] == slots.count[:, None])
    count = slots.count + active.astype(jnp.int32)
    ended = (tokens[:, None] == stop[None]).any(-1) | (count >= slots.limit)
    return dataclasses.replace(
        slots,
        last=jnp.where(active, tokens, slots.last),
        count=count,
        done=slots.done | (active & ended),
        tokens=jnp.where(here, tokens[:, None], slots.tokens),
        logprobs=jnp.where(here, logprobs[:, None], slots.logprobs),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Arrivals:
    """Responses that `_insert` starts, by slot. row: [B] int32, row of the prefilled pool, -1: the slot stays as it is.
    key: [B, 2] uint32. prompt: [B, 2] uint32, fingerprint of the prompt. sample: [B] int32, number of the sample.
    start: [B] int32, tokens of the response that are in the pool. limit: [B] int32, most tokens to add."""

    row: Any
    key: Any
    prompt: Any
    sample: Any
    start: Any
    limit: Any


def _insert(
    policy: Policy,
    sampling: SamplingConfig,
    weights: Any,
    slots: _Slots,
    pool: Any,
    hidden: jax.Array,
    arrivals: _Arrivals,
    stop: jax.Array,
) -> _Slots:
    """Starts sequences from a prefilled `pool` and its last `hidden` states [P, D], and draws their first token."""
    fresh = arrivals.row >= 0
    row = jnp.maximum(arrivals.row, 0)

    def seed(key: jax.Array, prompt: jax.Array, sample: jax.Array) -> jax.Array:
        folded = _typed_key(key)
        for number in (prompt[0], prompt[1], sample):
            folded = jax.random.fold_in(folded, number)
        return jax.random.key_data(folded)

    def place(slot: jax.Array, kv: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Copies one prompt's keys and values into a slot, in place: a refill costs what it moves."""

        def copy(into: jax.Array, origin: jax.Array) -> jax.Array:
            one = jax.lax.dynamic_slice_in_dim(origin, row[slot], 1, axis=1)
            return jax.lax.dynamic_update_slice(into, one, (0, slot, 0, 0, 0))

        return jax.lax.cond(fresh[slot], lambda kv: (copy(kv[0], pool.k), copy(kv[1], pool.v)), lambda kv: kv, kv)

    k, v = jax.lax.fori_loop(0, fresh.shape[0], place, (slots.cache.k, slots.cache.v))
    length = jnp.where(fresh, pool.length[row], slots.cache.length)
    slots = dataclasses.replace(
        slots,
        cache=dataclasses.replace(slots.cache, k=k, v=v, length=length),
        keys=jnp.where(fresh[:, None], jax.vmap(seed)(arrivals.key, arrivals.prompt, arrivals.sample), slots.keys),
        start=jnp.where(fresh, arrivals.start, slots.start),
        count=jnp.where(fresh, 0, slots.count),
        limit=jnp.where(fresh, arrivals.limit, slots.limit),
        done=slots.done & ~fresh,
    )
    return _draw_next(slots, hidden[row], policy.head(weights), fresh, stop, sampling, policy.numerics)


def _decode(
    policy: Policy, sampling: SamplingConfig, weights: Any, slots: _Slots, until: jax.Array, stop: jax.Array
) -> tuple[_Slots, jax.Array]:
    """Decodes until at most `until` slots are live. Returns the slots and the number of steps."""
    model = policy.model(weights)
    head = policy.head(weights)

    def live(carry: tuple[_Slots, jax.Array]) -> jax.Array:
        return (~carry[0].done).sum() > until

    def step(carry: tuple[_Slots, jax.Array]) -> tuple[_Slots, jax.Array]:
        slots, steps = carry
        active = ~slots.done
        positions = jnp.where(active, slots.cache.length, -1)
        hidden, cache = model.decode(slots.last[:, None], positions[:, None], slots.cache)
        slots = dataclasses.replace(slots, cache=cache)
        return _draw_next(slots, hidden[:, 0], head, active, stop, sampling, policy.numerics), steps + 1

    return jax.lax.while_loop(live, step, (slots, jnp.zeros((), jnp.int32)))


def _compact(slots: _Slots, keep: jax.Array) -> _Slots:
    """The slots `keep` [B'] of B, in that order."""
    take = functools.partial(jnp.take, indices=keep, axis=0, mode="clip")
    cache = dataclasses.replace(
        slots.cache,
        k=jnp.take(slots.cache.k, keep, axis=1, mode="clip"),
        v=jnp.take(slots.cache.v, keep, axis=1, mode="clip"),
        length=take(slots.cache.length),
    )
    rest = {f.name: take(getattr(slots, f.name)) for f in dataclasses.fields(slots) if f.name != "cache"}
    return _Slots(cache=cache, **rest)


# ---- the engine -----------------------------------------------------------------------------------------------------


def fingerprint(uid: str) -> tuple[int, int]:
    """Hashes a prompt's uid to two 32-bit words, equal in every process (unlike `hash`)."""
    digest = hashlib.blake2b(uid.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def bucket(length: int, unit: int) -> int:
    """Returns the smallest unit * 2**k that is at least `length`."""
    size = unit
    while size < length:
        size *= 2
    return size


def samples_per_prompt(requests: Sequence[Request]) -> int | None:
    """Finds how many neighbouring requests share a prompt (the gcd of all runs); None if one continues a response."""
    if any(request.tokens for request in requests):
        return None
    runs = itertools.groupby(requests, lambda request: request.prompt.uid)
    return math.gcd(*(len(list(run)) for _, run in runs))


class JaxSampler(RolloutEngine):
    """The embedded sampler: a `RolloutEngine` in the trainer's process.

    Attributes:
      compiled_programs: programs compiled so far; it stops growing once every shape of a run has been seen.
      stats: counts of the last call: decode_steps, slot_steps (steps x slots: tokens that could have been drawn),
        tokens, refills, prefilled contexts, seconds.
    """

    def __init__(self, config: Config | None = None):
        self.config = config or Config()
        self.version = -1
        self.stats: dict[str, float] = {}
        self._published: Any = None
        self._policy: Policy | None = None
        self._weights: Any = None
        self._fixed = frozenset[str]()  # what of them was the same in every version
        self._programs: dict[Any, Any] = {}
        self._devices = 1  # that the weights lie on

    @property
    def compiled_programs(self) -> int:
        """Counts the compiled programs."""
        return sum(program._cache_size() for program in self._programs.values())

    def prepare(self, graphdef: Any) -> None:
        """Does nothing: the sampler starts with its weights."""

    def publish(self, weights: PolicyWeights, version: int) -> dict[str, float]:
        """Copies the policy; leaves that never change (`fixed`) are copied only once. Returns `rollout/publish_s`."""
        start = time.perf_counter()
        if weights.graphdef != self._published:
            self._programs, self._fixed = {}, frozenset()
            self._published = weights.graphdef
        self._devices = max(len(array.devices()) for array in jax.tree.leaves((weights.params, weights.qweights)))
        kept = weights.fixed & self._fixed
        prepare = self._program(("publish", kept), functools.partial(self._prepare, kept))
        taken = jax.block_until_ready(prepare(weights.params, weights.qweights))
        if kept:
            pairs = zip(taken, self._weights, strict=True)
            taken = tuple(united(new, part_of(before, kept.__contains__)) for new, before in pairs)
        self._weights, self._fixed = taken, weights.fixed
        self.version = version
        return {"rollout/publish_s": time.perf_counter() - start}

    def _prepare(self, kept: frozenset[str], params: Any, qweights: Any) -> Any:
        """The compute form of all leaves but those that are `kept` from the version before. Traced once per graphdef;
        the policy is a by-product of the trace."""
        self._policy, weights = compute_form(self._published, params, qweights)
        # jnp.copy: where nothing changed jit would hand back the caller's own buffers, which the learner donates.
        taken = weights if not kept else tuple(part_of(x, lambda path: path not in kept) for x in weights)
        return jax.tree.map(jnp.copy, taken)

    def close(self) -> None:
        """Drops the weights and the programs."""
        self._weights = self._policy = self._published = None
        self._programs = {}

    def _program(self, name: Any, fn: Any, **options: Any) -> Any:
        if name not in self._programs:
            self._programs[name] = jax.jit(fn, **options)
        return functools.partial(self._launch, self._programs[name])

    def _launch(self, program: Any, *arguments: Any) -> Any:
        # The first call compiles; what it launches is not waited for.
        compiling = contextlib.nullcontext() if program._cache_size() else progress.task("compiling the sampler")
        with compiling, mesh.launch_lock(self._devices):  # a learner may train in another thread
            return program(*arguments)

    def draw(self, requests: Sequence[Request], *, sampling: SamplingConfig) -> Drawn:
        """Yields every completion once all have ended; see `RolloutEngine`.

        Shapes are those of the longest context, in buckets. Continued responses have longer contexts: one more set of
        programs is compiled for every doubling.

        Raises:
          UserError: nothing was published, an empty prompt, or a token outside the vocabulary.
        """
        if self._policy is None:
            raise UserError("rollout: nothing can be sampled before publish; publish version 0 first")
        for request in requests:
            uid, context = request.prompt.uid, request.context
            if not request.prompt.tokens:
                raise UserError(f"rollout: prompt {uid!r} has no tokens; give it at least a start token")
            if not 0 <= min(context) <= max(context) < self._policy.vocab_size:
                raise UserError(
                    f"rollout: prompt {uid!r} has a token outside the model's vocabulary of"
                    f" {self._policy.vocab_size}; is it another model's tokenizer?"
                )
        if not requests:
            self.stats = {}
            return
        call = _Call(self, self._policy, requests, sampling, samples_per_prompt(requests))
        with progress.task("sampling", len(requests), "responses") as task:
            results = call.run(task)
        yield from enumerate(results)


class _Call:
    """One call of `draw`: the queue, the slots, and the host loop that connects them.

    Neighbours among the requests that have the same context share a prefill. `sharing`: how many do; None: unknown.
    """

    def __init__(
        self,
        engine: JaxSampler,
        policy: Policy,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        sharing: int | None,
    ):
        config = engine.config
        self.engine, self.policy, self.weights = engine, policy, engine._weights
        self.requests, self.sampling = requests, sampling
        self.waiting = collections.deque(range(len(requests)))
        self.results: list[Completion | None] = [None] * len(requests)
        self.contexts: list[tuple[int, ...]] = []
        self.context_of: list[int] = []
        for request in requests:
            context = request.context
            if not self.contexts or context != self.contexts[-1]:
                self.contexts.append(context)
            self.context_of.append(len(self.contexts) - 1)

        self.num_slots = min(config.batch_size, bucket(len(requests), min(config.min_slots, config.batch_size)))
        self.prompt_len = bucket(max(map(len, self.contexts)), config.prompt_bucket)
        unit = config.response_bucket
        self.response_len = -(-sampling.max_response_len // unit) * unit
        # Enough to fill every slot: the pool is used up before the next one is made. Where every sequence may have a
        # context of its own that would be as much memory as the slots take, so then it is a quarter.
        self.pool_size = -(-self.num_slots // (sharing or 4))
        if sharing:
            self.pool_size = min(self.pool_size, len(requests) // sharing)
        self.pool_contexts: list[int] = []
        self.pool: Any = None
        self.owner: list[int | None] = [None] * self.num_slots
        self.stop = np.asarray(sampling.stop_token_ids or (-1,), np.int32)
        # The limit is an array, so that calls differing in it share programs.
        self.static = dataclasses.replace(sampling, max_response_len=self.response_len, stop_token_ids=())
        self.slots: Any = None
        self.steps = self.slot_steps = self.refills = self.prefilled = self.drawn = 0

    def program(self, name: str, fn: Any, **options: Any) -> Any:
        return self.engine._program((name, self.static), fn, **options)

    def run(self, task: progress.Task) -> list[Completion]:
        start = time.perf_counter()
        policy, static = self.policy, self.static
        decode = self.program("decode", functools.partial(_decode, policy, static), donate_argnums=1)
        empty = self.engine._program("empty", functools.partial(_empty, policy), static_argnums=(1, 2, 3))
        length = self.prompt_len + self.response_len
        self.slots = empty(self.weights, self.num_slots, length, self.response_len)
        quantum = max(1, int(self.num_slots * self.engine.config.refill_fraction))
        while True:
            self.refill()
            live = sum(owner is not None for owner in self.owner)
            if not live:
                break
            if self.waiting:
                until = max(0, self.num_slots - quantum)
            else:
                self.compact(live)
                until = self.num_slots // 2 if self.num_slots > self.smallest() else 0
            self.slots, steps = decode(self.weights, self.slots, np.int32(min(until, live - 1)), self.stop)
            self.steps += int(steps)
            self.slot_steps += int(steps) * self.num_slots
            self.collect()
            task.done = sum(result is not None for result in self.results)
        self.engine.stats = {
            "decode_steps": self.steps,
            "slot_steps": self.slot_steps,
            "refills": self.refills,
            "prefilled": self.prefilled,
            "tokens": self.drawn,
            "seconds": time.perf_counter() - start,
        }
        return self.results  # type: ignore[return-value]

    def smallest(self) -> int:
        return min(self.engine.config.min_slots, self.num_slots)

    def collect(self) -> None:
        """Files the completions of finished slots and frees these."""
        slots = self.slots
        done, count, tokens, logprobs = processes.fetch((slots.done, slots.count, slots.tokens, slots.logprobs))
        for slot, owner in enumerate(self.owner):
            if owner is None or not done[slot]:
                continue
            n = int(count[slot])
            ids = tuple(int(token) for token in tokens[slot, :n])
            self.results[owner] = Completion(
                prompt_tokens=tuple(self.requests[owner].prompt.tokens),
                tokens=ids,
                logprobs=logprobs[slot, :n].copy(),
                finish_reason="stop" if ids[-1] in self.sampling.stop_token_ids else "length",
                versions=(VersionSpan(version=self.engine.version, start=0, end=n),),
            )
            self.owner[slot] = None
            self.drawn += n

    def refill(self) -> None:
        """Starts waiting sequences in free slots until either runs out."""
        insert = self.program("insert", functools.partial(_insert, self.policy, self.static), donate_argnums=1)
        while self.waiting and None in self.owner:
            if self.context_of[self.waiting[0]] not in self.pool_contexts:
                self.fill_pool()
            row = np.full(self.num_slots, -1, np.int32)
            pairs = {name: np.zeros((self.num_slots, 2), np.uint32) for name in ("key", "prompt")}
            numbers = {name: np.zeros(self.num_slots, np.int32) for name in ("sample", "start", "limit")}
            for slot, owner in enumerate(self.owner):
                if owner is not None or not self.waiting:
                    continue
                if self.context_of[self.waiting[0]] not in self.pool_contexts:
                    break
                self.owner[slot] = this = self.waiting.popleft()
                request = self.requests[this]
                row[slot] = self.pool_contexts.index(self.context_of[this])
                # The key is 64 bits of data, whatever the default width of integers.
                pairs["key"][slot] = request.key >> 32 & 0xFFFFFFFF, request.key & 0xFFFFFFFF
                pairs["prompt"][slot] = fingerprint(request.prompt.uid)
                numbers["sample"][slot], numbers["start"][slot] = request.number, len(request.tokens)
                numbers["limit"][slot] = min(request.max_tokens, self.sampling.max_response_len)
            arrivals = _Arrivals(row=row, **pairs, **numbers)
            self.slots = insert(self.weights, self.slots, *self.pool, arrivals, self.stop)
            self.refills += 1
            # A first token may already end a sequence (a limit of one, or a stop).
            self.collect()

    def fill_pool(self) -> None:
        """Prefills the next contexts of the queue, `pool_size` at a time."""
        first = self.context_of[self.waiting[0]]
        self.pool_contexts = list(range(first, min(first + self.pool_size, len(self.contexts))))
        tokens = np.zeros((self.pool_size, self.prompt_len), np.int32)
        lengths = np.zeros(self.pool_size, np.int32)
        for row, index in enumerate(self.pool_contexts):
            ids = self.contexts[index]
            tokens[row, : len(ids)], lengths[row] = ids, len(ids)
        prefill = self.engine._program("prefill", functools.partial(_prefill, self.policy))
        self.pool = prefill(self.weights, tokens, lengths)
        self.prefilled += len(self.pool_contexts)

    def compact(self, live: int) -> None:
        """Halves the slots while the live ones fit."""
        size = self.num_slots
        while size > self.smallest() and live <= size // 2 and size % 2 == 0 and size // 2 >= self.smallest():
            size //= 2
        if size == self.num_slots:
            return
        occupied = [slot for slot, owner in enumerate(self.owner) if owner is not None]
        free = [slot for slot, owner in enumerate(self.owner) if owner is None]
        keep = (occupied + free)[:size]
        self.slots = self.engine._program("compact", _compact)(self.slots, np.asarray(keep, np.int32))
        self.owner = [self.owner[slot] for slot in keep]
        self.num_slots = size
