# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The bytes of what serves: to restore it, to compare it with the live engine, and to make the next version of it.

A version is complete, or it replaces some tensors of a complete one (`messages.Manifest.base`). The bridge keeps the
complete one, and of those over it the last.
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
    """The versions that make what serves. Callers hold the bridge's lock, or are the engine's thread, which alone
    changes it but for `forget`.

    Attributes:
      serving: the digest of the manifest that serves.
      complete: the manifest of the complete version under it; None: the engine holds none that is known.
      is_read_back: whether the engine was compared with that.
      last: the copy that came last; None: it is not kept.
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
        """Refuses a partial version that would not be what its manifest says.

        Raises:
          BridgeError: its base is not in the engine ("base"; "foreign_base" where another trainer or the folder put
            one there), or a tensor that it keeps was replaced there ("torn"; "base" where another trainer did it).
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
        """Takes in a copy that serves from now on; returns those that are not needed any more."""
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
        """Tells whether this copy is one of them."""
        return any(copy is one for one in self._copies())

    def forget(self, peer: Peer) -> list[Copy]:
        """Lets go of copies in memory that ends with its owner."""
        gone = [copy for copy in self._copies() if copy.borrowed and self._owners.get(id(copy)) is peer]
        for copy in gone:
            self.last = None if self.last is copy else self.last
            self._base = None if self._base is copy else self._base
        return gone

    def lose(self) -> None:
        """Notes that the engine holds no version that is known."""
        self.serving, self.complete = b"", None

    def clear(self) -> list[Copy]:
        """Lets go of all copies."""
        gone = self._copies()
        self.last = self._base = None
        return gone

    @property
    def is_there(self) -> bool:
        """Tells whether all bytes of what serves are kept."""
        return self.last is not None and self._base is not None

    def sweep(self, begin: Callable[[Copy], Iterator[Mapping[str, Any]]]) -> Iterator[Mapping[str, Any]]:
        """Yields all tensors of what serves, in parts: those of the base that were not replaced, then the others.

        Args:
          begin: `parts` or `checked_parts`, of a copy.
        """
        assert self.last is not None
        assert self._base is not None
        for part in begin(self._base):
            yield {name: tensor for name, tensor in part.items() if name not in self._replaced}
        if self._base is not self.last:
            yield from begin(self.last)

    def confirm(self) -> None:
        """Raises BridgeError("torn") if bytes may have changed while they were read."""
        for copy in self._copies():
            copy.confirm()


def _trainer(manifest: messages.Manifest) -> tuple[str, int]:
    return manifest.version.run_id, manifest.version.incarnation
