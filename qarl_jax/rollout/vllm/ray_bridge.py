# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A bridge on whichever host Ray finds room (`rollout.engine.launch=ray`; needs `pip install "qarl-jax[ray]"`).

    bridges = place(2, gpus=1, cpus=4, arguments=["--options", "{...}"])       # as `process.BridgeProcess`, all of them
    address, key = bridges[0].start(config_json, expected)

All bridges of a run are one placement group, spread over the hosts. An actor on each holds a `BridgeProcess` and ends
with the run, or with its host; the next start then makes another where there is room. What is sent through Ray are the
model's config, the names of its tensors and the bridge's key; weights and completions go over the bridge's own TCP
connection, encrypted. `ray.init` connects to RAY_ADDRESS or to the cluster that was started on this host, and starts
one on this host if there is none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qarl_bridge.protocol import messages

from qarl_jax.rollout.vllm.process import BridgeProcess
from qarl_jax.types import UserError

_ROOM_S = 300.0  # how long to wait for a place
_ANSWER_S = 60.0  # beyond what a call itself may take


class RayBridge:
    """At most one bridge at a time, held by an actor in a bundle of a placement group. See `BridgeProcess`."""

    def __init__(self, group: Any, index: int, gpus: float, cpus: float, options: dict[str, Any]):
        self._group, self._index, self._gpus, self._cpus, self._options = group, index, gpus, cpus, options
        self._actor: Any = None
        self.is_started = False

    def start(self, config: Mapping[str, Any], expected: Iterable[messages.Expected]) -> tuple[str, bytes]:
        """(address, key) of a new bridge; one that runs is stopped first.

        Raises:
          UserError: there is no room for it in the cluster.
        """
        import ray

        expected = list(expected)
        for attempt in (1, 2):  # the actor may have gone with its host
            if self._actor is None:
                self._actor = self._new_actor()
            try:
                found = ray.get(self._actor.ask.remote("start", dict(config), expected), timeout=_ROOM_S)
                self.is_started = True
                return found
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
                self._forget()
                if attempt == 2:
                    need = f"{self._gpus:g} GPUs and {self._cpus:g} CPUs"
                    raise UserError(f"rollout.engine.launch=ray: no place with {need} for a bridge: {error}") from None
        raise AssertionError("unreachable")

    def _new_actor(self) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._index)
        actor = ray.remote(num_gpus=self._gpus, num_cpus=self._cpus, scheduling_strategy=place)(_Holder)
        return actor.remote(self._options)

    def _ask(self, name: str, *arguments: Any, patience_s: float = 0.0) -> Any:
        import ray

        if self._actor is None:
            return None
        try:
            return ray.get(self._actor.ask.remote(name, *arguments), timeout=patience_s + _ANSWER_S)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            self._forget()
            return None

    def _forget(self) -> None:
        import ray

        actor, self._actor, self.is_started = self._actor, None, False
        with contextlib.suppress(Exception):  # it may be gone already
            ray.kill(actor)

    @property
    def has_ended(self) -> bool:
        """Whether a bridge was started and is no more."""
        return self._actor is None or bool(self._ask("has_ended"))

    def last_words(self) -> str:
        """The last error it wrote, else the end of its log."""
        return self._ask("last_words") or "its host is gone"

    def kill(self, patience_s: float) -> int | None:
        """End it without asking; its exit code, if it ended by itself within `patience_s`."""
        self.is_started = False
        return self._ask("kill", patience_s, patience_s=patience_s)

    def stop(self, grace_s: float = 0.0) -> None:
        """End it: after `grace_s` by asking, then by force. Idempotent."""
        self.is_started = False
        self._ask("stop", grace_s, patience_s=grace_s)

    def close(self, grace_s: float = 0.0) -> None:
        """Stop it and let go of its actor. Idempotent."""
        if self._actor is not None:
            self._ask("close", grace_s, patience_s=grace_s)
            self._forget()


class _Holder:
    """The actor: a `BridgeProcess` on its host, which listens on that host's address."""

    def __init__(self, options: dict[str, Any]):
        import ray

        self._bridge = BridgeProcess(**options, host=ray.util.get_node_ip_address())

    def ask(self, name: str, *arguments: Any) -> Any:
        """An attribute of the `BridgeProcess`, or what its method of that name returns."""
        found = getattr(self._bridge, name)
        return found(*arguments) if callable(found) else found


def place(count: int, *, gpus: float, cpus: float, arguments: Sequence[str], **options: Any) -> list[RayBridge]:
    """That many bridges, none of them started.

    Args:
      gpus, cpus: that each is given.
      arguments, options: of each `BridgeProcess`.

    Raises:
      UserError: Ray is not installed, or the cluster has not that much.
    """
    try:
        import ray
        from ray.util import placement_group
    except ImportError:
        raise UserError('rollout.engine.launch=ray needs Ray: pip install "qarl-jax[ray]"') from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    group = placement_group([bundle] * count, strategy="SPREAD")
    if not group.wait(_ROOM_S):
        raise UserError(
            f"rollout.engine.launch=ray: the cluster has no room for {count} engines of {gpus:g} GPUs and {cpus:g} CPUs"
            f" (it has {ray.cluster_resources()}): lower rollout.engine.replicas, ray_gpus or ray_cpus"
        )
    settings = {"arguments": list(arguments)} | options
    return [RayBridge(group, index, gpus, cpus, settings) for index in range(count)]
