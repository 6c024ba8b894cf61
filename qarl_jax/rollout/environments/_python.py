# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Python as a tool: the last fenced block of a turn is run, and what it prints is observed.

A turn without one is the answer.
Every program runs anew, in the sandbox that grades code (`rewards/_sandbox.py`): no files written, no processes, no
network, bounded time and memory.
"""

import ctypes
import importlib.util
import re
import time

_FENCE = re.compile(r"^[ \t]*```(?:python|py)?[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


class Environment:
    """See `rollout/environments/__init__.py` for what an environment is.

    Args:
      sandbox: path of `_sandbox.py`.
      program_s: seconds that a program may take. memory_mb: its address space. max_chars: of its output.
    """

    def __init__(self, sandbox, program_s, memory_mb, max_chars):
        spec = importlib.util.spec_from_file_location("sandbox", sandbox)
        assert spec is not None  # a .py file always has a loader
        assert spec.loader is not None
        self.sandbox = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.sandbox)
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: /proc shows a program nothing of this process
        self.program_s, self.memory_mb, self.max_chars = program_s, memory_mb, max_chars

    async def reset(self, task):
        return ""

    def step(self, text):
        blocks = _FENCE.findall(text)
        if not blocks:
            return "", 0.0, True
        return self.run(blocks[-1])[: self.max_chars], 0.0, False

    def run(self, code):
        """What a program prints; the error that ended it is part of that."""
        program = None
        try:
            deadline = time.monotonic() + self.program_s
            program = self.sandbox.Program(code, deadline, self.memory_mb, stdin="", tell=True)
            return program.output()
        except self.sandbox.FailedError as error:
            return f"error: {error}"
        finally:
            if program is not None:
                program.stop()
