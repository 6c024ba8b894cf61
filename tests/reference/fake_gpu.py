# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""GPUs made of files and sockets (fake_libcuda.c, fake_libnccl.c), and what a bridge on one does with a version.

As a program, `python fake_gpu.py FOLDER -m qarl_bridge ARGUMENTS...`: a bridge whose fake engine has such a GPU,
another one than the trainer's where CUDA_VISIBLE_DEVICES says so.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from qarl_bridge import cli
from qarl_bridge.client import sender
from qarl_bridge.protocol import messages
from qarl_bridge.server import fake_engine
from qarl_bridge.server.staged import HostCopy
from qarl_bridge.transport import cuda_ipc, nccl

COMPILER = shutil.which("cc") or shutil.which("gcc")


def build(folder: os.PathLike[str] | str) -> tuple[str, str]:
    """Paths of the two libraries, compiled into `folder`; FAKE_CUDA_DIR must name it where they are used."""
    assert COMPILER is not None
    paths = []
    for name in ("libcuda", "libnccl"):
        source = pathlib.Path(__file__).parent / f"fake_{name}.c"
        paths.append(os.path.join(folder, f"{name}.so"))
        flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread"]
        subprocess.run([COMPILER, *flags, str(source), "-o", paths[-1]], check=True)
    return paths[0], paths[1]


def host_view(manifest: messages.Manifest, pointer: int, let_go: Callable[[], None], *, borrowed: bool) -> HostCopy:
    """A version in that GPU's memory, which is the host's."""
    size = sender.align(manifest.total_bytes)
    copy = HostCopy(manifest, np.frombuffer((ctypes.c_ubyte * size).from_address(pointer), np.uint8))
    copy.close = let_go  # type: ignore[method-assign]
    copy.borrowed = borrowed
    return copy


def opener(library_path: str) -> Callable[[messages.Manifest, messages.DeviceMemory], HostCopy]:
    """What a bridge on the trainer's GPU does."""
    library = cuda_ipc.load(library_path)
    mappings = cuda_ipc.Mappings(cuda_ipc.Device(0, library))

    def open_version(manifest: messages.Manifest, memory: messages.DeviceMemory) -> HostCopy:
        cuda_ipc.find(memory.device, library)
        pointer = mappings.open(memory.handle, sender.align(manifest.total_bytes))
        return host_view(manifest, pointer, lambda: mappings.close(memory.handle), borrowed=True)

    return open_version


def receiving(
    receiver: nccl.Receiver,
) -> Callable[[messages.Manifest, messages.NcclMemory, Callable[[], None]], HostCopy]:
    """What a bridge on another GPU does."""

    def receive(manifest: messages.Manifest, memory: messages.NcclMemory, check: Callable[[], None]) -> HostCopy:
        buffer = receiver.receive(memory, sender.align(manifest.total_bytes), check)
        return host_view(manifest, buffer.pointer, buffer.release, borrowed=False)

    return receive


class GpuEngine(fake_engine.FakeEngine):
    """A fake engine with a GPU; `folder` holds the libraries."""

    folder = ""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        library = cuda_ipc.load(os.path.join(self.folder, "libcuda.so"))
        device = cuda_ipc.Device(0, library)
        self.facts = msgspec.structs.replace(self.facts, device=device.uuid)
        self.mapper = opener(os.path.join(self.folder, "libcuda.so"))
        self.receiver = receiving(nccl.Receiver(device, nccl.load(os.path.join(self.folder, "libnccl.so"))))


def main(folder: str, *arguments: str) -> int:
    os.environ["FAKE_CUDA_GPU"] = os.environ.get("CUDA_VISIBLE_DEVICES", "")[:1] or "s"
    GpuEngine.folder = folder
    fake_engine.FakeEngine = GpuEngine  # type: ignore[misc]
    return cli.main(list(arguments[2:]))


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
