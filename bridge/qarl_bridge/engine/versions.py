# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapts the bridge to vLLM's versions, from 0.25.1 (CUDA) to 0.32 (CPU build).

The interfaces that the bridge uses, and their differences (from the sources of both versions):

| interface                       | 0.25.1                       | 0.32                                       |
|---------------------------------|------------------------------|--------------------------------------------|
| engine in this process          | `LLMEngine.model_executor`   | the same                                   |
| worker                          | `driver_worker.worker`       | the same                                   |
| `worker.reload_weights`         | the runner's own method      | forwards to model_loader/reload/inplace.py |
| modules of the reload machinery | reload/{layerwise,meta}.py   | the same, and aliased buffers              |
| KV cache tensors                | `model_runner.kv_caches`     | the same                                   |
| int4 with int8 activations      | none                         | CompressedTensorsWNA8Int                   |
| FlashAttention's `num_splits`   | heuristic                    | the same                                   |
| fp8 products of up to 64 rows   | operands and scales swapped  | the same (sm90)                            |
| dense models' runner            | v1/worker/gpu ("V2")         | the same                                   |
| labels of weight versions       | none                         | `update_weight_version` (a label, unused)  |

An untested version is started, too, and the engine's facts note it: the read-back checks its live weights anyway.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from qarl_bridge.protocol import messages
from qarl_bridge.protocol.errors import BridgeError

ASKED = "qarl_bridge"  # of vLLM's additional_config: what worker.BridgeWorker adds to the model
TESTED = ((0, 25), (0, 32))
# vLLM's own ops in CUDA graphs, without inductor: a decoding step is replayed, a prefill runs op by op.
_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def release(text: str) -> tuple[int, int]:
    """Parses a version string: "0.25.1+cu130" gives (0, 25)."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def untested_note(text: str) -> list[str]:
    """Returns a note for the engine's facts if this vLLM version is untested; otherwise an empty list."""
    if release(text) in TESTED:
        return []
    known = ", ".join(".".join(map(str, pair)) for pair in TESTED)
    return [f"vLLM {text} was not tried with this bridge (tried: {known}); the read-back checks what it holds"]


def execution_of(options: messages.EngineOptions, on_gpu: bool) -> str:
    """Chooses the execution mode of an engine: "eager", "graphs" (CUDA graphs) or "compiled".

    Raises:
      BridgeError("setup"): arithmetic=vllm on a CPU.
    """
    invariant = options.arithmetic == "batch_invariant"
    if not on_gpu and not invariant:
        raise BridgeError(
            "arithmetic=vllm needs a CUDA GPU: on a CPU the engine computes with the bridge's operations alone; leave "
            "rollout.engine.arithmetic at batch_invariant",
            "setup",
        )
    return "eager" if options.eager or not on_gpu else "graphs" if invariant else "compiled"


