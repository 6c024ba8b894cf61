# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Python as a tool: runs the last fenced code block of a turn; the program's output is the observation.

The last block may use what the turn's other blocks define. A turn without a block is the answer. Every program starts
afresh in the jail and sandbox of code rewards (`rewards/jail.py`, `rewards/_sandbox.py`): it writes no files, reads
none of the user's, starts no processes, has no network, and its time and memory are bounded.
"""

import importlib.util
import os
import time


def _load(name):
    """A module of `rewards/`, by its file: the process imports nothing of qarl_jax."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "rewards", f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a .py file always has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_fences, _sandbox = _load("fences"), _load("_sandbox")
_sandbox.prepare(1024)  # raises OSError, as the process starts, where no program can be run safely


class Environment:
    """Runs a turn's code; `rollout/environments/__init__.py` defines the interface of an environment.

    Args:
      program_s: seconds that a program may take. memory_mb: limit of its address space. max_chars: limit of its output.
    """

    def __init__(self, program_s, memory_mb, max_chars):
        self.program_s, self.memory_mb, self.max_chars = program_s, memory_mb, max_chars

    async def reset(self, task):
        return ""

    def step(self, text):
        blocks = [block for language, block in _fences.blocks(text) if language in ("", *_fences.PYTHON)]
        if not blocks:
            return "", 0.0, True
        return self.run(*blocks)[: self.max_chars], 0.0, False

    def run(self, *blocks):
        """Returns the output of the last block, with the error that ended it. Earlier blocks may define its names."""
        program = None
        try:
            deadline = time.monotonic() + self.program_s
            program = _sandbox.Program(blocks[-1], deadline, self.memory_mb, beside=blocks[:-1], stdin="", tell=True)
            return program.output()
        except _sandbox.FailedError as error:
            return f"error: {error}"
        finally:
            if program is not None:
                program.stop()
