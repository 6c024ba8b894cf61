# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The publishing lease: one connection at a time may publish, and never an outdated process of a resumed run."""

from __future__ import annotations

from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.transport.zeromq import Peer


class Lease:
    """The publishing lease and its current and last holder. Callers hold the bridge's lock.

    Attributes:
      owner: the connection that holds the lease; None: free.
      run_id, incarnation: the holder's. The incarnation grows each time a run is started or resumed.
    """

    def __init__(self) -> None:
        self.owner: Peer | None = None
        self.run_id: str | None = None
        self.incarnation = 0
        self._last = ("", 0)

    def keeps_out(self, peer: Peer) -> bool:
        """Tells whether a connection other than `peer` holds the lease."""
        return self.owner not in (None, peer)

    def acquire(self, run_id: str, incarnation: int, peer: Peer) -> None:
        """Gives the lease to `peer`.

        Raises:
          BridgeError: another connection holds it ("lease"), or the run was resumed with a later incarnation ("stale").
        """
        if self.keeps_out(peer):
            raise BridgeError(
                f"another trainer (run {self.run_id}, incarnation {self.incarnation}) publishes to this bridge: "
                "stop it, or start a bridge of your own",
                "lease",
            )
        last_run, last = self._last
        if last_run == run_id and incarnation < last:
            raise BridgeError(f"run {run_id} was resumed since: incarnation {incarnation} < {last}", "stale")
        self.owner, self.run_id, self.incarnation = peer, run_id, incarnation
        self._last = (run_id, incarnation)

    def require(self, peer: Peer, version: messages.Version | None = None) -> None:
        """Raises BridgeError("lease") unless `peer` holds the lease and `version` belongs to its run."""
        if self.owner is not peer:
            raise BridgeError("publishing needs the lease: send Acquire first", "lease")
        if version is not None and (version.run_id, version.incarnation) != (self.run_id, self.incarnation):
            raise BridgeError(f"{version} is not of the leased {self.run_id}/{self.incarnation}", "lease")

    def end(self) -> None:
        """Ends the lease."""
        self.owner = self.run_id = None
