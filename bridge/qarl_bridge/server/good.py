# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Keeps the bytes of the serving version: to restore it, to read it back, and to apply the next changes to it.

A version is complete, or partial: it replaces some tensors of a complete one (`messages.Manifest.base`). The bridge
keeps the complete version and the last partial one over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qarl_bridge.protocol import messages
from qarl_bridge.protocol.errors import BridgeError
from qarl_bridge.server.chunked import ChunkedCopy
from qarl_bridge.server.staged import Copy
from qarl_bridge.transport.zeromq import Peer


class Good:
    """The last good version: a complete version and, if one was published, the last partial version over it.

    Callers hold the bridge's lock or run on the engine's thread. Other threads may change it by `forget` only.

    Attributes:
      serving: digest of the serving version's manifest.
      complete: manifest of the complete version in the engine; None: unknown.
      is_read_back: whether the complete version was read back after its load.
      last: copy of the version that was loaded last; None: not kept.
    """

    def __init__(self) -> None:
        self.serving = b""
        self.complete: messages.Manifest | None = None
        self.is_read_back = False
        self.last: Copy | None = None
        self._base: Copy | None = None  # of the complete version; `last` itself where this serves
        self._owners: dict[int, Peer | None] = {}  # whose memory a copy lies in, if not this process's own
        self._replaced: frozenset[str] = frozenset()
        self._trainer: tuple[str, int] | None = None

    def check(self, manifest: messages.Manifest) -> None:
        """Refuses a partial version whose base is not what the engine holds.

        Raises:
          BridgeError: the engine has another base or none ("base"; "foreign_base" if another trainer or the folder
            put it there), or a tensor that should stay was replaced ("torn"; "base" if another trainer replaced it).
        """
        if not manifest.base:
            return
        names, found = {entry.name for entry in manifest.tensors}, "no base"
        lost = sorted(self._replaced - names)
        if self.complete is not None:
            held, own = self.complete.kept(names), self._trainer == _trainer(manifest)
            if held == manifest.base and not lost:
                return
            if held != manifest.base and not own:
                raise BridgeError(
                    f"the engine holds another base, of fingerprint {held.hex()[:12]} from {self.complete.version};"
                    f" that of {manifest.version} has {manifest.base.hex()[:12]}: start the bridge again, from the"
                    " run's model folder or without weights",
                    "foreign_base",
                )
            found = f"one of fingerprint {held.hex()[:12]}"
            if held == manifest.base and own:
                raise BridgeError(
                    f"{manifest.version} lacks {len(lost)} tensor(s) that the version before it replaced, first:"
                    f" {lost[0]}",
                    "torn",
                )
            if held == manifest.base:
                found = f"it with {lost[0]} replaced"
        raise BridgeError(
            f"{manifest.version} is over a base of fingerprint {manifest.base.hex()[:12]}, and the engine holds"
            f" {found}: publish the base first",
            "base",
        )

    def put(self, copy: Copy, owner: Peer | None, *, is_read_back: bool) -> list[Copy]:
        """Stores the copy of the version that serves from now on; returns the copies that the caller must close."""
        before = self._copies()
        self.serving, self._trainer = copy.manifest.digest, _trainer(copy.manifest)
        self.last = None if isinstance(copy, ChunkedCopy) else copy  # nothing is left of a chunked one
        if copy.manifest.base:
            self._replaced = frozenset(entry.name for entry in copy.manifest.tensors)
        else:
            self._base, self.complete, self._replaced = self.last, copy.manifest, frozenset()
            self.is_read_back = is_read_back
        kept = self._copies()
        self._owners = {number: peer for number, peer in self._owners.items() if number in map(id, kept)}
        if self.keeps(copy):
            self._owners[id(copy)] = owner
        return [one for one in before if not any(one is other for other in kept)]

    def _copies(self) -> list[Copy]:
        copies = [self._base, *([self.last] if self.last is not self._base else [])]
        return [copy for copy in copies if copy is not None]

    def keeps(self, copy: Copy) -> bool:
        """Tells whether a copy is one of the kept ones."""
        return any(copy is one for one in self._copies())

    def forget(self, peer: Peer) -> list[Copy]:
        """Drops and returns the copies that lie in the memory of `peer`, whose process has ended."""
        gone = [copy for copy in self._copies() if copy.borrowed and self._owners.get(id(copy)) is peer]
        for copy in gone:
            self.last = None if self.last is copy else self.last
            self._base = None if self._base is copy else self._base
        return gone

    def lose(self) -> None:
        """Records that the engine's weights are unknown, after a failed load."""
        self.serving, self.complete = b"", None

    def clear(self) -> list[Copy]:
        """Drops and returns all copies; the caller closes them."""
        gone = self._copies()
        self.last = self._base = None
        return gone

    @property
    def is_there(self) -> bool:
        """Tells whether all bytes of the serving version are kept, so that it can be restored."""
        return self.last is not None and self._base is not None

    def sweep(self, begin: Callable[[Copy], Iterator[Mapping[str, Any]]]) -> Iterator[Mapping[str, Any]]:
        """Yields all tensors of the serving version, in parts: first the base's, without replaced ones, then the rest.

        Args:
          begin: a function that calls `parts` or `checked_parts` of a copy.
        """
        assert self.last is not None
        assert self._base is not None
        for part in begin(self._base):
            yield {name: tensor for name, tensor in part.items() if name not in self._replaced}
        if self._base is not self.last:
            yield from begin(self.last)

    def confirm(self) -> None:
        """Checks that kept copies did not change while they were read; BridgeError("torn") otherwise."""
        for copy in self._copies():
            copy.confirm()


def _trainer(manifest: messages.Manifest) -> tuple[str, int]:
    return manifest.version.run_id, manifest.version.incarnation
