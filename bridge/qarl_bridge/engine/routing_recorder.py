# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Records the experts that each token uses in a live vLLM engine, so that the learner can replay them.

If two router logits are nearly equal (in bf16 often exactly), sampler and learner may choose different experts. This is
the largest mismatch of an MoE model. vLLM 0.32 records experts only under its newer model runner, which has no CPU
build. But its routers, in 0.25 as in 0.32, pass every choice to a callback set by `set_capture_fn`. The callback gets
rows of a batch; the recorder assigns them to requests by the scheduler's output and the order of the runner's batch.

A replayed CUDA graph does not call Python, but repeats the callback's tensor operations. So routers write their choices
into a persistent buffer inside the forward pass, and each step's rows are copied from it. The recorder must be in place
before graphs are captured (worker.py).

It needs an engine in this process, not compiled, without prefix caching (a cached prefix is not routed again).
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from qarl_bridge.protocol.errors import BridgeError

_LAYER = re.compile(r"\.layers\.(\d+)\.")
NOT_ROUTED = -1


class _Step(NamedTuple):
    """The recorded experts of one engine step, not yet assigned to requests.

    Attributes:
      rows: int16 [tokens, layers, k], perhaps still being copied to the host.
      copied: CUDA event of the copy's end; None: the rows are on the host.
      pieces: (request, its first position, number of rows), in the order of rows.
      ended: requests that had ended before the step.
    """

    rows: torch.Tensor
    copied: Any
    pieces: list[tuple[str, int, int]]
    ended: set[str]


class Recorder:
    """Records the routed experts of every running request, by callbacks in the routers of a live model.

    Args:
      modules: the model's modules by name.
      runner: vLLM's model runner.
      num_layers: number of decoder layers; rows of a dense layer hold -1.
      num_chosen: number k of experts per token.
      max_rows: limit of tokens in one step.

    Raises:
      BridgeError("setup"): the model has no router, or this vLLM cannot record it.
    """

    def __init__(self, modules: Mapping[str, Any], runner: Any, *, num_layers: int, num_chosen: int, max_rows: int):
        self._runner = runner
        self._layers: list[int] = []  # those that route
        self._kept: dict[str, dict[int, np.ndarray]] = {}  # request -> first position -> [n, layers, k]
        self._under_way: collections.deque[_Step] = collections.deque()
        self._ended: set[str] = set()
        if not hasattr(runner, "input_batch") and not hasattr(runner, "execute_model_state"):
            raise BridgeError(
                "this vLLM's model runner does not tell whose tokens a step has: set rollout.router_replay=false",
                "setup",
            )
        for name, module in modules.items():
            router = getattr(module, "router", None)
            place = _LAYER.search(f".{name}.")
            if place and router is not None and hasattr(router, "set_capture_fn"):
                experts = getattr(module, "routed_experts", module)
                if getattr(getattr(experts, "quant_method", None), "is_monolithic", False):
                    raise BridgeError(
                        f"the kernel of {name} routes by itself and tells nobody: set rollout.router_replay=false",
                        "setup",
                    )
                router.set_capture_fn(functools.partial(self._tell, int(place[1])))
                self._layers.append(int(place[1]))
        if not self._layers:
            raise BridgeError("this model routes nothing: recording routed experts needs an MoE model", "setup")
        shape = (max_rows, num_layers, num_chosen)
        self._chosen = torch.full(shape, NOT_ROUTED, dtype=torch.int16, device=runner.device)
        self._execute = runner.execute_model
        runner.execute_model = self._run

    def _tell(self, layer: int, chosen: Any) -> None:
        self._chosen[: chosen.shape[0], layer].copy_(chosen)

    def _run(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._execute(scheduled, *args, **kwargs)
        self._ended |= scheduled.finished_req_ids
        counts: Mapping[str, int] = scheduled.num_scheduled_tokens
        total = sum(counts.values())
        if not total or kwargs.get("dummy_run"):
            return result
        starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        # The batch's rows are in this order. vLLM's second runner has a batch for each step.
        batch = getattr(self._runner, "input_batch", None) or self._runner.execute_model_state.input_batch
        pieces = [(request, starts[request], counts[request]) for request in batch.req_ids if counts.get(request)]
        rows = self._chosen[:total].to("cpu", torch.int16, non_blocking=True, copy=True)  # a padded batch has more rows
        self._under_way.append(_Step(rows, self._event(), pieces, self._ended))
        self._ended = set()
        self._chosen[:total].fill_(NOT_ROUTED)
        self._settle()
        return result

    def _event(self) -> Any:
        """Records a CUDA event after all work launched so far; returns None on a CPU."""
        if not self._chosen.is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _settle(self, *, wait: bool = False) -> None:
        """Assigns copied rows to their requests; with `wait` it waits for all copies. A wait in every step would keep
        vLLM from scheduling the next step while the GPU runs."""
        while self._under_way:
            step = self._under_way[0]
            if step.copied is not None and not step.copied.query():
                if not wait:
                    return
                step.copied.synchronize()
            self._under_way.popleft()
            rows = step.rows.numpy()
            if (rows[:, self._layers] == NOT_ROUTED).any():
                raise RuntimeError("a step did not record its routed experts: set rollout.router_replay=false")
            for request in step.ended:  # taken, or aborted with a step under way
                self._kept.pop(request, None)
            at = 0
            for request, start, count in step.pieces:
                if start == 0:  # it begins, or begins again after it was preempted
                    self._kept[request] = {}
                if request in self._kept:  # otherwise it was taken before vLLM knew that its step was not needed
                    # Not a view: it would hold the whole step.
                    self._kept[request][start] = rows[at : at + count].copy()
                at += count

    def take(self, request: str, length: int) -> np.ndarray:
        """Removes and returns the experts of one request's first `length` positions, int16 [length, layers, k].

        vLLM computes a preempted request again from its start; only the last computation is returned.
        """
        self._settle(wait=True)
        # vLLM adds a suffix of its own to the name it was given.
        name = next((n for n in self._kept if n == request or n.rpartition("-")[0] == request), None)
        if name is None:
            raise RuntimeError(f"request {request}: its routing was not recorded")
        pieces = self._kept.pop(name)
        shape = next(iter(pieces.values())).shape[1:]
        out = np.full((length, *shape), NOT_ROUTED, np.int16)
        covered = np.zeros(length, bool)
        for start, piece in pieces.items():  # in the order they were computed
            stop = min(start + len(piece), length)
            out[start:stop] = piece[: stop - start]
            covered[start:stop] = True
        if not covered.all():
            raise RuntimeError(f"request {request}: position {int(np.argmin(covered))} was not routed")
        return out

    def forget(self, requests: list[str]) -> None:
        """Drops the records of aborted requests."""
        self._settle(wait=True)
        for name in [n for n in self._kept if n in requests or n.rpartition("-")[0] in requests]:
            del self._kept[name]
