# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts, watches and stops a bridge as a child process of the trainer.

    bridge = BridgeProcess(arguments=["--options", "{...}"])
    address, key = bridge.start(config_json, expected)         # returns at once: it answers when the engine is up
    bridge.has_ended, bridge.last_words()
    bridge.stop()                                              # and start again on the same folder, or close()

Each bridge has a private folder (mode 0700): a model without weights, a key, a socket, a log. A killed trainer leaves
the folder behind, and the next trainer removes it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from qarl_bridge.client import sender
from qarl_bridge.protocol import messages
from qarl_bridge.protocol.one_base import FILE, Place

from qarl_jax.types import UserError

_LOG_TAIL_BYTES = 30_000
_MOST_WORDS = 2000  # characters of a sentence


class BridgeProcess:
    """Runs at most one `python -m qarl_bridge` at a time.

    Args:
      arguments: further arguments of its command line.
      python: interpreter; empty: the trainer's.
      visible_gpus: its CUDA_VISIBLE_DEVICES; empty: the trainer's.
      log_file: file that its output is appended to; empty: bridge.log in its folder.

    Attributes:
      base: buffers of a frozen base in the trainer's memory (`one_base.OneBase.places`), passed to each new bridge.
    """

    def __init__(self, *, arguments: Sequence[str], python: str = "", visible_gpus: str = "", log_file: str = ""):
        self._arguments = list(arguments)
        self._python = python or sys.executable
        self._visible_gpus = visible_gpus
        self._log_file = log_file
        self._scratch: messages.Scratch | None = None
        self._log_begin = 0  # of what the process that was started last wrote
        self.process: subprocess.Popen | None = None
        self.base: Sequence[Place] = ()

    def start(self, config: Mapping[str, Any], expected: Iterable[messages.Expected]) -> tuple[str, bytes]:
        """Starts a bridge and returns its (address, key); stops a running one first.

        Args:
          config: the model's config.json. expected: name, dtype and shape of every tensor of a version.

        Raises:
          UserError: there is no such interpreter; no folder is short enough for a unix socket.
        """
        self.stop()
        if self._scratch is None:
            try:
                self._scratch = messages.Scratch("qarl-bridge-")
            except messages.BridgeError as error:
                raise UserError(f"cannot start the vLLM bridge: {error}") from None
        assert self.folder is not None
        model, address, key_file = (os.path.join(self.folder, name) for name in ("model", "socket", "key"))
        sender.write_folder(model, config, expected)
        sender.write_file(model, FILE, msgspec.json.encode(list(self.base)))
        if not os.path.exists(key_file):
            messages.create_key(key_file)
        command = [
            self._python, "-m", "qarl_bridge", "--socket", address, "--model", model, "--key-file", key_file,
            "--parent-pid", str(os.getpid()), *self._arguments,
        ]  # fmt: skip
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
        if self._visible_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self._visible_gpus
        try:
            with open(self._log_path(), "ab") as log:
                self._log_begin = log.tell()
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is the trainer's to handle
                )
        except OSError as error:
            raise UserError(
                f"cannot start the vLLM bridge with {self._python} (rollout.engine.python): {error}"
            ) from None
        return address, messages.read_key(key_file)

    @property
    def folder(self) -> str | None:
        """The bridge's folder; None before the first start and after `close`."""
        return None if self._scratch is None else self._scratch.path

    @property
    def is_started(self) -> bool:
        """Tells whether a bridge was started and not stopped."""
        return self.process is not None

    @property
    def has_ended(self) -> bool:
        """Tells whether a bridge was started and its process has ended."""
        return self.process is not None and self.process.poll() is not None

    def _log_path(self) -> str:
        return self._log_file or os.path.join(self.folder or "", "bridge.log")

    def last_words(self) -> str:
        """Returns the last error in the bridge's log, else the log's end; with the log file's path if it is kept."""
        try:
            with open(self._log_path(), "rb") as file:
                file.seek(max(self._log_begin, os.path.getsize(self._log_path()) - _LOG_TAIL_BYTES))
                text = file.read().decode(errors="replace").strip()
        except OSError:
            text = ""
        lines = text.splitlines() or ["no output"]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error:")]
        words = errors[-1][:_MOST_WORDS] if errors else "\n".join(lines[-15:])[-_MOST_WORDS:]
        return f"{words} (all that it said: {self._log_file})" if self._log_file else words

    def kill(self, patience_s: float) -> int | None:
        """Kills the bridge. Returns its exit code if it ended by itself within `patience_s` seconds, else None."""
        code = None
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.process.wait(patience_s)
            self.process.kill()
        self.stop()
        return code

    def stop(self, grace_s: float = 0.0) -> None:
        """Stops the bridge: waits `grace_s` seconds, then sends SIGTERM, then SIGKILL. Idempotent."""
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        for stop in (process.terminate, process.kill):
            if process.poll() is not None:
                return
            stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)

    def close(self, grace_s: float = 0.0) -> None:
        """Stops the bridge and removes its folder. Idempotent."""
        self.stop(grace_s)
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None
