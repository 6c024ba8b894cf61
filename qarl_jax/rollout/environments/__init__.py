# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments of multi-turn rollouts: programs that answer the policy between its turns (`rollout.environment`).

An environment is a class. Each response (episode) gets its own object, constructed with the config's options:

    class Environment:
        async def reset(self, task: dict) -> str: ...            # observed before the first turn; usually ""
        async def step(self, text: str) -> tuple[str, float, bool]: ...     # observation, reward, done
        async def close(self) -> None: ...                       # optional: the episode was cut short
        @classmethod
        def prepare(cls, **options) -> None: ...                 # optional: once, for what all episodes share

`task` has the prompt's `uid`, `text`, `answer` and `meta`; `text` is a turn of the policy. An observation is text, or a
list of chat messages. The methods may be plain functions.

Every episode runs in a separate process without an accelerator (`_host.py`); docs/turns.md lists what ends one. A new
built-in environment is a file that the process loads by path (it imports nothing of qarl_jax), and a Config here.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import pickle
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, ClassVar

from qarl_jax.rewards import pool
from qarl_jax.rewards.pool import PoolConfig, Worker, WorkerPool
from qarl_jax.types import UserError, at_least

_HERE = os.path.dirname(__file__)
_TOKEN = 256  # characters; no tokenizer has a longer one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings that every environment has.

    Attributes:
      max_turns: most turns of the policy; the response ends with the last one, done or not.
      max_turn_len: most tokens of a turn; 0: what rollout.max_response_len leaves for it. That limit covers all turns
        and observations of a response. A turn cut off at its limit ends the response.
      max_observation_len: most tokens of an observation; the rest is cut off.
      role: role of an observation in the chat template.
      before, after: texts around an observation if data.template is not chat.
      timeout_s: seconds that a call may take.
    """

    max_turns: int = 4
    max_turn_len: int = 0
    max_observation_len: int = 512
    role: str = "user"
    before: str = "\n"
    after: str = "\n"
    jailed: ClassVar[bool] = False  # whether its processes run what a policy wrote
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        at_least(self, 1, "max_turns", "max_observation_len")
        at_least(self, 0, "max_turn_len")
        if not 0 < self.timeout_s <= 500:
            raise UserError(f"timeout_s must be above 0 and at most 500 seconds, got {self.timeout_s}.")

    def source(self) -> tuple[str, dict[str, Any]]:
        """Returns the import path of the environment's class, and the options it is constructed with."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calculator(Config):
    """A calculator that computes an expression between tags in a turn; a turn without one is the answer.

    Attributes:
      opening, closing: the tags around an expression.
    """

    opening: str = "<calc>"
    closing: str = "</calc>"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.opening or not self.closing:
            raise UserError("opening and closing must not be empty: they tell a call from an answer.")

    def source(self) -> tuple[str, dict[str, Any]]:
        return f"{_HERE}/_calculator.py:Environment", {"opening": self.opening, "closing": self.closing}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Python(Config):
    """Runs a turn's fenced code block in the jail of code rewards; a turn without one is the answer.

    Attributes:
      program_s: seconds that a program may take. memory_mb: its address space. max_chars: of its output.
    """

    jailed: ClassVar[bool] = True
    program_s: float = 5.0
    memory_mb: int = 1024
    max_chars: int = 4000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.program_s < self.timeout_s:
            raise UserError(f"program_s must be above 0 and below timeout_s={self.timeout_s:g}, got {self.program_s}.")

    def source(self) -> tuple[str, dict[str, Any]]:
        options = {name: getattr(self, name) for name in ("program_s", "memory_mb", "max_chars")}
        return f"{_HERE}/_python.py:Environment", options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Custom(Config):
    """A user-defined class. Attributes: path: package.module:Class or file.py:Class. options: its keyword arguments."""

    path: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        module, colon, name = self.path.rpartition(":")
        if not (colon and module and name.isidentifier()):
            raise UserError(f"path: expected package.module:Class or file.py:Class, got {self.path!r}.")

    def source(self) -> tuple[str, dict[str, Any]]:
        return self.path, self.options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verifiers(Config):
    """An environment of the package verifiers (0.1.14); see _verifiers.py. Its rubric scores the last turn.

    Attributes:
      id: name of an installed environment, as `verifiers.load_environment` takes it.
      arguments: keyword arguments of the environment.
    """

    id: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    def source(self) -> tuple[str, dict[str, Any]]:
        return f"{_HERE}/_verifiers.py:Environment", {"id": self.id, "arguments": self.arguments}


ENVIRONMENTS: dict[str, type] = {
    "calculator": Calculator,
    "python": Python,
    "verifiers": Verifiers,
    "custom": Custom,
}

Call = Mapping[str, Any]
Said = Mapping[str, Any]


class Episodes:
    """A client of the process that runs an environment's episodes (`_host.py`).

    Args:
      cfg: the environment's settings. Raises `UserError` at once if its class cannot be imported.
      say: called with lines for the user.
    """

    def __init__(self, cfg: Config, say: Callable[[str], None] = pool._tell):
        path, options = cfg.source()
        search = [entry or os.getcwd() for entry in sys.path]
        host = os.path.join(_HERE, "_host.py")
        most = _TOKEN * cfg.max_observation_len
        setup = base64.b64encode(pickle.dumps((search, host, path, options, cfg.timeout_s, most))).decode()
        limits = PoolConfig(workers=1, recycle_after=0, memory_mb=0)
        name = f"environment {path}"
        self._pool = WorkerPool("environment", limits, setup=setup, name=name, say=say, jailed=cfg.jailed)
        self._lock = threading.Lock()
        self._asked: dict[int, Future[Said]] = {}  # by episode
        self._host: Worker | None = None
        self._start()

    def ask(self, call: Call) -> Future[Said]:
        """Sends a call (`_host.py`) from any thread; returns its answer's future. An episode has one call at a time."""
        future: Future[Said] = Future()
        with self._lock:
            assert call["episode"] not in self._asked or len(call) == 1
            self._asked[call["episode"]] = future
            (self._host or self._start()).send(call)
        return future

    def close(self) -> None:
        """Ends the processes of all episodes. Idempotent."""
        if (host := self._host) is not None:
            host.kill()  # whoever waits for it goes on, and lets go of the lock
        with self._lock:
            self._pool.close()

    def _start(self) -> Worker:
        self._host = self._pool.start()
        threading.Thread(target=self._listen, args=(self._host,), name="environment", daemon=True).start()
        return self._host

    def _listen(self, host: Worker) -> None:
        assert host.process.stdout is not None
        with contextlib.suppress(ValueError):  # closed
            for line in host.process.stdout:
                answer = json.loads(line)
                future = self._asked.pop(answer.pop("episode"), None)
                if future is not None:
                    future.set_result(answer)
        with self._lock:
            self._pool.close()
            self._host, lost, self._asked = None, self._asked, {}
        for future in lost.values():
            future.set_result({"error": "the process that holds all episodes was ended"})


def plain(value: Any) -> Any:
    """Converts a prompt's meta to JSON; other values become text."""
    return json.loads(json.dumps(value, default=str))