def engine_arguments(
    options: messages.EngineOptions,
    *,
    path: str,
    has_weights: bool,
    on_gpu: bool,
    adapters: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Builds vLLM's EngineArgs. adapters: shapes of adapter tensors, by name. Raises as `execution_of`."""
    execution = execution_of(options, on_gpu)
    arguments: dict[str, Any] = {
        "model": path,
        "skip_tokenizer_init": True,
        "enforce_eager": execution == "eager",
        "dtype": "bfloat16",
        "seed": 0,  # every draw has its own
        "load_format": "safetensors" if has_weights else "dummy",
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "max_num_seqs": options.max_num_seqs,
        "disable_log_stats": True,
        "trust_remote_code": False,
    }
    if execution == "graphs":
        arguments["compilation_config"] = dict(_GRAPHS)
    if options.max_model_len:
        arguments["max_model_len"] = options.max_model_len
    if options.max_num_batched_tokens:
        arguments["max_num_batched_tokens"] = options.max_num_batched_tokens
    if options.kv_cache_gb:
        arguments["kv_cache_memory_bytes"] = int(options.kv_cache_gb * 2**30)
    if options.record_routing:
        arguments["enable_prefix_caching"] = False  # a cached prefix is not routed again
    if options.record_routing or adapters:
        asked = {"record_routing": options.record_routing, "adapters": dict(adapters or {})}
        arguments["additional_config"] = {ASKED: asked}
        arguments["worker_cls"] = "qarl_bridge.engine.worker.BridgeWorker"
    return arguments


def keep_sequences_whole(module: str = "vllm.v1.attention.backends.flash_attn") -> str:
    """Makes FlashAttention-3 batch-invariant: it patches vLLM's backend. Call it before an engine starts.

    By default FlashAttention-3 chooses by batch size into how many parts it splits a sequence's keys, so a token's bits
    depend on its batch. vLLM's only setting against it is its batch-invariant mode, which replaces most other kernels,
    too. So the backend's two functions get `num_splits=1` here. For heads of up to 64 the kernel also chooses blocks of
    192 or 128 keys by the batch; see `_one_order`.

    Returns:
      A sentence that says what is not batch-invariant, or "".
    """
    unknown = "attention may split long sequences: this vLLM's FlashAttention backend is not the one known here"
    try:
        backend = importlib.import_module(module)
    except ImportError:
        return unknown
    found = [name for name in ("flash_attn_varlen_func", "get_scheduler_metadata") if callable(vars(backend).get(name))]
    for name in found:
        setattr(backend, name, _in_one_order(getattr(backend, name)))
    return unknown if len(found) < 2 else ""


def _in_one_order(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        return function(*args, **named | _one_order(named))

    return call


# With as many queries in a sequence FlashAttention-3 takes neither of its two shortcuts.
_MANY_QUERIES = 128


def _one_order(named: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments that replace vLLM's in a call of FlashAttention-3.

    For heads of up to 64 the kernel drops the causal mask if each sequence has a single query. It takes one group of
    threads if few queries share a head. Both read 192 keys at a time; a prompt reads 128 (tile_size.h). The largest
    number of queries is a bound for the kernel's grid, so a larger bound changes nothing else.
    """
    head_dim = named["headdim"] if "headdim" in named else named["q"].shape[-1] if "q" in named else 0
    if not 0 < head_dim <= 64:
        return {"num_splits": 1}
    return {"num_splits": 1, "max_seqlen_q": max(named["max_seqlen_q"], _MANY_QUERIES)}


def put_first(table: dict[Any, list[type]], platform: Any, kernel: type) -> None:
    """Puts a linear kernel in front of vLLM's candidates for a platform (idempotent).

    `register_linear_kernel()` of vLLM can only append, after kernels that claim the layer.
    """
    kernels = table.setdefault(platform, [])
    if kernel not in kernels:
        kernels.insert(0, kernel)


# vLLM's CUTLASS product of fp8 on sm90 swaps its operands for fewer rows (scaled_mm_sm90_fp8_dispatch.cuh).
_LEAST_FP8_ROWS = 65


def keep_fp8_scales_in_order(module: str = "vllm.model_executor.kernels.linear.scaled_mm.cutlass") -> str:
    """Makes vLLM's fp8 matrix product batch-invariant: it pads inputs to 65 rows. Call it before an engine starts.

    For up to 64 rows vLLM's kernel swaps its operands and multiplies by the activation's scale before the weight's.
    This moves one output in 100,000 by an ulp, so a decoding step and a prefill give a token different bits.

    Returns:
      A sentence that says what is not batch-invariant, or "".
    """
    unknown = "fp8 products of up to 64 rows may order scales differently: this vLLM's kernel is not the one known here"
    try:
        kernel = importlib.import_module(module).CutlassFP8ScaledMMLinearKernel
        product = kernel.apply_scaled_mm
    except (ImportError, AttributeError):
        return unknown
    kernel.apply_scaled_mm = _with_rows(product)
    return ""


def _with_rows(product: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(product)
    def call(self: Any, *, A: Any, As: Any, output_shape: list[int], **named: Any) -> Any:
        rows = A.shape[0]
        if tuple(As.shape) != (rows, 1):  # one scale for all rows: in either order the same
            return product(self, A=A, As=As, output_shape=output_shape, **named)
        A, As = _filled_up(A, As)
        y = product(self, A=A, As=As, output_shape=[len(A), output_shape[-1]], **named)[:rows]
        return y.view(*output_shape[:-1], y.shape[-1])

    return call


def _filled_up(codes: Any, scales: Any) -> tuple[Any, Any]:
    """Pads float8 codes [M, K] and scales [M, 1] to at least 65 rows, for which the kernel does not swap operands."""
    rows = len(codes)
    if rows >= _LEAST_FP8_ROWS:
        return codes, scales
    more = codes.new_empty((_LEAST_FP8_ROWS, codes.shape[1]))
    theirs = scales.new_empty((_LEAST_FP8_ROWS, 1))
    more[:rows], theirs[:rows] = codes, scales  # a row's result depends on no other row, whatever that holds
    return more, theirs


class Worker:
    """A wrapper of the worker of an in-process vLLM engine: model, weight reload and KV cache."""

    def __init__(self, engine: Any):
        self._engine = engine
        self._worker = engine.model_executor.driver_worker.worker
        self.model = self._worker.get_model()
        self.runner = self._worker.model_runner
        self.recorder = getattr(self._worker, "recorder", None)  # worker.BridgeWorker's
        self.adapters = getattr(self._worker, "adapters", None)
        self.met = _count_what_requests_meet(engine.engine_core.engine_core.scheduler)
        # It warns of every module that a reload was not meant for; what they hold is the read-back's business.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

    def config(self) -> contextlib.AbstractContextManager:
        """Returns vLLM's config context, which some layers read while they are reloaded."""
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self._engine.vllm_config)

    def reload(self, tensors: Iterable[tuple[str, Any]] | None = None) -> None:
        """Reloads weights in place by vLLM's loader, from (name, tensor) pairs of a checkpoint, or the model folder."""
        with self.config():
            try:
                if tensors is None:
                    self._worker.reload_weights()
                else:
                    self._worker.reload_weights(weights_iterator=_in_loading_order(tensors))
            except BaseException:
                self._drop_half_loaded()
                raise

    def _drop_half_loaded(self) -> None:
        """Drops the tensors of layers that a broken reload left incomplete. The next reload would count them as its
        own, and complete such a layer with tensors of two versions."""
        layerwise = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
        for module in self.model.modules():
            info = layerwise.get_layerwise_info(module)
            info.loaded_weights.clear()
            info.load_numel = 0

    def forget(self) -> None:
        """Clears the prefix cache and zeroes the KV cache: a NaN of old weights would stay in reused pages."""
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM refused to reset its prefix cache")
        for cache in self.runner.kv_caches:
            for tensor in _tensors(cache):
                tensor.zero_()


def _count_what_requests_meet(scheduler: Any) -> dict[str, int]:
    """Wraps vLLM's scheduler and returns counters of its events, which grow with every step.

    chunks: prompt chunks that did not reach the prompt's end. joined: steps with both decoding and prefill. preempted:
    requests that lost their place in the KV cache. cached_tokens: prompt tokens found in the prefix cache.
    """
    met = dict.fromkeys(("chunks", "joined", "preempted", "cached_tokens"), 0)
    schedule = scheduler.schedule

    @functools.wraps(schedule)
    def counting(*args: Any, **named: Any) -> Any:
        output = schedule(*args, **named)
        met["preempted"] += len(output.preempted_req_ids or ())
        met["cached_tokens"] += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        scheduled = output.num_scheduled_tokens
        if output.total_num_scheduled_tokens != len(scheduled):  # not decoding alone
            requests = [scheduler.requests[name] for name in scheduled]
            met["chunks"] += sum(r.num_computed_tokens < r.num_prompt_tokens for r in requests)
            met["joined"] += 1 in scheduled.values()
        return output

    scheduler.schedule = counting
    return met


def _in_loading_order(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Reorders a layer's tensors: the `weight_shape` tensors of int4 experts come last.

    vLLM counts elements to know when a layer is complete. An expert's gate and up each have a shape tensor, but share
    one parameter. Counted twice, shapes would complete a layer of many small experts before its last tensors arrive.
    """
    layer = ""
    shapes: list[tuple[str, Any]] = []
    for name, tensor in tensors:
        of = name[: name.find(".experts.") + 1]
        if of != layer:
            yield from shapes
            layer, shapes = of, []
        if of and name.endswith(".weight_shape"):
            shapes.append((name, tensor))
        else:
            yield name, tensor
    yield from shapes


def _tensors(cache: Any) -> Iterator[Any]:
    """Yields the tensors of a layer's KV cache, which is one tensor or a nested sequence of them."""
    if isinstance(cache, (list, tuple)):
        for part in cache:
            yield from _tensors(part)
    else:
        yield cache
