# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs that each need a process of their own, forked from one that has imported what takes long to import."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping

ROOT = pathlib.Path(__file__).parents[2]
# What a program needs that runs the bridge's Triton kernels on a CPU; the modules of the bridge follow.
INTERPRETED = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
"""
# And then, for 4-bit words: the interpreter knows no assembly and no bfloat16 arithmetic; q s is exact in float16 too.
DECODED = """
import triton.language as tl

def decoder(value):
    def decoded(words, *scales):
        codes = [value((words >> 4 * i) & 15) for i in range(8)]
        products = [codes[i + 4 * e].to(tl.float32) * s.to(tl.float32) for i, s in enumerate(scales) for e in (0, 1)]
        return tuple(product.to(tl.float16) for product in products)
    return decoded

def float4(code):
    magnitude = code & 7  # q 2^-126 as the assembly has it, in float32
    bits = (magnitude << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 2.0**126

ops._decoded, ops._decoded_float4 = decoder(lambda code: code - 8), decoder(float4)
ops._finished = lambda acc: acc
"""
# Reads the names of files with programs, and answers each with its exit code.
_PARENT = """
import os, sys, traceback
for path in map(str.strip, sys.stdin):
    if (pid := os.fork()) == 0:
        code = 1
        try:
            out = os.open(path + ".out", os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(out, 1)
            os.dup2(out, 2)
            exec(compile(open(path).read(), path, "exec"), globals())
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@contextlib.contextmanager
def exits(
    preamble: str, folder: pathlib.Path, environment: Mapping[str, str] | None = None
) -> Iterator[Callable[[str], tuple[int, str]]]:
    """A function that runs a program after `preamble`, in a fork of one process: (exit code, what it printed)."""
    command = [sys.executable, "-c", textwrap.dedent(preamble) + _PARENT]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as parent:

        def run(program: str) -> tuple[int, str]:
            path = folder / f"{len(list(folder.iterdir()))}.py"
            path.write_text(textwrap.dedent(program))
            assert parent.stdin is not None
            assert parent.stdout is not None
            print(path, file=parent.stdin, flush=True)
            code = parent.stdout.readline().strip()
            assert code, f"the process that forks ended with {parent.wait()}"
            return int(code), path.with_suffix(".py.out").read_text()

        yield run
        assert parent.stdin is not None
        parent.stdin.close()


@contextlib.contextmanager
def forks(preamble: str, folder: pathlib.Path) -> Iterator[Callable[[str], str]]:
    """As `exits`, of programs that are to end with 0: a function that returns what one printed."""
    with exits(preamble, folder) as ended:

        def run(program: str) -> str:
            code, said = ended(program)
            assert code == 0, f"exit code {code}: {said[-3000:]}"
            return said

        yield run
