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
# And then, for low-bit words: the interpreter knows no assembly, whose few instructions follow, and no bfloat16
# arithmetic: decoded weights leave as float16, or what a program sets FLOAT to.
ASSEMBLED = """
import re
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

def both(binary):
    def half(*bits):
        given = [x.astype(np.uint16).view(ml_dtypes.bfloat16).astype(float) for x in map(np.asarray, bits)]
        return binary(*given).astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
    return lambda *words: half(*(w & 0xFFFF for w in words)) | half(*(w >> 16 for w in words)) << 16

def lop3(a, b, c, table):
    y = np.zeros_like(a)
    for row in range(8):  # of the table of truth: a, b, c
        if table >> row & 1:
            y |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return y

FLOAT = tl.float16
INSTRUCTIONS = {
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "shf.r.wrap.b32": lambda low, high, n: low >> n | high << 32 - n,
    "mul.lo.u32": lambda a, b: a * b,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": lambda a, b, c, table: lop3(a, b, c, int(table)),
    "mov.b32": lambda a: a,
    "mul.rn.bf16x2": both(lambda a, b: a * b),
    "fma.rn.bf16x2": both(lambda a, b, c: a * b + c),
}

def bits_of(x):
    data = np.asarray(x.handle.data)
    if data.dtype.kind == "f":
        assert (data.astype(ml_dtypes.bfloat16) == data).all()
        data = data.astype(ml_dtypes.bfloat16).view(np.uint16)
    return data.view(f"u{data.dtype.itemsize}").astype(np.uint32)

def assembled(program, kinds, args, dtype, is_pure, pack):
    program, kinds = (x.value if isinstance(x, tl.constexpr) else x for x in (program, kinds))
    if kinds == "=f,f":  # a move
        return args[0]
    outputs = len(dtype)
    assert kinds.count("=h") == outputs and pack == 1
    held = {f"${outputs + i}": data for i, data in enumerate(np.broadcast_arrays(*map(bits_of, args)))}
    for line in filter(None, (line.strip() for line in program.strip()[1:-1].split(";"))):
        if line.startswith(".reg"):
            continue
        name, operands = line.split(maxsplit=1)
        to, *given = re.findall(r"{[^}]*}|[^, ]+", operands)
        values = []
        for one in given:
            if one.startswith("{"):
                low, high = one.strip("{}").split(", ")
                values.append(held[low] | held[high] << 16)
            else:
                values.append(held[one] if one in held else np.uint32(int(one, 0)))
        result = INSTRUCTIONS[name](*values)
        if to.startswith("{"):
            low, high = to.strip("{}").split(", ")
            held[low], held[high] = result & 0xFFFF, result >> 16
        else:
            held[to] = result
    exact = [held[f"${i}"].astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32) for i in range(outputs)]
    as_ = np.dtype(FLOAT.name.replace("fp", "float"))
    assert all((x.astype(as_) == x).all() for x in exact)
    handles = [interpreter.TensorHandle(x.astype(as_), FLOAT) for x in exact]
    return tuple(tl.tensor(one, tl.block_type(FLOAT, list(one.data.shape))) for one in handles)

tl.inline_asm_elementwise = assembled
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
def forks(
    preamble: str, folder: pathlib.Path, environment: Mapping[str, str] | None = None
) -> Iterator[Callable[[str], str]]:
    """As `exits`, of programs that are to end with 0: a function that returns what one printed."""
    with exits(preamble, folder, environment) as ended:

        def run(program: str) -> str:
            code, said = ended(program)
            assert code == 0, f"exit code {code}: {said[-3000:]}"
            return said

        yield run
