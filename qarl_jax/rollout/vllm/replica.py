# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One engine of a fleet: its bridge, started by the trainer or by hand, and the connections to it.

    replica = Replica("the vLLM bridge", config, run_id="run", incarnation=1)
    replica.connect(model_json, expected)          # starts the process if the trainer owns it, and takes the lease
    replica.publish(staged)
    replica.draw(draws, sampling, ...)             # from any number of threads at once
    replica.bury(error)                            # after its death: kills the process, closes the connections

The lease is the sole right to publish to a bridge. One connection holds the lease and sends weights; every request for
completions in flight has a separate connection. All connections end with the bridge's process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from qarl_bridge.client import sender
from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError

from qarl_jax.rollout.vllm.config import Config
from qarl_jax.rollout.vllm.process import BridgeProcess
from qarl_jax.runtime import progress
from qarl_jax.types import UserError

_LEASE_PATIENCE_S = 60.0  # for a bridge to notice that our own last connection is gone: TCP's heartbeats take 25 s
MOST_REQUESTS = 16  # at once, each with a connection (a bridge takes zeromq.MAX_PEERS)


@dataclasses.dataclass(eq=False)
class Life:
    """The time of one bridge process, from its start or first contact to its death."""

    is_over: bool = False


class Replica:
    """A bridge and its connections; see the module docstring.

    Args:
      name: name in messages, e.g. "vLLM bridge 2".
      config: options of the engines. number: of a started bridge, for GPUs and log. address: of one started by hand.
      run_id, incarnation: identify the run and this start of it in version numbers.

    Attributes (guarded by the fleet's lock):
      holds: the version it serves; None: unknown.
      trouble: the fault for which it must be replaced before use. error: why it is left out, until `retry_at`.
      task: the thread that brings it to the current version, if any.
      has_held_lease: True if it was connected once.
      deaths: faults in a row. requests, draws: counts in flight. report: metrics of the last publish.
    """

    def __init__(self, name: str, config: Config, *, run_id: str, incarnation: int, number: int = 0, address: str = ""):
        self.name, self.address = name, address
        self._config, self._run_id, self._incarnation = config, run_id, incarnation
        log_file = f"{config.log_file}.{number}" if config.log_file and config.started > 1 else config.log_file
        self.bridge = BridgeProcess(
            arguments=["--options", config.to_json()],
            python=config.python,
            visible_gpus=config.gpus_of(number),
            log_file=log_file,
        )
        self._started = time.monotonic()  # the bridge, last
        self.start_s = 0.0  # until it answered
        self._prepared: tuple[str, bytes] | None = None  # address and key of a process that is starting
        self.life = Life()
        self.client: sender.Client | None = None
        self.facts: messages.Facts | None = None
        self._idle: list[sender.Client] = []  # connections that draw, between requests
        self._place: tuple[str, bytes] = ("", b"")
        self.has_held_lease = False
        self.holds: sender.Version | None = None
        self.trouble: BridgeError | None = None
        self.error: Exception | None = None
        self.retry_at = 0.0
        self.task: threading.Thread | None = None
        self.deaths = self.restarts = self.requests = self.draws = 0
        self.report: dict[str, float] = {}

    @property
    def has_room(self) -> bool:
        """Tells whether to send more draws now; a quarter of a batch may wait, so that the engine never idles."""
        return self.requests < MOST_REQUESTS and 4 * self.draws < 5 * self._config.max_num_seqs

    def serves(self, version: sender.Version | None) -> bool:
        """Tells whether requests may be sent to it: it holds `version` and has no fault."""
        return self.trouble is None and self.error is None and version is not None and self.holds is version

    # ---- to life, with the lease -------------------------------------------------------------------------------------

    def start(self, model_json: Mapping[str, Any], expected: Iterable[messages.Expected]) -> None:
        """Starts the bridge's process (`BridgeProcess.start`), unless it runs or was started by hand. Does not wait."""
        if not self.address and self._prepared is None and self.client is None:
            self._started = time.monotonic()
            self._prepared = self.bridge.start(model_json, expected)

    def connect(self, model_json: Mapping[str, Any], expected: Iterable[messages.Expected]) -> messages.Facts:
        """Starts the bridge unless it runs, connects to it and takes the lease. Returns the engine's facts.

        Raises:
          UserError: the bridge's process did not start or ended, or gave no answer in `start_timeout_s` seconds.
          BridgeError: as `sender.Client`; "lease": another trainer has the lease; "auth": the key file is unusable.
        """
        config = self._config
        life = self.life = Life()
        self.start(model_json, expected)
        if self.address:
            self._place = self.address, messages.read_key(config.key_file)
        else:
            assert self._prepared is not None
            self._place, self._prepared = self._prepared, None
        deadline = time.monotonic() + config.start_timeout_s
        with self._waiting():
            client = self._first_contact(deadline, lambda: life.is_over)
        self.start_s = time.monotonic() - self._started
        client.set_timeout(config.request_timeout_s)
        try:
            self._acquire(client, life)
        except BaseException:
            client.close()
            raise
        self.has_held_lease = True
        self.client, self.facts = client, client.facts
        return client.facts

    def _first_contact(self, deadline: float, is_over: Callable[[], bool]) -> sender.Client:
        """A client of a bridge that may have to start first."""
        while True:
            try:
                left = max(1.0, deadline - time.monotonic())
                return sender.Client(*self._place, timeout_s=left, is_over=is_over)
            except BridgeError as error:
                if error.code != "dead" or is_over():
                    raise
                if self.bridge.has_ended:
                    raise UserError(f"{self.name} did not start: {self.bridge.last_words()}") from error
                if time.monotonic() > deadline:
                    raise UserError(f"vLLM bridge: {error} (waited {self._config.start_timeout_s:g} s)") from error
                time.sleep(0.1)

    def _acquire(self, client: sender.Client, life: Life) -> None:
        deadline = time.monotonic() + _LEASE_PATIENCE_S
        while True:
            try:
                return client.acquire(self._run_id, self._incarnation)
            except BridgeError as error:
                mine = self.has_held_lease and not life.is_over  # our last connection, which it still believes in
                if error.code != "lease" or not mine or time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def _waiting(self) -> contextlib.AbstractContextManager[progress.Task]:
        """Shows what is being waited for, and how long at most."""
        what = f"{self.name.replace('the vLLM', 'its vLLM')} to start"
        if self.address:
            what = f"the bridge at {self.address} (rollout.engine.endpoints) to answer"
        limit = f"{self._config.start_timeout_s:g} s at most (rollout.engine.start_timeout_s)"
        return progress.task(f"waiting for {what}, {limit}")

    # ---- what it is for ----------------------------------------------------------------------------------------------

    def publish(self, staged: sender.Version) -> dict[str, float]:
        """Publishes a version to the engine. Returns seconds, bytes and counts (`sender.Client.publish`)."""
        assert self.client is not None
        return self.client.publish(staged, readback=self._config.readback)

    def ask(self, call: Callable[[sender.Client], Any]) -> Any:
        """Calls `call` with a connection that no other request uses, and returns its result."""
        life = self.life

        def is_over() -> bool:
            return life.is_over

        try:
            client = self._idle.pop()
        except IndexError:
            client = sender.Client(*self._place, timeout_s=self._config.request_timeout_s, is_over=is_over)
        try:
            result = call(client)
        except BridgeError as error:
            if error.code == "limits":  # a request refused leaves the connection as it was
                self._keep(client, life)
            else:
                client.close()
            raise
        except BaseException:
            client.close()
            raise
        self._keep(client, life)
        return result

    def _keep(self, client: sender.Client, life: Life) -> None:
        if life is self.life and not life.is_over:
            self._idle.append(client)
        else:
            client.close()

    # ---- its end -----------------------------------------------------------------------------------------------------

    def bury(self, error: BridgeError) -> str:
        """Closes the connections and kills the process after a fault. Returns the error and, if known, exit code."""
        self.hang_up()
        # It broke its word or fell silent: nothing to wait for, but the exit code of one that is gone.
        code = self.bridge.kill(patience_s=5.0 if error.code == "dead" else 0.0)
        return str(error) if code is None else f"{error}; exit code {code}"

    def hang_up(self) -> None:
        """Closes the lease's connection, which frees the lease, and idle ones. A request in flight fails ("dead") and
        closes its own."""
        self.life.is_over = True
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop().close()
        client, self.client = self.client, None
        if client is not None:
            client.close()

    def close(self) -> None:
        """Stops a bridge that the trainer started, and closes connections as `hang_up` does. Idempotent."""
        grace_s = 0.0
        if self.client is not None and self.bridge.is_started:
            with contextlib.suppress(BridgeError):
                self.client.shutdown()
                grace_s = 10.0
        self.hang_up()
        self.bridge.stop(grace_s)
        self.bridge.close()
